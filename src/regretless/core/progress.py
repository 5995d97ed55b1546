"""Progress bars: of this process on its terminal, or sent to the process that shows those of several."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from regretless.core.files import write_json
from regretless.core.terminal import console

Note = Callable[[], str]
BETWEEN = 0.1
"""Least time between two messages about a bar that is sent, in seconds."""
BETWEEN_LINES = 60.0
"""Seconds between two lines about a bar where no terminal shows it."""
BETWEEN_WRITES = 1.0
"""Seconds between two writes of these lines to a file (`written_to`)."""
STEPS = "steps"
"""Unit of the bars of training."""
BETWEEN_MOMENTS, WINDOW = 5.0, 600.0
"""Seconds between the moments that a bar's speed is computed from, and how far they go back."""


class Advance(Protocol):
    """Reports that so many more items (responses, rows) are done, and the tokens that they have."""

    def __call__(self, amount: int, tokens: int = 0, /) -> None: ...


class Tally:
    """Sums up what is reported to it."""

    def __init__(self) -> None:
        self.done = self.tokens = 0

    def __call__(self, amount: int, tokens: int = 0, /) -> None:
        """Add items and their tokens."""
        self.done += amount
        self.tokens += tokens


@dataclass(frozen=True)
class BarState:
    """A progress bar as it is at one moment."""

    number: int
    """Which of its process's bars it is."""
    description: str
    total: int | None
    done: int
    note: str = ""
    is_over: bool = False
    tokens: int = 0
    """Of the items that were done since the bar began, or of all at work where more of them were drawn (`drew`)."""
    unit: str = "rows"
    """What the items are."""


class _Moment(NamedTuple):
    time: float
    done: int
    tokens: int


class Pace:
    """How fast the items of a bar come, by the last ten minutes, and when the last one will.

    Where no item came in so long, as from a cluster that reports whole units, the time since the last ones counts.
    """

    def __init__(self, state: BarState, clock: Callable[[], float] = time.monotonic) -> None:
        self.state, self._clock = state, clock
        self._moments = deque([_Moment(clock(), state.done, state.tokens)])

    def update(self, state: BarState) -> None:
        """Take over a later state of the bar."""
        self.state = state
        now = _Moment(self._clock(), state.done, state.tokens)
        if now.time - self._moments[-1].time >= BETWEEN_MOMENTS:
            self._moments.append(now)
        while now.time - self._moments[0].time > WINDOW and len(self._moments) > 2 and self._moments[1].done < now.done:
            self._moments.popleft()

    @property
    def speed(self) -> str:
        """Tokens per second, else items per second, and the time that is left; empty within the first second."""
        first, state = self._moments[0], self.state
        seconds, done, tokens = self._clock() - first.time, state.done - first.done, state.tokens - first.tokens
        if seconds < 1 or (done <= 0 and tokens <= 0):
            return ""
        count, unit = (tokens, "tokens") if state.tokens else (done, state.unit)
        rate = count / seconds
        text = f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.2g} {unit}/s"
        if state.total is None or state.done >= state.total or done <= 0:
            return text
        return f"{text}, {timedelta(seconds=round((state.total - state.done) * seconds / done))} left"

    def line(self, name: str) -> str:
        """All of it as a line of text."""
        state = self.state
        count = f"{state.done:,} {state.unit}"
        if state.total:
            count = f"{state.done:,} of {state.total:,} {state.unit} ({state.done / state.total:.0%})"
        return ", ".join(filter(None, (f"{name}: {count}", self.speed, state.note)))


class _NoteColumn(ProgressColumn):
    """The pace of the task's field of this name, and the note of its state."""

    def render(self, task: Task) -> Text:
        pace: Pace = task.fields["pace"]
        return Text(", ".join(filter(None, (pace.speed, pace.state.note))), no_wrap=True, overflow="ellipsis")


def _progress(*, is_kept: bool) -> Progress:
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _NoteColumn(),
    )
    # While a bar is shown, rich prints what others write above it. A notebook's kernel flushes standard error before it
    # displays a bar: rich would print again, without end. There, texts have a place of their own anyway.
    redirect = not console.is_jupyter
    return Progress(
        *columns, console=console, redirect_stdout=redirect, redirect_stderr=redirect, transient=not is_kept
    )


_file: Path | None = None


@contextlib.contextmanager
def written_to(file: Path) -> Iterator[None]:
    """For the block, `file` has a line about each bar at work but those of training, which has a log; none, no file.

    It is JSON, a list of texts, for other processes to read. A block inside this one changes nothing.
    """
    global _file  # noqa: PLW0603 a property of the process
    if _file is not None:
        yield
        return
    file.unlink(missing_ok=True)  # of a process that was killed
    _file = file
    try:
        yield
    finally:
        _file = None


