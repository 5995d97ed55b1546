"""What a part of a program, and the processes that it starts, write to standard error: shown, and its end kept."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

KEPT = 1 << 18
"""Bytes of the end that are kept."""
PATIENCE = 2.0
"""Seconds to wait for the last lines of a block that failed."""


@contextlib.contextmanager
def kept_stderr() -> Iterator[bytearray]:
    """Within the block, what is written to standard error is also appended to a buffer, which keeps its end.

    Processes that outlive the block go on writing through it.
    """
    kept, original = bytearray(), os.dup(2)
    reading, writing = os.pipe()

    def copy() -> None:
        # Until the last process that has the other end is gone.
        while block := os.read(reading, 1 << 16):
            os.write(original, block)
            kept.extend(block)
            del kept[:-KEPT]

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield kept
    except BaseException:
        os.dup2(original, 2)
        thread.join(PATIENCE)
        raise
    os.dup2(original, 2)
