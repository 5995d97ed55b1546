"""Plans against what runs then did: states, counts, costs; and that a plan leaves the run folder as it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from judge_helpers import judge_by, last_digit, write_responses
from regretless.cli.app import app
from regretless.core.errors import BudgetError
from regretless.core.files import read_json
from regretless.core.stage_folder import MANIFEST, StageFolder
from regretless.modeling.load import ModelConfig, load_model
from regretless.planning.dry_run import PlannedUnit, State
from regretless.planning.estimate import Assumed, Estimate
from regretless.planning.measure import Calibration, Sampled
from regretless.planning.plan import Plan, Row, make_plan
from regretless.runs.pipeline import between, run_recipe
from regretless.runs.recipe import Recipe, load_recipe, parse_recipe
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.smoke.miniature import smoke_recipe, surroundings
from scripted_server import serving

PROJECT = Path(__file__).resolve().parents[2]
METHODS = ["train.objective=[dpo,repo]", "evaluate.seeds=[41]"]
LATER = {
    "train.max_steps": -1,
    "train.num_train_epochs": 2,
    "train.save_steps": 1,
    "train.pairs_per_step": 8,
}


def small(folder: Path, *overrides: str) -> Recipe:
    """The quickstart with two methods, shrunk; trained for two epochs."""
    values = smoke_recipe(load_recipe(PROJECT / "recipes" / "quickstart.yaml", METHODS)).model_dump(exclude_unset=True)
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(json.dumps({**values, "output_dir": str(folder)}))  # JSON is YAML
    return load_recipe(path, [*(f"{key}={value}" for key, value in LATER.items()), *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run_recipe(small(folder))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, in another place."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder: its bytes, and when it was changed."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def planned(recipe: Recipe, **options: Any) -> Plan:
    """The plan of a recipe, for which no file in its run folder may change."""
    before = tree(recipe.run_dir)
    plan = make_plan(recipe, **options)
    assert tree(recipe.run_dir) == before
    return plan


def states(plan: Plan) -> dict[str, State]:
    return {one.unit.name: one.unit.state for row in plan.rows for one in row.estimates}


def counts(plan: Plan, name: str) -> Mapping[str, float]:
    """Counts of a unit that rest on no assumption."""
    (one,) = [one for row in plan.rows for one in row.estimates if one.unit.name == name]
    return {key: value for key, value in one.counts.items() if key not in one.guessed}


def summary(folder: Path, name: str) -> dict[str, Any]:
    return dict(read_json(folder / name / MANIFEST)["summary"])


def trained_tokens(folder: Path, name: str) -> float:
    """Distinct tokens of all steps, of what the Trainer counts for each: 6 per weight and token."""
    weights = load_model(ModelConfig(name_or_path=str(folder / name))).num_parameters(exclude_embeddings=True)
    return float(read_json(folder / name / "trainer_state.json")["total_flos"] / (6 * weights))


def prompt_tokens(folder: Path, name: str) -> int:
    rows = pq.read_table(folder / name / "responses.parquet")["prompt_token_ids"].to_pylist()
    return sum(map(len, rows))


def test_plan_of_a_fresh_recipe_when_it_has_run_then_the_exact_counts_were_right(
    tmp_path: Path, finished: Path
) -> None:
    plan = planned(small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert set(states(plan).values()) == {State.RUN}
    for name in ("pretrain/base", "pretrain/behavior"):
        made = summary(finished, name)
        assert counts(plan, name) == {
            "pairs": made["pairs"],
            "steps": made["steps"],
            "trained_tokens": pytest.approx(trained_tokens(finished, name)),
        }
    for name in ("sample", "evaluate/samples/base/arithmetic/greedy", "evaluate/samples/repo/arithmetic/seed-41"):
        made = summary(finished, name)
        found = counts(plan, name)
        assert (found["prompts"], found["requests"]) == (made["prompts"], made["responses"])
        assert found["tokens_in"] == prompt_tokens(finished, name)
    assert (
        counts(plan, "evaluate/repo/arithmetic/seed-41")["responses"]
        == summary(finished, "evaluate/repo/arithmetic/seed-41")["n"]
    )
    assert "pairs" not in counts(plan, "pair")  # nobody can know yet
    assert any("% of the prompts have a correct and a wrong response" in text for text in plan.assumptions)


def test_plan_when_the_responses_are_verified_then_pairs_steps_and_trained_tokens_are_those_of_the_run(
    tmp_path: Path, finished: Path
) -> None:
    recipe = small(tmp_path / "run")
    run_recipe(recipe, between(recipe, None, "verify"))
    plan = planned(recipe)
    assert states(plan)["verify"] is State.DONE and states(plan)["pair"] is State.RUN
    assert counts(plan, "pair")["pairs"] == summary(finished, "pair")["pairs"]
    for name in ("train/dpo", "train/repo"):
        made = summary(finished, name)
        found = counts(plan, name)
        assert (found["pairs"], found["steps"]) == (made["pairs"], made["steps"])
        assert found["steps"] > 2
        assert found["trained_tokens"] == pytest.approx(trained_tokens(finished, name))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["verify.time_limit=9", "report.title=x"],
        ["train.methods.dpo.beta=0.5", "train.objective=[dpo,ipo]"],
        ["evaluate.benchmarks.again={dataset: '{run}/world/test.jsonl', limit: 3}"],
        ["sample.seed=5"],
    ],
    ids=" ".join,
)
def test_states_of_a_plan_when_the_recipe_is_then_run_then_they_were_right(folder: Path, overrides: list[str]) -> None:
    recipe = small(folder, *overrides)
    found = states(planned(recipe))
    outcomes = run_recipe(recipe).outcomes
    assert found.keys() == outcomes.keys()
    for name, outcome in outcomes.items():
        assert found[name] is State.UNKNOWN or outcome.ran == (found[name] is not State.DONE), name
    if not overrides:
        assert set(found.values()) == {State.DONE}


def test_results_that_an_earlier_recipe_set_aside_when_planned_then_they_are_done(folder: Path) -> None:
    run_recipe(small(folder, "train.objective=[dpo]"))
    found = states(planned(small(folder)))
    assert found["train/repo"] is found["evaluate/repo/arithmetic"] is State.DONE
    assert found["report"] is State.RUN


def test_sampling_when_earlier_responses_cover_a_part_then_only_the_others_are_left(folder: Path) -> None:
    n = read_json(folder / "sample" / MANIFEST)["settings"]["n"]
    recipe = small(folder, f"sample.n={n + 4}")
    (one,) = [one for row in planned(recipe).rows for one in row.estimates if one.unit.name == "sample"]
    requests = one.counts["requests"]
    assert one.unit.state is State.RUN
    assert one.parts == (requests * n / (n + 4), requests)
    run_recipe(recipe)
    assert summary(folder, "sample")["kept"] == one.parts[0]


def test_sampling_that_is_interrupted_when_planned_then_finished_parts_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, batches = small(folder, "sample.batch_size=64", "sample.seed=5"), []
    generate = TransformersEngine.generate

    def three_batches(self: TransformersEngine, prompts: Any, seed: int) -> Any:
        if len(batches) == 3:
            raise KeyboardInterrupt
        batches.append(len(prompts))
        return generate(self, prompts, seed)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TransformersEngine, "generate", three_batches)
        run_recipe(recipe)
    plan = planned(recipe)
    (row,) = [row for row in plan.rows if row.stage == "sample"]
    assert row.estimates[0].unit.state is State.INTERRUPTED
    assert row.estimates[0].parts == (3, 8)  # 32 prompts, 16 responses each
    assert row.state_text == "interrupted, 3 of 8 parts"


def test_training_that_is_interrupted_when_planned_then_it_goes_on_from_its_checkpoint(folder: Path) -> None:
    place = folder / "train" / "dpo"
    steps = summary(folder, "train/dpo")["steps"]
    StageFolder(place, read_json(place / MANIFEST)["key"]).give_up()
    for later in range(3, steps + 1):
        shutil.rmtree(place / f"checkpoint-{later}")
    plan = planned(small(folder))
    (one,) = [one for row in plan.rows for one in row.estimates if one.unit.name == "train/dpo"]
    assert (one.unit.state, one.parts, one.left) == (State.INTERRUPTED, (2, steps), pytest.approx(1 - 2 / steps))
    assert [row.state_text for row in plan.rows if row.stage == "train"] == ["1 of 2 done, 1 interrupted"]


def judged(folder: Path, url: str, **server: Any) -> Recipe:
    responses = write_responses(folder / "in.parquet", 3, lambda number: [f"a {number + 1}", "b 5"])
    prices = {"prompt_price": 1000.0, "completion_price": 10_000.0}
    return parse_recipe(
        {
            "name": "judged",
            "output_dir": str(folder / "run"),
            "responses": str(responses),
            "judge": {
                "model": "judge-1",
                "max_reply_tokens": 50,
                "server": {"base_url": url, "retry_seconds": 0.01, "concurrency": 1, **prices, **server},
            },
            "pair": {"rule": "best_vs_random"},
        },
        "test",
    )


def test_cost_of_a_judge_when_planned_then_it_is_that_of_the_requests_that_are_left(tmp_path: Path) -> None:
    with serving(judge_by(last_digit)) as server:
        plan = planned(judged(tmp_path, server.url))
        found = plan.rows[0].estimates[0].counts
        assert found["requests"] == 12  # prompts times aspects
        assert found["tokens_out"] == 12 * 50  # the limit
        assert found["dollars"] == pytest.approx((found["tokens_in"] * 1000 + 12 * 50 * 10_000) / 1e6, rel=1e-3)
        assert plan.dollars == found["dollars"]
        said = planned(judged(tmp_path, server.url), assumed=Assumed(reply_tokens=20))
        assert said.rows[0].estimates[0].counts["tokens_out"] == 12 * 20
        assert not server.requests

        with pytest.raises(BudgetError):
            run_recipe(judged(tmp_path, server.url, max_requests=5))
        assert len(server.requests) == 5
        plan = planned(judged(tmp_path, server.url))
        one = plan.rows[0].estimates[0]
        assert one.parts == (5, 12)
        assert plan.dollars == pytest.approx(7 * (100 * 1000 + 20 * 10_000) / 1e6)  # as the server reported so far

        run_recipe(judged(tmp_path, server.url))
        plan = planned(judged(tmp_path, server.url))
        assert set(states(plan).values()) == {State.DONE}
        assert plan.dollars is None
        assert plan.rows[0].estimates[0].counts["dollars"] == pytest.approx(12 * (100 * 1000 + 20 * 10_000) / 1e6)


@pytest.mark.extended
@pytest.mark.slow
def test_measured_plan_when_nothing_has_run_then_every_stage_has_a_time_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    plan = planned(small(tmp_path / "run"), measure=True, say=said.append)
    assert not (tmp_path / "run").exists()
    assert {row.stage: row.seconds is not None and row.seconds > 0 for row in plan.rows} == {
        row.stage: True for row in plan.rows
    }, plan.notes
    assert plan.seconds == pytest.approx(sum(row.seconds or 0 for row in plan.rows))
    assert {"pretrain/base", "sample", "train/dpo", "analyze", "report"} <= set(said)


@pytest.mark.slow
def test_measured_plan_when_all_is_done_but_one_training_then_only_what_is_left_is_measured(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    plan = planned(small(folder, "train.methods.dpo.beta=0.5"), measure=True, say=said.append)
    assert said == ["inspect", "train/dpo", "analyze", "report"]
    # `inspect` and `analyze` print tables in a run. Those of untrained models would mean nothing.
    printed = capfd.readouterr()
    assert "┃" not in printed.out + printed.err
    # What may have to be done again took so long before.
    (one,) = [one for row in plan.rows for one in row.estimates if one.unit.name == "evaluate/dpo/arithmetic"]
    assert one.seconds == read_json(folder / one.unit.name / MANIFEST)["seconds"]


@pytest.mark.parametrize(("parallel", "gpus", "at_once"), [(1, 0, 1), (2, 0, 2), (2, 4, 4)])
def test_measured_sampling_when_processes_or_gpus_share_it_then_its_batches_are_divided_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: int, gpus: int, at_once: int
) -> None:
    measured = Sampled(load=3.0, batch=40.0, lengths=np.array([20]))
    monkeypatch.setattr(Calibration, "_time_sampling", lambda *_: measured)
    changed = ["sample.n=4", "sample.batch_size=3", "sample.temperature=0.5"]
    none_after = [f"{stage}=null" for stage in ("verify", "pair", "inspect", "train", "evaluate", "analyze", "report")]
    recipe = small(folder, f"parallel={parallel}", *changed, *none_after)
    (row,) = [row for row in planned(recipe, measure=True, gpus=gpus).rows if row.stage == "sample"]
    prompts = row.estimates[0].counts["prompts"]
    assert row.seconds == pytest.approx(3.0 + math.ceil(prompts * 4 / 3) * 40.0 / at_once)


RECIPES = sorted(path.relative_to(PROJECT).as_posix() for path in PROJECT.glob("recipes/*/*.yaml"))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if "/base/" not in name])
def test_recipe_of_the_paper_when_planned_without_a_network_then_the_plan_says_what_is_missing(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(PROJECT)
    result = CliRunner().invoke(app, ["plan", recipe, "--json", "--output-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    plan = json.loads(result.stdout)
    rows = {row["stage"]: row for row in plan["stages"]}
    assert {row["state"] for row in rows.values()} == {"would run"}
    assert plan["seconds"] is None
    if "ultrafeedback" in recipe:
        assert rows["sample"]["counts"]["requests"]["value"] == 4 * 16_000
        asked = {name: count["value"] for name, count in rows["judge"]["judge"].items()}
        assert asked["requests"] == 64_000
        cost = asked["tokens_in"] * 0.25 + 64_000 * 8192 * 2  # the limit of a reply
        assert plan["stages"][1]["units"][0]["counts"]["dollars"] == pytest.approx(cost / 1e6, rel=1e-3)
    else:
        assert any("openai/gsm8k" in problem for problem in rows["prompts"]["problems"])


def test_check_of_predicted_times_when_it_reads_a_plan_then_it_finds_what_each_stage_took(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    import plan_check

    plan = json.loads(json.dumps(planned(small(folder)).as_json()))
    seconds = plan_check.taken(plan)
    assert seconds.keys() == {row["stage"] for row in plan["stages"]}
    trained = [read_json(folder / "train" / name / MANIFEST)["seconds"] for name in ("dpo", "repo")]
    assert seconds["train"] == pytest.approx(sum(trained))
    assert plan_check.predicted(plan) == {}


def test_settings_that_cannot_be_parsed_when_planned_then_they_are_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(PROJECT / "recipes" / "quickstart.yaml"), "train.lerning_rate=1"])
    assert "lerning_rate" in str(result.exception)


def test_plan_of_a_finished_run_when_printed_then_there_is_a_row_for_each_stage(folder: Path) -> None:
    small(folder)
    result = CliRunner().invoke(app, ["plan", str(folder.parent / "run.yaml"), *(f"{k}={v}" for k, v in LATER.items())])
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    for stage in ("world", "pretrain", "sample", "verify", "pair", "inspect", "train", "evaluate", "analyze", "report"):
        assert stage in result.output
    assert "would run" not in result.output


@pytest.mark.extended
@pytest.mark.slow
def test_requests_to_judges_when_planned_before_anything_has_run_then_they_are_those_of_the_run(tmp_path: Path) -> None:
    recipe = load_recipe(PROJECT / "recipes" / "ultrafeedback" / "qwen3-1.7b.yaml")
    recipe = smoke_recipe(recipe.model_copy(update={"output_dir": str(tmp_path / "run")}))
    with surroundings(recipe):
        plan = planned(recipe)
        run_recipe(recipe)
    asked = {one.unit.name: one.counts["requests"] for row in plan.rows for one in row.estimates if one.is_judge}
    assert asked.pop("judge") == summary(recipe.run_dir, "judge")["requests"]
    results = {name: read_json(recipe.run_dir / name / "chat_result.json") for name in asked}
    assert len(results) == 2 * 4  # models and benchmarks
    assert asked == {name: result["requests"] for name, result in results.items()}
    answers = {one.unit.name: one.counts for row in plan.rows for one in row.estimates if "/samples/" in one.unit.name}
    for name, found in answers.items():
        assert found["requests"] == summary(recipe.run_dir, name)["responses"]
    assert answers.keys() == {
        path.parent.relative_to(recipe.run_dir).as_posix()
        for path in (recipe.run_dir / "evaluate" / "samples").rglob(MANIFEST)
    }
    assert set(states(planned(recipe)).values()) == {State.DONE}


def test_time_of_a_stage_when_its_models_run_side_by_side_then_it_ends_with_the_last_of_them() -> None:
    seconds = {"base/sums": 1.0, "samples/base/sums/greedy": 4.0, "dpo/sums": 3.0, "repo/sums": 2.0, "ipo/sums": 3.0}
    estimates = [
        Estimate(PlannedUnit(f"evaluate/{name}", State.RUN, Path(name)), seconds=taken)
        for name, taken in seconds.items()
    ]
    assert (Row("evaluate", estimates).elapsed, Row("evaluate", estimates).seconds) == (13.0, 13.0)
    # base until 5; dpo until 3, then repo until 5; then ipo until 8.
    assert (Row("evaluate", estimates, 2).elapsed, Row("evaluate", estimates, 2).seconds) == (8.0, 13.0)
    estimates[0].unit.state = State.DONE
    estimates[2].seconds = None
    assert (Row("evaluate", estimates, 5).elapsed, Row("evaluate", estimates, 5).seconds) == (4.0, None)
