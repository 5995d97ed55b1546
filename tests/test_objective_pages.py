"""Every objective has a page in docs/methods that tells all there is to set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from regretless.objectives import OBJECTIVES

PAGES = Path(__file__).resolve().parents[1] / "docs" / "methods"
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


def _text(default: Any) -> str:
    if default is None:
        return "null"
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_page_of_an_objective_gives_every_hyperparameter_with_default_and_type(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for key, entry in OBJECTIVES[name].hyperparameters().items():
        row = rf"^\| `{key}` \| `{re.escape(_text(entry.default))}` \| {re.escape(entry.type)} \| \S.* \|$"
        assert re.search(row, page, re.MULTILINE), f"{name}.md: no table row for {key} as {row}"
    assert f"regretless run recipes/quickstart.yaml train.objective={name}" in page
    assert "arXiv:" in page
    for metric in METRICS:
        assert f"`{metric}`" in page


def test_pages_when_counted_are_the_objectives() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(OBJECTIVES)
