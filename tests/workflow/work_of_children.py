"""Work for processes of their own. Light to import."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

from regretless.core.errors import ConfigError
from regretless.core.progress import bar
from regretless.core.terminal import console
from regretless.workflow.run_folder import RunFolder

LOGGER = logging.getLogger("of the process that is forked")
LOGGER.addHandler(logging.StreamHandler())


class OddError(Exception):
    """It cannot be sent to another process."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = lambda: second


def talk(text: str) -> tuple[str, str]:
    """Write in every way, with a progress bar; returns a variable of the environment, and the working directory."""
    print(f"printed {text}")
    console.print(f"on the console: {text} ≥ 0", style="yellow")
    LOGGER.warning("logged")
    with bar("things", 3, done=1) as advance:
        advance(2)
    os.write(2, b"no end of line")
    return os.environ["OF_THIS_TEST"], str(Path.cwd())


def fail(kind: str) -> None:
    """End badly."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    bug = KeyError("http://me:password@host")
    raise {"known": ConfigError("two: wrong", ["wrong"]), "bug": bug, "odd": OddError("a", "b")}[kind]


def hold(folder: Path, seconds: float) -> None:
    """Work in a run folder as a process of the run that has locked it, and survive that run."""
    with RunFolder(folder).joined():
        (folder / "held").touch()
        time.sleep(seconds)
        (folder / "left").touch()


if __name__ == "__main__":
    hold(Path(sys.argv[1]), float(sys.argv[2]))
