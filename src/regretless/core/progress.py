"""Progress bars: of this process on its terminal, or sent to the process that shows those of several."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from regretless.core.terminal import console

Note = Callable[[], str]
BETWEEN = 0.1
"""Least time between two messages about a bar that is sent, in seconds."""


class _NoteColumn(ProgressColumn):
    """A text that changes while the bar runs: what the task's field `note` returns."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"](), no_wrap=True, overflow="ellipsis")


def _progress(*, has_notes: bool, is_kept: bool) -> Progress:
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *([_NoteColumn()] if has_notes else []),
    )
    # While a bar is shown, rich prints what others write above it. A notebook's kernel flushes standard error before it
    # displays a bar: rich would print again, without end. There, texts have a place of their own anyway.
    redirect = not console.is_jupyter
    return Progress(
        *columns, console=console, redirect_stdout=redirect, redirect_stderr=redirect, transient=not is_kept
    )


@contextlib.contextmanager
def bar(
    description: str, total: int | None, done: int = 0, note: Note | None = None
) -> Iterator[Callable[[int], None]]:
    """A progress bar of `total` items (None: unknown); the value of the block advances it by a number of items.

    note: returns the text behind the bar, called at every refresh.
    """
    if _send is not None:
        with _sent(_send, BarState(next(_numbers), description, total, done), note or _nothing) as advance:
            yield advance
        return
    with _progress(has_notes=note is not None, is_kept=True) as progress:
        task = progress.add_task(description, total=total, completed=done, note=note)
        yield lambda amount: progress.advance(task, amount)


# --- bars of other processes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BarState:
    """A progress bar of another process, as it is at one moment."""

    number: int
    """Which of that process's bars it is."""
    description: str
    total: int | None
    done: int
    note: str = ""
    is_over: bool = False


_send: Callable[[BarState], None] | None = None
_numbers = itertools.count()


def send_bars(send: Callable[[BarState], None]) -> None:
    """From now on, call `send` with the state of this process's bars instead of showing them."""
    global _send  # noqa: PLW0603 a property of the process
    _send = send


def _nothing() -> str:
    return ""


@contextlib.contextmanager
def _sent(send: Callable[[BarState], None], state: BarState, note: Note) -> Iterator[Callable[[int], None]]:
    sent = time.monotonic()

    def advance(amount: int) -> None:
        nonlocal state, sent
        state = replace(state, done=state.done + amount)
        if time.monotonic() - sent >= BETWEEN:
            sent = time.monotonic()
            send(replace(state, note=note()))

    send(replace(state, note=note()))
    try:
        yield advance
    finally:
        send(replace(state, note=note(), is_over=True))


class SharedBars:
    """The bars of several processes below each other, and their lines above. A bar that is over joins the lines."""

    def __init__(self) -> None:
        # In a notebook nothing can be printed above a bar.
        self._progress = _progress(has_notes=True, is_kept=console.is_jupyter)
        self._tasks: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()
        self._progress.live.stop()  # the progress's own `stop` adds an empty line, to end that of a bar

    def say(self, text: str) -> None:
        """Print a line of a process, which may hold the codes of colors."""
        console.print(Text.from_ansi(text), soft_wrap=True)

    def show(self, process: str, state: BarState) -> None:
        """Show a bar of a process as it is now."""
        key = (process, state.number)
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(
                f"{process}: {state.description}", total=state.total, completed=state.done, note=lambda: state.note
            )
        self._progress.update(self._tasks[key], completed=state.done, note=lambda: state.note)
        if state.is_over:
            self._leave(key)

    def forget(self, process: str | None = None) -> None:
        """Leave the bars of a process (by default of all) as they are: it is gone."""
        for key in [key for key in self._tasks if process in (None, key[0])]:
            self._leave(key)

    def _leave(self, key: tuple[str, int]) -> None:
        number = self._tasks.pop(key)
        (task,) = [task for task in self._progress.tasks if task.id == number]
        task.stop_time = task.get_time()
        if not console.is_jupyter:
            row = self._progress.make_tasks_table([task])
            self._progress.remove_task(number)
            console.print(row)
