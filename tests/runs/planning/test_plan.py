"""Plans against what runs then did: states, counts, costs; and that a plan leaves the run folder as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from judge_helpers import judge_by, last_digit, write_responses
from regretless.cli.app import app
from regretless.core.continuations import Continuation, packed
from regretless.core.errors import BudgetError
from regretless.core.files import read_json
from regretless.data.columns import Pair, Side
from regretless.data.rows import write_records
from regretless.labeling.pairing_rules import RULES
from regretless.runs.miniature import smoke_recipe, surroundings
from regretless.runs.pipeline import run_recipe
from regretless.runs.planning.counts import Assumed
from regretless.runs.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.runs.planning.lengths import ResponseLengths
from regretless.runs.planning.plan import Plan, make_plan
from regretless.runs.planning.show import counts_text
from regretless.runs.recipe import Recipe, load_recipe, parse_recipe
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.workflow.run_folder import Unit
from regretless.workflow.stage_folder import MANIFEST, StageFolder
from regretless.workflow.workers import Need
from scripted_server import serving
from small_runs import STEPS, small

PROJECT = Path(__file__).resolve().parents[3]


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


def test_plan_of_a_fresh_recipe_when_it_has_run_then_the_exact_counts_were_right(
    tmp_path: Path, finished: Path
) -> None:
    plan = planned(small(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    assert set(states(plan).values()) == {State.RUN}
    for name in ("sample", "evaluate/samples/base/arithmetic/greedy", "evaluate/samples/repo/arithmetic/seed-41"):
        made = summary(finished, name)
        found = counts(plan, name)
        assert (found["prompts"], found["requests"]) == (made["prompts"], made["responses"])
    assert (
        counts(plan, "evaluate/repo/arithmetic/seed-41")["responses"]
        == summary(finished, "evaluate/repo/arithmetic/seed-41")["n"]
    )
    assert "pairs" not in counts(plan, "pair")  # nobody can know yet


def test_plan_when_the_responses_are_verified_then_the_pairs_are_those_of_the_run(folder: Path) -> None:
    pairs = summary(folder, "pair")["pairs"]
    shutil.rmtree(folder / "pair")
    plan = planned(small(folder))
    assert states(plan)["verify"] is State.DONE and states(plan)["pair"] is State.RUN
    assert counts(plan, "pair")["pairs"] == pairs


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["verify.time_limit=9", "report.title=x"],
        ["train.methods.dpo.beta=0.5", "train.objective=[dpo,ipo]"],
        ["evaluate.benchmarks.again={dataset: '{run}/world/test.jsonl', limit: 3}"],
        pytest.param(["sample.seed=5"], marks=pytest.mark.slow),
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
    run_recipe(recipe, ["sample"])
    assert summary(folder, "sample")["kept"] == one.parts[0]


def test_sampling_that_is_interrupted_when_planned_then_finished_parts_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, parts = small(folder, "sample.batch_size=16", "sample.seed=5"), []
    stream = TransformersEngine.stream

    def three_parts(self: TransformersEngine, prompts: Any, seeds: Any) -> Any:
        if len(parts) == 3:
            raise KeyboardInterrupt
        parts.append(len(prompts))
        return stream(self, prompts, seeds)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TransformersEngine, "stream", three_parts)
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
    assert (one.unit.state, one.parts) == (State.INTERRUPTED, (2, steps))
    assert [row.state_text for row in plan.rows if row.stage == "train"] == ["1 of 2 done, 1 interrupted"]


def trainings(plan: Plan) -> dict[str, dict[str, float]]:
    return {one.unit.name: one.counts for row in plan.rows for one in row.estimates if row.stage == "train"}


def test_trainings_when_planned_with_their_pairs_at_hand_then_lists_steps_and_continuations_are_counted(
    tmp_path: Path,
) -> None:
    def side(text: str, *lengths: int) -> Side:
        ids = list(range(len(text)))
        drawn = [Continuation(1, np.arange(n, dtype=np.int32), np.zeros(n, np.float32)) for n in lengths]
        return Side(text=text, token_ids=ids, logps=[-1.0] * len(ids), continuations=packed(drawn))

    better, other = side("yes", 3, 4), side("sure", 5)
    given = [("a", better, "no"), ("a", other, "no"), ("a", better, "never"), ("b", better, "no"), ("a", better, "hm")]
    pairs = [
        Pair(prompt=prompt, chosen=chosen, rejected=side(text, 10), logps_kind="raw") for prompt, chosen, text in given
    ]
    write_records(tmp_path / "pairs.parquet", pairs)
    lists = {"repo_listwise": {"estimator": "rollouts"}, "repo": {"estimator": "rollouts"}}
    recipe = parse_recipe(
        {
            "name": "lists",
            "output_dir": str(tmp_path / "run"),
            "model": {"name_or_path": str(tmp_path)},
            "pairs": {"dataset": str(tmp_path / "pairs.parquet")},
            "train": {
                "objective": ["repo_listwise", "repo", "dpo"],
                "methods": {**lists, "dpo": {"max_steps": 7}},
                "num_train_epochs": 2,
                "pairs_per_step": 2,
            },
        },
        "test",
    )
    plan = planned(recipe)
    # Lists: yes > no, never, hm (to a); sure > no; yes > no (to b). Two steps an epoch, and three of five pairs.
    chosen = {"lists": 7 + 5 + 7, "pairs": 7 + 5 + 7 + 7 + 7}
    assert trainings(plan) == {
        "train/repo_listwise": {"pairs": 5, "lists": 3, "steps": 4, "continued": 2 * (chosen["lists"] + 50)},
        "train/repo": {"pairs": 5, "steps": 6, "continued": 2 * (chosen["pairs"] + 50)},
        "train/dpo": {"pairs": 5, "steps": 7},
    }
    assert any("2 to 4 responses, 2.7 on average; a step has 2 lists" in text for text in plan.assumptions)
    shown = counts_text(next(row for row in plan.rows if row.stage == "train"))
    assert shown == "~15 pairs, ~3 lists, ~17 steps, ~304 tokens of continuations"


def test_training_on_lists_when_planned_then_its_steps_are_those_of_the_run(folder: Path) -> None:
    recipe = small(folder, "train.objective=repo_listwise", "train.pairs_per_step=3")
    found = trainings(planned(recipe))["train/repo_listwise"]
    run_recipe(recipe, only=["train"])
    assert found["lists"] < found["pairs"] and found["steps"] == summary(folder, "train/repo_listwise")["steps"]


def test_continuations_when_planned_before_the_rollout_then_the_most_for_a_response_is_said(tmp_path: Path) -> None:
    measured = [
        "rollout.k=2",
        "rollout.max_tokens=16",
        "rollout.positions=[0.5,0.7]",
        "rollout.keep_continuations=true",
    ]
    plan = planned(small(tmp_path / "run", *measured, "train.objective=repo", "train.methods.repo.estimator=rollouts"))
    (said,) = [text for text in plan.assumptions if text.startswith("train/repo: with each response")]
    assert "at most 64 tokens" in said


def judged(folder: Path, url: str, rule: str = "best_vs_random", **server: Any) -> Recipe:
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
            "pair": {"rule": rule},
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
    if "ultrafeedback" in recipe:
        assert rows["sample"]["counts"]["requests"]["value"] == 4 * 16_000
        asked = {name: count["value"] for name, count in rows["judge"]["judge"].items()}
        assert asked["requests"] == 64_000
        cost = asked["tokens_in"] * 0.25 + 64_000 * 8192 * 2  # the limit of a reply
        assert plan["stages"][1]["units"][0]["counts"]["dollars"] == pytest.approx(cost / 1e6, rel=1e-3)
    else:
        assert any("openai/gsm8k" in problem for problem in rows["prompts"]["problems"])


def test_settings_that_cannot_be_parsed_when_planned_then_they_are_reported(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(PROJECT / "recipes" / "quickstart.yaml"), "train.lerning_rate=1"])
    assert "lerning_rate" in str(result.exception)


def test_plan_of_a_finished_run_when_printed_then_there_is_a_row_for_each_stage(folder: Path) -> None:
    small(folder)
    result = CliRunner().invoke(app, ["plan", str(folder.parent / "run.yaml"), *STEPS])
    assert result.exit_code == 0, f"{result.output} {result.exception}"
    for stage in ("world", "pretrain", "sample", "verify", "pair", "inspect", "train", "evaluate", "analyze", "report"):
        assert stage in result.output
    assert "would run" not in result.output


@pytest.mark.parametrize("rule", ["best_vs_random", "other_score_rule"])
def test_pairs_by_scores_when_planned_after_the_judge_then_they_are_those_of_the_run_whoever_made_the_rule(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "other_score_rule", RULES["best_vs_random"])
    with serving(judge_by(last_digit)) as server:
        recipe = judged(tmp_path, server.url, rule)
        before = planned(recipe)
        assert (states(before)["pair"], counts(before, "pair")) == (State.RUN, {})
        run_recipe(recipe, ["judge"])
        expected = counts(planned(recipe), "pair")["pairs"]
        run_recipe(recipe)
        assert expected == summary(recipe.run_dir, "pair")["pairs"] > 0


@pytest.mark.parametrize(
    ("finished", "given", "expected"),
    [
        ([], None, (64, "the limit, max_new_tokens: at most 64")),
        ([], 20.0, (20.0, "as you said")),
        ([], 90.0, (64, "as you said")),
        (["other/b"], None, (64, "the limit, max_new_tokens: at most 64")),
        (["other/a", "other/b"], None, (10.0, "the finished evaluate/samples/other/a/greedy")),
        (["other/a", "mine/b"], None, (10.0, "the finished evaluate/samples/mine/b/greedy")),
        (["mine/a", "mine/b"], None, (10.0, "the finished evaluate/samples/mine/a/greedy")),
        (["mine/a"], 20.0, (20.0, "as you said")),
    ],
)
def test_length_of_responses_when_the_plan_has_it_then_the_nearest_finished_work_says_it_first(
    finished: list[str], given: float | None, expected: tuple[float, str], tmp_path: Path
) -> None:
    def unit(name: str, state: State) -> PlannedUnit:
        settings = {"model": {"name_or_path": name.split("/", maxsplit=1)[0]}, "sampling": {"max_new_tokens": 64}}
        shown = {"tokens": 40, "responses": 4}
        sampled = Unit(f"evaluate/samples/{name}/greedy", settings, need=Need("sample"))
        return PlannedUnit(sampled, state, tmp_path / sampled.name, summary=shown)

    folder = PlannedFolder(tmp_path)
    folder.units = {name: unit(name, State.DONE) for name in finished}
    asked = unit("mine/a", State.RUN)
    assert ResponseLengths(folder, given).of(asked, asked.unit.settings["model"]) == expected


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
