"""Independent units of work, done in this process or by the workers of a cluster (`workflow.cluster`).

A unit's result is the files that it writes, so that it does not matter who did it, or how often: a unit that was done
before is left as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from regretless.core.progress import Advance

U = TypeVar("U")
Worker = Callable[[U, Advance], None]
"""Does one unit."""


@dataclass(frozen=True)
class Need:
    """What one worker for a kind of work needs."""

    kind: str
    """Key of the kind in the recipe's section `cluster`."""
    gpus: int = 0
    """GPUs that one worker uses, if there are any."""


class Executor(Protocol):
    """Where units are done."""

    def workers(self, need: Need) -> int:
        """Number of workers that would do such work at the same time."""

    def run(self, need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], advance: Advance) -> None:
        """Do all units: each worker is made once, by `make`. Raises what a worker raises."""


class InThisProcess:
    """The executor of a run without a cluster: one worker, one unit after another."""

    def workers(self, need: Need) -> int:
        """One: this process."""
        return 1

    def run(self, need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], advance: Advance) -> None:
        """Do all units, in order."""
        if not units:
            return
        with contextlib.ExitStack() as stack:
            worker = make()
            if isinstance(worker, contextlib.AbstractContextManager):
                stack.enter_context(worker)
            for unit in units:
                worker(unit, advance)


_executor: Executor = InThisProcess()
_cpus: int | None = None


def executor() -> Executor:
    """Where this run does its units."""
    return _executor


@contextlib.contextmanager
def done_by(new: Executor) -> Iterator[None]:
    """Do units there, within the block."""
    global _executor  # noqa: PLW0603 one run per process; passing it through every stage would buy nothing
    before, _executor = _executor, new
    try:
        yield
    finally:
        _executor = before


def cpus() -> int:
    """CPU cores that this process may keep busy: its share of a node's where it is a cluster's worker."""
    return _cpus or os.cpu_count() or 1


def limit_cpus(count: int) -> None:
    """Set the share of the node's CPU cores that this process, a worker, may keep busy."""
    global _cpus  # noqa: PLW0603 a property of the process
    _cpus = count
