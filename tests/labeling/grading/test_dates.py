"""Dates and days: what is read, and which agree."""

from __future__ import annotations

import pytest

from regretless.labeling.grading.dates import Date, equal_dates, read_date


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("14 March", Date(None, 14, 3, None)),
        ("March 14th, 2025", Date(None, 14, 3, 2025)),
        ("the 14th of March", Date(None, 14, 3, None)),
        ("2025-03-14", Date(None, 14, 3, 2025)),
        ("3月14日", Date(None, 14, 3, None)),
        ("Friday, March 14", Date(5, 14, 3, None)),
        ("Wed.", Date(3, None, None, None)),
        ("星期三", Date(3, None, None, None)),
        ("in June", Date(None, None, 6, None)),
        ("March 32", None),
        ("3/4", None),
        ("may be", None),
    ],
)
def test_read_date_when_a_text_is_a_date_then_its_parts(text: str, date: Date | None) -> None:
    assert read_date(text) == date


@pytest.mark.parametrize(
    ("gold", "other", "same"),
    [
        ("March 14", "14 March 2025", True),
        ("March 14, 2025", "14 March", None),
        ("March 14", "14 April", False),
        ("Friday, March 14", "March 14", True),
        ("Friday", "Sat.", False),
        ("Friday", "March 14", None),
    ],
)
def test_equal_dates_when_one_leaves_out_a_part_then_only_the_gold_one_may(
    gold: str, other: str, same: bool | None
) -> None:
    dates = read_date(gold), read_date(other)
    assert dates[0] is not None
    assert dates[1] is not None
    assert equal_dates(dates[0], dates[1]) is same
