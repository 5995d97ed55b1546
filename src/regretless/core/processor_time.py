"""Bounds the processor time of a part of a program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _OutOfTime(BaseException):
    """Not an Exception: libraries that parse try one way after another and swallow those."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this much processor time, in the main thread.

    Processor time and not wall-clock time, because a result must not depend on the machine's load. A signal interrupts
    only the main thread; elsewhere, and inside C code, the caller has to limit the time. A block that swallowed the
    interruption and ended with a result of what was left raises too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    late = False

    def end(_: int, frame: FrameType | None) -> None:
        nonlocal late
        late = True
        # Not where the block is being left: this function, and the module that calls it at the block's end.
        if frame is not None and frame.f_code.co_filename not in (__file__, contextlib.__file__):
            raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, end)
    # Again and again: an interruption is lost where Python ignores exceptions, such as in a destructor.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    except _OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if late:
        raise TimeoutError
