"""Ctrl-C on the command line: one press ends the process, with one line that says what happens to the work.

An exception would not be reliable: if it is raised while the garbage collector runs, in a destructor or during an
import, it is swallowed, and the press is lost. Work survives `kill -9` at any moment (`core/files.py`), so the process
simply ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_CODE = 130
"""Exit code that shells use for a process ended by Ctrl-C."""
SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides it."""
_lines = ["interrupted: no file is left half written; the same command resumes"]


@contextmanager
def handled() -> Iterator[None]:
    """A block in which Ctrl-C ends the process at once. Nothing changes outside the main thread, or under nohup."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def saying(line: str) -> Iterator[None]:
    """A block in which Ctrl-C prints this line."""
    _lines.append(line)
    try:
        yield
    finally:
        _lines.pop()


def _end(_signal: int, _frame: FrameType | None) -> None:
    # Several processes all receive the signal, and one prints. It bypasses Python's buffers: one may be in use.
    if os.environ.get("RANK", "0") == "0":
        terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
        text = f"\n{SHOW_CURSOR}{_lines[-1]}\n" if terminal else f"{_lines[-1]}\n"
        with suppress(OSError):  # the reader may be gone
            os.write(2, text.encode(errors="backslashreplace"))
    os._exit(EXIT_CODE)
