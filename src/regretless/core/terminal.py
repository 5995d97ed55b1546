"""Progress bars and messages on the terminal, in one style for all stages."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from regretless.core.text_cleaning import printable


class _Terminal(Console):
    """A console on which texts from rows, columns and file names cannot control the terminal.

    All output passes `render`: messages, tables and progress bars. Control codes of rich itself are marked as such,
    and stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else self._shown(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)

    def _shown(self, text: str) -> str:
        if text.isascii() or self.encoding.startswith("utf"):
            return printable(text)
        # Some terminals cannot print Greek letters (LANG=C).
        return printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding)


def terminal(*, stderr: bool = False, **options: Any) -> Console:
    """A console for results (standard output) or messages (standard error); brackets in texts are not markup."""
    return _Terminal(stderr=stderr, markup=False, emoji=False, highlight=False, **options)


console = terminal(stderr=True)
"""For messages."""


def never_fail_to_print() -> None:
    """Print characters that the encoding of standard output or error lacks as escapes (\\u2265 for ≥), without errors.

    For programs to call at their start: a terminal's encoding must not cost hours of work.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Note(ProgressColumn):
    """A text that changes while the bar runs."""

    def __init__(self, note: Callable[[], str]) -> None:
        super().__init__()
        self.note = note

    def render(self, task: Task) -> Text:
        return Text(self.note(), no_wrap=True, overflow="ellipsis")


@contextlib.contextmanager
def bar(
    description: str, total: int | None, done: int = 0, note: Callable[[], str] | None = None
) -> Iterator[Callable[[int], None]]:
    """A progress bar of `total` items (None: unknown); the value of the block advances it by a number of items.

    note: returns the text behind the bar, called at every refresh.
    """
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *([_Note(note)] if note is not None else []),
    )
    # While a bar is shown, rich prints what others write above it. A notebook's kernel flushes standard error before it
    # displays a bar: rich would print again, without end. There, texts have a place of their own anyway.
    redirect = not console.is_jupyter
    with Progress(*columns, console=console, redirect_stdout=redirect, redirect_stderr=redirect) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda amount: progress.advance(task, amount)
