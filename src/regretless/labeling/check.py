"""What a verifier is: a full check that may use slow libraries, and a quick one that needs none."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from regretless.data.records import Verdict


@dataclass(frozen=True)
class Check:
    """Outcome of comparing one response with its gold answer."""

    verdict: Verdict
    reason: str
    """A fixed phrase, countable; details follow behind a colon."""
    extracted: str | None = None
    """What was taken for the response's answer."""


@dataclass(frozen=True)
class Verifier:
    """Two functions of (response, gold answer)."""

    check: Callable[[str, str], Check]
    """Decides any row. Runs in a worker process, which finds it by module and name: a function at the top of a module.
    It may raise, hang or crash its process: that row's verdict is then unknown. Slow imports belong into the module's
    `warm_up()`, which a worker calls before its first row, outside the row's time limit."""
    quick: Callable[[str, str], Check | None] = lambda response, answer: None
    """Decides what it can in bounded time without heavy imports, as `check` would; None leaves the row to `check`."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when it has taken so much of the processor's time, in the main thread.

    Not time on the clock: a verdict must not depend on what else the machine does. A signal can interrupt the main
    thread only; elsewhere, and within C code, the caller has to limit the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
