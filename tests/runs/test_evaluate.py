"""How an evaluation verifies: settings of its own, those of `verify`, and those of the recipes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from regretless.core import plugins
from regretless.core.errors import ConfigError
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling.verify import VerifyConfig
from regretless.runs.evaluate import grading
from regretless.runs.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


def test_grading_when_evaluate_says_something_then_that_goes_over_verify() -> None:
    benchmarks = {"benchmarks": {"amc23": {"benchmark": "amc23"}}}
    verify = VerifyConfig(verifier="math_any", grade_cut=True, time_limit=3)
    assert grading(EvaluateConfig.parse(benchmarks, "x"), verify) == verify
    own = EvaluateConfig.parse({**benchmarks, "verifier": "math", "grade_cut": False}, "x")
    assert grading(own, verify) == VerifyConfig(time_limit=3)
    with pytest.raises(ConfigError, match=r"verifier: expected one of math, math_any \(got 'maths'\)"):
        grading(EvaluateConfig.parse({**benchmarks, "verifier": "maths"}, "x"), verify)


@pytest.mark.parametrize(("folder", "expected"), [("math", ("math", False)), ("math-released", ("math_any", True))])
def test_recipe_when_read_then_it_grades_as_its_source(folder: str, expected: tuple[str, bool]) -> None:
    for path in sorted((RECIPES / folder).glob("*.yaml")):
        recipe = load_recipe(path)
        assert recipe.verify is not None and recipe.evaluate is not None
        used = grading(recipe.evaluate, recipe.verify)
        assert (used.verifier, used.grade_cut) == (recipe.verify.verifier, recipe.verify.grade_cut) == expected


def test_recipe_when_evaluate_names_no_verifier_of_the_table_then_error_comes_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.verifier: expected one of math, math_any"):
        load_recipe(RECIPES / "math" / "qwen3-1.7b.yaml", ["evaluate.verifier=maths"])


def test_recipe_when_evaluate_names_a_verifier_that_cannot_be_used_then_error_says_why_as_for_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = {"absent": [EntryPoint("absent", "no_such_module:CHECK", "regretless.verifiers")]}
    monkeypatch.setattr(plugins, "offered", lambda kind: points if kind == "verifiers" else {})
    with pytest.raises(ConfigError) as error:
        load_recipe(RECIPES / "math" / "qwen3-1.7b.yaml", ["verify.verifier=absent", "evaluate.verifier=absent"])
    problems = [problem.split(": ", 1) for problem in error.value.problems]
    assert [key for key, _ in problems] == ["verify.verifier", "evaluate.verifier"]
    assert problems[0][1] == problems[1][1] and "cannot be imported: ModuleNotFoundError" in problems[0][1]