class _Lines:
    """Within the block, a line about each bar at work: every minute, where no terminal draws bars, and in the file."""

    def __init__(self, bars: Callable[[], Mapping[str, Pace]]) -> None:
        self._bars = bars
        self._file = _file
        prints = not (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal))
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work, is_asked in ((self._print, prints), (self._write, self._file is not None))
            if is_asked
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _print(self) -> None:
        while not self._over.wait(BETWEEN_LINES):
            for name, pace in self._bars().items():
                console.print(pace.line(name), soft_wrap=True)

    def _write(self) -> None:
        assert self._file is not None
        while not self._over.wait(BETWEEN_WRITES):
            lines = [pace.line(name) for name, pace in self._bars().items() if pace.state.unit != STEPS]
            with contextlib.suppress(OSError):  # a full disk stops no work that does not need it
                write_json(self._file, lines) if lines else self._file.unlink(missing_ok=True)


@contextlib.contextmanager
def bar(
    description: str, total: int | None, done: int = 0, note: Note = lambda: "", unit: str = "rows"
) -> Iterator[Advance]:
    """A progress bar of `total` items (None: unknown); the value of the block advances it by a number of items.

    A terminal draws it; elsewhere a line says every minute how far it is; a child process sends it to its parent.
    done: items of earlier runs. note: returns the text behind the bar, called whenever it moves. unit: what items are.
    """
    state = BarState(next(_numbers), description, total, done, note(), unit=unit)
    of_done = drawn = 0
    with (_drawn if _send is None else _sent)(state) as show:

        def advance(amount: int, tokens: int = 0, /) -> None:
            nonlocal state, of_done
            of_done += tokens
            state = replace(state, done=state.done + amount, tokens=max(of_done, drawn), note=note())
            show(state)

        def draw(tokens: int) -> None:
            nonlocal drawn
            if unit != STEPS:  # answers that a training logs
                drawn += tokens
                advance(0)

        _drawing.append(draw)
        try:
            yield advance
        finally:
            _drawing.remove(draw)
            show(replace(state, note=note()))


_drawing: list[Callable[[int], None]] = []
"""Of each bar of this process, the last opened at the end."""


def drew(tokens: int) -> None:
    """Tell the innermost bar of this process that so many tokens were drawn, of items that need not be done yet."""
    if _drawing:
        _drawing[-1](tokens)


@contextlib.contextmanager
def _drawn(state: BarState) -> Iterator[Callable[[BarState], None]]:
    pace = Pace(state)
    with _progress(is_kept=True) as progress, _Lines(lambda: {state.description: pace}):
        task = progress.add_task(state.description, total=state.total, completed=state.done, pace=pace)

        def show(moved: BarState) -> None:
            pace.update(moved)
            progress.update(task, completed=moved.done)

        yield show


# --- bars of other processes ------------------------------------------------------------------------------------------


_send: Callable[[BarState], None] | None = None
_numbers = itertools.count()


def send_bars(send: Callable[[BarState], None]) -> None:
    """From now on, call `send` with the state of this process's bars instead of showing them."""
    global _send  # noqa: PLW0603 a property of the process
    _send = send


@contextlib.contextmanager
def _sent(state: BarState) -> Iterator[Callable[[BarState], None]]:
    assert _send is not None
    send, last, sent = _send, state, time.monotonic()

    def show(moved: BarState) -> None:
        nonlocal last, sent
        last = moved
        if time.monotonic() - sent >= BETWEEN:
            sent = time.monotonic()
            send(moved)

    send(state)
    try:
        yield show
    finally:
        send(replace(last, is_over=True))


class SharedBars:
    """The bars of several processes below each other, and their lines above. A bar that is over joins the lines."""

    def __init__(self) -> None:
        # In a notebook nothing can be printed above a bar.
        self._progress = _progress(is_kept=console.is_jupyter)
        self._tasks: dict[tuple[str, int], tuple[TaskID, Pace]] = {}
        self._lines = _Lines(self._paces)

    def __enter__(self) -> Self:
        self._progress.start()
        self._lines.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.__exit__()
        self.forget()
        self._progress.live.stop()  # the progress's own `stop` adds an empty line, to end that of a bar

    def say(self, text: str) -> None:
        """Print a line of a process, which may hold the codes of colors."""
        console.print(Text.from_ansi(text), soft_wrap=True)

    def show(self, process: str, state: BarState) -> None:
        """Show a bar of a process as it is now."""
        key = (process, state.number)
        if key not in self._tasks:
            pace = Pace(state)
            task = self._progress.add_task(
                f"{process}: {state.description}", total=state.total, completed=state.done, pace=pace
            )
            self._tasks[key] = task, pace
        task, pace = self._tasks[key]
        pace.update(state)
        self._progress.update(task, completed=state.done)
        if state.is_over:
            self._leave(key)

    def forget(self, process: str | None = None) -> None:
        """Leave the bars of a process (by default of all) as they are: it is gone."""
        for key in [key for key in self._tasks if process in (None, key[0])]:
            self._leave(key)

    def _paces(self) -> dict[str, Pace]:
        return {f"{process}: {pace.state.description}": pace for (process, _), (_, pace) in [*self._tasks.items()]}

    def _leave(self, key: tuple[str, int]) -> None:
        number, _ = self._tasks.pop(key)
        (task,) = [task for task in self._progress.tasks if task.id == number]
        task.stop_time = task.get_time()
        if not console.is_jupyter:
            row = self._progress.make_tasks_table([task])
            self._progress.remove_task(number)
            console.print(row)
