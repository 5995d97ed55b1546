"""Rejected rows: what the terminal and an error say of many rows with few reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.errors import DataError
from regretless.data.rejected_rows import Refusal, check_some_left, say_refusals

ROWS = [Refusal("a.jsonl", line, "no prompt" if line % 2 else f"reason {line}") for line in range(1, 18)]


def test_rows_when_they_have_the_same_reason_then_they_are_said_together(capsys: pytest.CaptureFixture[str]) -> None:
    say_refusals(ROWS[:4], 17, Path("refused.jsonl"))
    assert capsys.readouterr().err.splitlines() == [
        "skipped a.jsonl:1, 3: no prompt",
        "skipped a.jsonl:2: reason 2",
        "skipped a.jsonl:4: reason 4",
        "skipped 13 more: see refused.jsonl",
    ]


def test_error_when_no_row_is_left_then_it_names_the_first_reasons_and_counts_the_rest() -> None:
    with pytest.raises(DataError) as raised:
        check_some_left([], ROWS, "a.jsonl")
    assert str(raised.value).splitlines() == [
        "a.jsonl: no usable row is left (17 skipped)",
        "  - a.jsonl:1, 3, 5, 7, 9 and 4 more: no prompt",
        "  - a.jsonl:2: reason 2",
        "  - a.jsonl:4: reason 4",
        "  - and 6 more",
    ]
