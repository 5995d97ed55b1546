"""Stage `rollout` in a run: what a plan says of it, what it makes, and that it is done once."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from regretless.core.continuations import continued_tokens
from regretless.core.files import read_json
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.runs.pipeline import run_recipe
from regretless.runs.planning.plan import make_plan
from regretless.runs.preflight import recipe_problems
from small_runs import small

SETTINGS = [
    *("rollout.k=4", "rollout.max_tokens=16", "rollout.max_correct=1", "rollout.max_wrong=1", "rollout.at=tokens"),
    "rollout.positions=[0.5]",
]


@pytest.mark.slow
def test_rollout_in_a_run_when_planned_then_it_draws_as_many_continuations_and_no_more_tokens(folder: Path) -> None:
    recipe = small(folder, *SETTINGS)
    (row,) = (row for row in make_plan(recipe).rows if row.stage == "rollout")
    planned = row.total("requests", of_judges=False), row.total("tokens_out", of_judges=False)
    done = run_recipe(recipe, only=["rollout"])
    summary = read_json(folder / "rollout" / "manifest.json")["summary"]
    assert planned[0] == (summary["continuations"], False)
    assert planned[1] == (16 * summary["continuations"], True)
    assert 0 < summary["tokens"] <= 16 * summary["continuations"]
    assert done.outcomes["rollout"].ran and not run_recipe(recipe, only=["rollout"]).outcomes["rollout"].ran
    # The base model is the reference, and the behavior model wrote.
    table = pq.read_table(folder / "rollout" / "regret.parquet").to_pylist()
    assert {row["alpha"] for row in table} == {1.0, 0.1, 0.01}
    assert {(row["n_ref"] + row["unknown_ref"], row["n_mu"] + row["unknown_mu"]) for row in table} == {(4, 4)}
    assert max(row["kl_to_go"] for row in table) > 0
    measured = {row["response_id"] for row in table}
    responses, refused = read_responses(folder / "rollout" / "responses.parquet")
    assert not refused and len(responses) == len(read_responses(folder / "verify" / "responses.parquet")[0])
    assert {row.response_id for row in responses if row.regret is not None} == measured


@pytest.mark.slow
def test_training_on_continuations_in_a_run_when_they_are_kept_then_it_is_told_what_they_cost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [
        "rollout.k=2",
        "rollout.max_tokens=16",
        "rollout.alphas=[1.0]",
        "rollout.at=tokens",
        "rollout.positions=[0.5]",
    ]
    chosen = ["train.objective=repo", "train.methods.repo.estimator=rollouts"]
    recipe = small(folder, *measured, "rollout.keep_continuations=true", *chosen)
    assert not recipe_problems(recipe)
    done = run_recipe(recipe, only=["rollout", "pair", "inspect", "train"])
    assert all(done.outcomes[name].ran for name in ("rollout", "pair", "train/repo"))
    pairs, _ = read_pairs(folder / "pair" / "pairs.parquet")
    kept = [side.continuations for pair in pairs for side in pair.sides.values()]
    assert all(data is not None for data in kept) and sum(map(continued_tokens, kept)) > 100
    found = read_json(folder / "inspect" / "inspect.json")
    assert found["tokens"]["continued"] > 100 and any(note.startswith("continuations are") for note in found["notes"])
    assert "continuations are" in " ".join(capsys.readouterr().err.split())
    lines = [
        line for line in read_json(folder / "train" / "repo" / "trainer_state.json")["log_history"] if "loss" in line
    ]
    assert lines and all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    # The responses alone would be fewer tokens.
    responses = sum(len(side.token_ids or ()) for pair in pairs for side in pair.sides.values())
    assert lines[-1]["num_tokens"] > 2 * responses
    (problem,) = recipe_problems(small(folder, *measured, *chosen))
    assert problem.startswith("train.methods.repo.estimator: rollouts reads the writers' continuations")


@pytest.mark.slow
def test_analyze_in_a_run_when_it_has_a_rollout_then_its_models_are_compared_with_that(folder: Path) -> None:
    done = run_recipe(small(folder, *SETTINGS), only=["rollout", "analyze"])
    assert done.outcomes["analyze"].ran
    calibration = read_json(folder / "analyze" / "regret_calibration.json")
    measured = read_json(folder / "rollout" / "manifest.json")["summary"]["responses"]
    assert (calibration["responses"], list(calibration["policies"])) == (measured, ["base", "dpo", "repo"])
