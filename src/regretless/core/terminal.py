"""Messages on the terminal, in one style for all stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from regretless.core.ranks import is_first_process
from regretless.core.secrets import hide_known
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
        text = hide_known(text)
        if text.isascii() or self.encoding.startswith("utf"):
            return printable(text)
        # Some terminals cannot print Greek letters (LANG=C).
        return printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding)


def terminal(*, stderr: bool = False, **options: Any) -> Console:
    """A console for results (standard output) or messages (standard error); brackets in texts are not markup."""
    return _Terminal(stderr=stderr, markup=False, emoji=False, highlight=False, **options)


console = terminal(stderr=True)
"""For messages."""


def print_note(text: str) -> None:
    """Print a message that deserves attention, on the first process only; as one line, which the terminal wraps."""
    if is_first_process():
        console.print(text, style="yellow", soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as one JSON document, in ASCII, which no filter of `terminal` changes. NaN is a ValueError."""
    terminal().print(json.dumps(value, indent=2, allow_nan=False, default=str), soft_wrap=True)


class FoldingTable(Table):
    """A table in which a text that does not fit is continued on the next line; rich would cut it."""

    def __init__(self, *headers: str, **options: Any) -> None:
        super().__init__(**options)
        for header in headers:
            self.add_column(header)

    def add_column(self, *args: Any, **options: Any) -> None:
        """Add a column, which folds unless its options say something else."""
        super().add_column(*args, **{"overflow": "fold", **options})
