"""Entry point of the command line: `regretless`, and `python -m regretless` for launchers such as torchrun."""

from __future__ import annotations

import logging
import os
import sys

from regretless.core import interrupt


def main() -> None:
    """Run the command line and end the process."""
    # peft imports bitsandbytes, which then advises another package for products in 4 bits, also where there are none.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with interrupt.handled():
        from regretless.cli import app  # inside, so that Ctrl-C is handled while this loads

        try:
            app.main()
        except SystemExit as end:
            if os.environ.get("WORLD_SIZE", "1") == "1":
                raise
            # One of several processes: nothing is left to do. Destroying torch's gloo groups can deadlock: a thread
            # waits for the interpreter lock while the lock's holder waits for that thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
