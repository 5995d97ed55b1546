"""Rejected rows: source, line and reason, and their report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from regretless.core.errors import DataError
from regretless.core.files import write_jsonl
from regretless.core.terminal import print_note
from regretless.core.text_cleaning import one_line
from regretless.data.columns import Text

T = TypeVar("T")
REPORTED = 20
"""Refused rows that the terminal shows."""
IN_ERROR = 3
"""Reasons that an error quotes."""
LINES = 5
"""Lines that are named for one reason."""


@dataclass(frozen=True)
class Refusal:
    """An input row that cannot be used: its location and the reason."""

    source: str
    line: int
    """1-based line of a text file, or row of a table."""
    reason: str
    row: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return one_line(f"{self.source}:{self.line}: {self.reason}")

    @classmethod
    def at(cls, origin: str | None, reason: str, row: Mapping[str, Any] | None = None) -> Self:
        """The refusal of a row that a reader gave its `origin`: `file:line`, or None for rows made in memory."""
        source, _, line = (origin or "rows:0").rpartition(":")
        return cls(source, int(line), reason, row)


def together(refusals: Sequence[Refusal]) -> list[tuple[list[int], str]]:
    """A text for all rows of a file that have the same reason, with their lines; in the order of the first ones."""
    lines: dict[tuple[str, str], list[int]] = {}
    for refusal in refusals:
        lines.setdefault((refusal.source, refusal.reason), []).append(refusal.line)
    texts = []
    for (source, reason), rows in lines.items():
        named = ", ".join(map(str, rows[:LINES])) + (f" and {len(rows) - LINES} more" if len(rows) > LINES else "")
        texts.append((rows, one_line(f"{source}:{named}: {reason}")))
    return texts


def check_some_left(
    kept: Sequence[object], refused: Sequence[Refusal], source: str | Path, count: int | None = None
) -> None:
    """Raise DataError with the first reasons if no row of `source` is left; `count`: number of all rejected rows."""
    if not kept:
        count = len(refused) if count is None else count
        if count == 0:
            raise DataError(f"{source}: expected rows, found none: the file or data set is empty")
        said = together(refused)
        rest = count - sum(len(lines) for lines, _ in said[:IN_ERROR])
        shown = "".join(f"\n  - {text}" for _, text in said[:IN_ERROR])
        more = f"\n  - and {rest} more" if rest else ""
        raise DataError(f"{source}: no usable row is left ({count} rejected){shown}{more}")


def report_refusals(refused: Sequence[Refusal], path: Path) -> None:
    """Write rejected rows to the JSONL file `path` and print the first of them."""
    write_refusals(path, refused)
    say_refusals(refused[:REPORTED], len(refused), path)


def say_refusals(first: Sequence[Refusal], count: int, path: Path) -> None:
    """Print the first rejected rows, and where the rest of `count` is written."""
    for _, text in together(first):
        print_note(f"rejected {text}")
    if count > len(first):
        print_note(f"rejected {count - len(first)} more: see {path}")


def write_refusals(path: Path, refusals: Sequence[Refusal]) -> None:
    """Write rejected rows with file, line and reason as JSONL."""
    # One at a time, and not copied: a row has all its token ids and log-probabilities.
    write_jsonl(path, (vars(refusal) for refusal in refusals))


def of_one_kind(rows: Sequence[T], kind: Callable[[T], tuple[bool, ...]]) -> tuple[list[T], list[T]]:
    """Rows whose texts are of the most common kind, and the others: a column of a table has one type.

    kind: which of a row's texts are strings (the others are conversations).
    """
    kinds = Counter(map(kind, rows))
    if len(kinds) < 2:
        return list(rows), []
    most = max(kinds, key=kinds.__getitem__)
    return [row for row in rows if kind(row) == most], [row for row in rows if kind(row) != most]


def other_kind(prompt: Text) -> str:
    """Reason to reject a prompt that is a text where the others are conversations, or vice versa."""
    kind, most = ("a text", "conversations") if isinstance(prompt, str) else ("a conversation", "texts")
    return f"prompt: {kind}, where most rows have {most}; a file holds one kind"
