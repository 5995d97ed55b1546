"""Smoke runs: whatever a recipe asks for, nothing leaves the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from judge_helpers import write_responses
from regretless.data.columns import Response, Verdict
from regretless.labeling.pairing_rules import RULES, Rule
from regretless.runs.miniature import smoke_recipe
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import Recipe, load_recipe, parse_recipe

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def test_smoke_run_when_the_recipe_uploads_and_tracks_then_no_training_of_it_does() -> None:
    upload = ("push_to_hub=true", "report_to=all", "log_completions_steps=1")
    places = ("train", "train.methods.dpo", "pretrain.base")
    recipe = load_recipe(QUICKSTART, [f"{place}.{text}" for place in places for text in upload])
    small = smoke_recipe(recipe)
    assert recipe.train is not None and small.train is not None
    assert recipe.train.split_for("dpo")[1]["push_to_hub"] is True
    trainings = [(small.train, name) for name in small.train.objectives]
    trainings += [(section, section.objectives[0]) for section in small.pretrain.values()]
    assert len(trainings) > 4
    for section, method in trainings:
        arguments = section.split_for(method)[1]
        wanted = {"push_to_hub": False, "report_to": "none", "log_completions_steps": None}
        assert {name: arguments[name] for name in wanted} == wanted, method


def test_smoke_run_when_the_recipe_needs_a_gpu_then_no_training_of_it_does() -> None:
    checkpointing = ("gradient_checkpointing=true", "gradient_checkpointing_kwargs={offload: true}")
    needs = (*checkpointing, "use_liger_kernel=true", "compile_layers=true", "bf16=true")
    small = smoke_recipe(load_recipe(QUICKSTART, [f"train.{text}" for text in needs]))
    assert small.train is not None
    arguments = small.train.split_for("dpo")[1]
    assert "gradient_checkpointing_kwargs" not in arguments and arguments["gradient_checkpointing"] is True
    assert not any(arguments[name] for name in ("use_liger_kernel", "compile_layers", "bf16"))


def test_smoke_run_when_processes_share_rows_then_it_trains_in_one() -> None:
    recipe = load_recipe(QUICKSTART, ["train.processes=4", "train.methods.dpo.sequence_parallel_size=2"])
    assert recipe.train.division_problems("dpo", 4) == []
    small = smoke_recipe(recipe).train
    assert small.process_count("dpo") == 1 and small.division_problems("dpo", 1) == []


def scored(folder: Path, rule: str) -> Recipe:
    """Pairs by a rule from responses that lie in a file; the model makes them in a smoke run."""
    model = {"architecture": {"model_type": "qwen3"}, "tokenizer": "Qwen/Qwen3-1.7B"}
    responses = str(write_responses(folder / "responses.parquet", 2, lambda number: ["a", "b"]))
    values = {"model": model, "responses": responses, "pair": {"rule": rule}}
    return parse_recipe({"name": "scored", "output_dir": str(folder / "run"), **values}, "test")


@pytest.fixture
def other_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of another package: one needs scores, one derives them from verdicts before it asks for them."""
    by_score = RULES["best_vs_random"]

    def from_verdicts(responses: Sequence[Response]) -> list[Response]:
        return [replace(response, score=float(response.verdict is Verdict.CORRECT)) for response in responses]

    monkeypatch.setitem(RULES, "other_score_rule", by_score)
    monkeypatch.setitem(RULES, "scores_of_verdicts", Rule(by_score.unusable, by_score.select, from_verdicts))


@pytest.mark.usefixtures("other_rules")
@pytest.mark.parametrize(
    ("rule", "smoked"),
    [
        ("best_vs_random", "correct_vs_wrong"),
        ("other_score_rule", "correct_vs_wrong"),
        ("scores_of_verdicts", "scores_of_verdicts"),
        ("above_writer", "above_writer"),
    ],
)
def test_smoke_run_without_a_judge_when_the_rule_needs_scores_then_it_pairs_by_verdicts(
    rule: str, smoked: str, tmp_path: Path
) -> None:
    pair = smoke_recipe(scored(tmp_path, rule)).pair
    assert pair is not None and pair.rule == smoked


@pytest.mark.slow
@pytest.mark.usefixtures("other_rules")
def test_smoke_run_when_another_package_has_the_rule_then_it_makes_pairs(tmp_path: Path) -> None:
    for rule in ("other_score_rule", "scores_of_verdicts"):
        pair = run_recipe(smoke_recipe(scored(tmp_path, rule))).outcomes["pair"]
        assert pair.ran and pair.summary["pairs"] > 0
