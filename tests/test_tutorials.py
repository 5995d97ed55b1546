"""The tutorials: their Python runs, and their recipes and rows are read without a complaint."""

from __future__ import annotations

import json
import re
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


def test_objective_of_the_tutorial_when_run_then_its_numbers_hold() -> None:
    names: dict[str, Any] = {"__name__": "tutorial"}
    for number, block in enumerate(blocks("objective", "python"), 1):
        exec(compile(block, f"docs/tutorials/objective.md, block {number}", "exec", dont_inherit=True), names)
    assert names["policy"].grad is not None
    assert names["Hinge"].hyperparameters()["beta"].meaning == "Inverse temperature β of the implicit reward."


@pytest.mark.parametrize("page", ["own_preferences", "verifier_data"])
def test_recipe_of_a_tutorial_when_parsed_then_nothing_is_wrong(page: str) -> None:
    (recipe,) = blocks(page, "yaml")
    assert parse_recipe(yaml.safe_load(recipe), page).train is not None


def test_rows_of_the_tutorial_when_read_then_both_are_pairs() -> None:
    (rows,) = blocks("own_preferences", "json")
    pairs, rejected = parse_pairs([json.loads(line) for line in rows.splitlines()])
    assert len(pairs) == 2 and not rejected
