"""The tutorials: their Python runs, and their recipes and rows are read without a complaint."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from regretless import parse_pairs, parse_recipe

TUTORIALS = Path(__file__).resolve().parents[1] / "docs" / "tutorials"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a tutorial in one language."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_objective_of_the_tutorial_when_run_then_its_numbers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A module in a file: the meaning of a hyperparameter is read from the source.
    name = "module_of_the_tutorial"
    (tmp_path / f"{name}.py").write_text("\n".join(blocks("objective", "python")), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    assert module.policy.grad is not None
    assert module.Hinge.hyperparameters()["beta"].meaning == "Inverse temperature β of the implicit reward."


@pytest.mark.parametrize("page", ["own_preferences", "verifier_data"])
def test_recipe_of_a_tutorial_when_parsed_then_nothing_is_wrong(page: str) -> None:
    (recipe,) = blocks(page, "yaml")
    assert parse_recipe(yaml.safe_load(recipe), page).train is not None


def test_rows_of_the_tutorial_when_read_then_both_are_pairs() -> None:
    (rows,) = blocks("own_preferences", "json")
    pairs, rejected = parse_pairs([json.loads(line) for line in rows.splitlines()])
    assert len(pairs) == 2 and not rejected
