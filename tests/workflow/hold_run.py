"""Holds the lock of a run folder until its standard input ends."""

import sys
from pathlib import Path

from regretless.workflow.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
