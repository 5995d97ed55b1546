"""The table of forms in docs/verification.md, row by row, and phrasings of real gold answers by the hundred."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from regretless.data.columns import Verdict
from regretless.labeling.grading.grader import grade

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"\| `(.+?)` \| `(.+?)` \| (correct|wrong|unknown) \|")


def table() -> list[tuple[str, str, str]]:
    """Rows (response, gold answer, verdict) of the table."""
    text = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    lines = text.partition("\n## Forms\n")[2].partition("\n**Measured**")[0].splitlines()
    matches = [ROW.fullmatch(line) for line in lines if line.startswith("| `")]
    return [(match[1].replace("↵", "\n"), match[2], match[3]) for match in matches if match]


def test_table_when_read_then_every_row_is_a_test() -> None:
    text = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
    assert len(table()) == text.partition("\n## Forms\n")[2].partition("\n**Measured**")[0].count("\n| `") > 100


@pytest.mark.parametrize(("response", "gold", "verdict"), table())
def test_check_when_the_table_lists_a_form_then_verdict_is_as_said(response: str, gold: str, verdict: str) -> None:
    assert grade(response, gold).verdict == verdict


def test_check_when_real_golds_are_phrased_then_right_ones_pass_and_wrong_ones_do_not(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import verifier_forms

    monkeypatch.setattr(verifier_forms, "KINDS", {"number": 25, "expression": 8, "group": 5, "list": 4, "choice": 3})
    right, wrong = verifier_forms.rows(shared / "data", seed=7)
    missed = [row for row in right if grade(row[2], row[3]).verdict != Verdict.CORRECT]
    assert len(right) > 1000
    assert len(missed) <= 0.02 * len(right), random.Random(0).sample(missed, 10)
    assert len(wrong) > 500
    assert [row for row in wrong if grade(row[2], row[3]).verdict == Verdict.CORRECT] == []
