"""`python -m regretless`, for launchers that start a module: torchrun, accelerate."""

from __future__ import annotations

import os
import sys

from regretless.cli import main

try:
    main()
except SystemExit as end:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise
    # One of several processes: nothing is left to do, and taking torch's gloo groups apart can hang, with a thread
    # that waits for Python's lock while the lock's holder waits for the thread.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
