"""Answers that were written, with their verdicts, by people who had not seen the verifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regretless.data.columns import Verdict
from regretless.labeling.grading import grade
from regretless.labeling.grading.doubts import DOUBTS

# Readers called these unknown; docs/verification.md says why they are correct here.
CONVENTIONS = {
    (r"\log 100", "bases_logs"),  # the logarithm without a base is read as the gold answer's author wrote it
    ("5", "bases_logs"),  # an exclamation mark at the end of a sentence is joy
    ("x+1", "domain"),  # equal but at a point
    (r"\sin x", "domain"),
    ("2, 3", "lists"),  # a bare gold list has no order and no brackets
    ("(2,3)", "tuples"),
    ("1, 234", "separators"),
    ("204_5", "base"),  # a base that the response leaves out is the gold answer's
    ("12", "compound"),  # a product that is not worked out
    ("True", "yes_no"),  # yes is true
}
SHARE = {
    "unseen_answers": 0.99,
    "kept_back_answers": 0.99,
    "final_answers": 0.99,
    "fourth_open_answers": 0.96,
    "fourth_kept_answers": 0.9,
}
"""Least share of right answers that are accepted. Each file was used to find what was wrong after its first score."""


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / f"{name}.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("name", SHARE)
def test_grade_when_a_reader_calls_an_answer_wrong_or_unclear_then_it_is_never_accepted(name: str) -> None:
    accepted = [
        row
        for row in rows(name)
        if row["verdict"] != "correct" and grade(row["response"], row["gold"]).verdict == Verdict.CORRECT
    ]
    assert [row for row in accepted if (row["gold"], row["kind"]) not in CONVENTIONS] == []


@pytest.mark.parametrize("name", SHARE)
def test_grade_when_a_reader_calls_an_answer_right_then_most_are_accepted(name: str) -> None:
    right = [row for row in rows(name) if row["verdict"] == "correct"]
    missed = [row for row in right if grade(row["response"], row["gold"]).verdict != Verdict.CORRECT]
    assert len(missed) <= (1 - SHARE[name]) * len(right), missed


@pytest.mark.parametrize("reason", DOUBTS)
def test_grade_when_an_agreeing_answer_can_be_read_in_another_way_then_unknown_with_the_reason(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubt = DOUBTS[reason]
    response = doubt.example.replace("↵", "\n")
    outcome = grade(response, doubt.gold)
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, reason)
    # Without the doubt, it agrees.
    monkeypatch.setattr("regretless.labeling.grading.doubts.DOUBTS", {})
    assert grade(response, doubt.gold).verdict == Verdict.CORRECT


def test_tables_of_the_page_when_made_again_then_they_are_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    docs = Path(__file__).parents[3] / "docs"
    monkeypatch.syspath_prepend(str(docs))
    import make_grading_tables

    assert make_grading_tables.page() == (docs / "verification.md").read_text(encoding="utf-8")
