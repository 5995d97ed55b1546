"""Ctrl-C on the command line: one press ends the process, and one line says what is kept.

An exception is no way to do it: raised while the garbage collector runs, in a destructor or in the middle of an import
it is swallowed, and the press is lost. Work survives `kill -9` at any moment (`core/files.py`), so the process just
ends.
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
"""What shells give for a process that Ctrl-C ended."""
SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides it."""
_lines = ["interrupted: no file is left half written; the same command goes on from what is there"]


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
    """A block in which this is the line that Ctrl-C leaves."""
    _lines.append(line)
    try:
        yield
    finally:
        _lines.pop()


def _end(_signal: int, _frame: FrameType | None) -> None:
    # Of several processes, which all get the signal, one speaks. Past Python's own buffers: one may be in use.
    if os.environ.get("RANK", "0") == "0":
        terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
        text = f"\n{SHOW_CURSOR}{_lines[-1]}\n" if terminal else f"{_lines[-1]}\n"
        with suppress(OSError):  # nobody may be reading any more
            os.write(2, text.encode(errors="backslashreplace"))
    os._exit(EXIT_CODE)
