"""Every objective has a page in docs/methods that tells all there is to set."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from regretless.core.setting_list import Setting
from regretless.objectives import OBJECTIVES, Objective

PAGES = Path(__file__).resolve().parents[1] / "docs" / "methods"
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


def _text(default: Any) -> str:
    if default is None or isinstance(default, bool | list):
        return json.dumps(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _check_rows(path: Path, settings: Mapping[str, Setting]) -> None:
    page = path.read_text(encoding="utf-8")
    for key, entry in settings.items():
        row = rf"^\| `{key}` \| `{re.escape(_text(entry.default))}` \| {re.escape(entry.type)} \| \S.* \|$"
        assert re.search(row, page, re.MULTILINE), f"{path.name}: no table row for {key} as {row}"


def test_page_of_the_modifiers_gives_each_with_default_and_type() -> None:
    assert len(Objective.modifiers()) > 3
    _check_rows(PAGES.parent / "modifiers.md", Objective.modifiers())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_page_of_an_objective_gives_every_hyperparameter_with_default_and_type(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    _check_rows(PAGES / f"{name}.md", OBJECTIVES[name].hyperparameters())
    assert f"regretless run recipes/quickstart.yaml train.objective={name}" in page
    assert "arXiv:" in page
    for metric in METRICS:
        assert f"`{metric}`" in page


def test_pages_when_counted_are_the_objectives() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(OBJECTIVES)
