"""Work in processes of their own, several at a time. They end with this process, however it ends.

Each is forked from one process that has imported what the work needs, so that imports are paid for once. What a child
writes to standard output or error, its progress bars and its outcome come back through pipes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from regretless.core.progress import BarState, send_bars
from regretless.core.secrets import hide
from regretless.workflow.python_process import multiprocessing_starts

CHUNK = 1 << 16
ORIGIN = "regretless.workflow.fork_origin"


@dataclass(frozen=True)
class Line:
    """A line that a child wrote to standard output or error."""

    child: str
    text: str


@dataclass(frozen=True)
class BarMoved:
    """A progress bar of a child, as it is now."""

    child: str
    bar: BarState


@dataclass(frozen=True)
class Ended:
    """A child is gone."""

    child: str
    value: Any = None
    """What its work returned."""
    error: Exception | None = None
    """What its work raised; its cause holds the child's traceback."""
    exit_code: int | None = None
    """Set if it ended without returning or raising; negative: the number of the signal that ended it."""


Event = Line | BarMoved | Ended


class ChildTraceback(Exception):
    """The traceback of an error in a child, as text."""


@dataclass
class _Child:
    process: BaseProcess
    messages: Connection
    output: Connection | None
    partial: bytes = b""
    result: dict[str, Any] = field(default_factory=dict)


class Children:
    """Processes at work, by name. At the end of the block, those still at work are ended."""

    def __init__(self, preload: Sequence[str]) -> None:
        """preload: modules to import once for all. The first `Children` at work in this process decides for later ones,
        which may then have to import theirs in each child."""
        self._context = multiprocessing.get_context("forkserver")
        self._preload = [*preload, ORIGIN]
        self._running: dict[str, _Child] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._running.values():
            child.messages.close()
        for name in list(self._running):
            child = self._running.pop(name)
            child.process.join()
            if child.output is not None:
                child.output.close()

    def __len__(self) -> int:
        return len(self._running)

    def import_ahead(self) -> None:
        """Let the imports begin, beside this process's own work."""
        self._context.set_forkserver_preload(self._preload)
        with multiprocessing_starts():
            resource_tracker.ensure_running()  # which would unblock the signal again
            with _unseen_main(), _no_interrupt():
                forkserver.ensure_running()

    def start(self, name: str, work: Callable[..., Any], *arguments: Any, log: Path | None = None) -> None:
        """Call `work(*arguments)`, a function of a module, in a new process.

        log: the file to append its output to, instead of sending it here; its progress bars then go there too.
        """
        ours, theirs = self._context.Pipe()
        output, writer = (None, None) if log is not None else self._context.Pipe(duplex=False)
        self.import_ahead()
        # Pickled apart from the rest: the child unpickles it after it has this process's `sys.path`.
        task = pickle.dumps((work, arguments))
        process = self._context.Process(
            target=_run, args=(theirs, writer or log, dict(os.environ), list(sys.path), task), name=name
        )
        with _unseen_main():
            process.start()
        theirs.close()
        if writer is not None:
            writer.close()
        self._running[name] = _Child(process, ours, output)

    def events(self, timeout: float | None = None) -> list[Event]:
        """What has happened since the last call; waits for something, at most `timeout` seconds."""
        by_pipe: dict[Any, str] = {}
        for name, child in self._running.items():
            by_pipe |= {child.messages: name} | ({} if child.output is None else {child.output: name})
        events: list[Event] = []
        ready = wait(list(by_pipe), timeout)
        # Output first: what was written before the end is reported before it.
        for pipe in sorted(ready, key=lambda pipe: pipe is self._running[by_pipe[pipe]].messages):
            name = by_pipe[pipe]
            child = self._running[name]
            events += self._message(name, child) if pipe is child.messages else _lines(name, child)
        return events

    def _message(self, name: str, child: _Child) -> Iterator[Event]:
        try:
            message = child.messages.recv()
        except (EOFError, OSError):
            yield from self._end(name, child)
            return
        if isinstance(message, BarState):
            yield BarMoved(name, message)
        else:
            child.result = message

    def _end(self, name: str, child: _Child) -> Iterator[Event]:
        del self._running[name]
        child.process.join()
        child.messages.close()
        # Not until its end: programs that the child has started may keep it open.
        while child.output is not None and wait([child.output], 0):
            yield from _lines(name, child)
        if child.output is not None:
            child.output.close()
        if child.partial:
            yield Line(name, child.partial.decode(errors="backslashreplace"))
        if not child.result:
            yield Ended(name, exit_code=child.process.exitcode)
            return
        error = child.result["error"]
        if error is not None:
            error.__cause__ = ChildTraceback(f"\n{child.result['traceback']}")
        yield Ended(name, child.result["value"], error)


def _lines(name: str, child: _Child) -> Iterator[Event]:
    assert child.output is not None
    data = os.read(child.output.fileno(), CHUNK)
    if not data:
        child.output.close()
        child.output = None
    *whole, child.partial = (child.partial + data).split(b"\n")
    for line in whole:
        yield Line(name, line.decode(errors="backslashreplace"))


@contextlib.contextmanager
def _unseen_main() -> Iterator[None]:
    """A block in which new processes do not learn of this one's main module: they would run an unguarded script."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """A block in which new processes start with SIGINT blocked, so that they answer none before they can."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the child ----------------------------------------------------------------------------------------------------


def _run(
    parent: Connection,
    output: Connection | Path,
    environment: Mapping[str, str],
    paths: Sequence[str],
    task: bytes,
) -> None:
    # Those of the process it is forked from are older.
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = paths
    # A terminal's Ctrl-C reaches all its processes: the parent answers, and this one ends with it. Not SIG_IGN, which
    # programs that this process starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _redirect(output)
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending:
            parent.send(message)

    if isinstance(output, Connection):
        send_bars(send)
    result: dict[str, Any] = {"value": None, "error": None, "traceback": ""}
    try:
        work, arguments = pickle.loads(task)
        result["value"] = work(*arguments)
    except Exception as error:
        result |= {"error": portable(error), "traceback": hide(traceback.format_exc())}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    send(result)
    sys.exit(result["error"] is not None)


def _redirect(output: Connection | Path) -> None:
    with contextlib.ExitStack() as stack:
        if isinstance(output, Path):
            target = stack.enter_context(output.open("ab", buffering=0)).fileno()
        else:
            target = stack.enter_context(output).fileno()
        os.dup2(target, 1)
        os.dup2(target, 2)
    # New ones: those of the process that this one is forked from may take what they write to for a file.
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )


def _end_with(parent: Connection) -> None:
    """End this process as soon as the one that started it is gone, or lets go of it."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's own code is called, which may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
