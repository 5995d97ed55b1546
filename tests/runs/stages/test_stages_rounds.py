"""Rounds: each samples from what the one before trained; killed or extended, a run ends as an undisturbed one."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from killed import AtWrite
from regretless.core.errors import ConfigError, DataError
from regretless.core.files import read_json
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.modeling import load
from regretless.modeling.load import ModelConfig, load_model
from regretless.modeling.scoring import score_responses
from regretless.rounds.round_prompts import has_both
from regretless.runs.pipeline import run_recipe
from regretless.runs.planning.dry_run import State
from regretless.runs.planning.plan import make_plan
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.runs.stages import Listing
from regretless.runs.stages.rounds import _Round
from regretless.runs.stages.stage import PAIRS, Run
from regretless.sampling import transformers_engine
from regretless.workflow.run_folder import RunFolder
from regretless.workflow.stage_folder import StageFolder
from rounds_runs import rounds_recipe
from run_contents import contents, differences

EVERY_WRITE = int(os.environ.get("REGRETLESS_EVERY_WRITE", "5"))
SHARE = {"count": 3, "prompts": 10, "replay": {"share": 0.5}}
LORA = {"lora": {"r": 4, "dropout": 0.0}, "max_steps": 2}


@pytest.fixture(scope="module")
def three(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of three rounds, to be read only."""
    folder = tmp_path_factory.mktemp("rounds") / "run"
    with patch.object(load, "_pretrained_model", wraps=load._pretrained_model) as reads:
        run_recipe(rounds_recipe(folder, finished, SHARE, **LORA))
    assert reads.call_count == 1, "sampling, training, its reference and measures of all rounds share the base"
    return folder


@pytest.mark.slow
def test_rounds_when_run_then_what_samples_is_what_the_round_before_trained_and_replayed_pairs_keep_their_writers(
    three: Path, finished: Path
) -> None:
    base = str(finished / "pretrain/base")
    trained = ["rounds/1/train/dpo", "rounds/2/dpo/train/dpo", "rounds/3/dpo/train/dpo"]
    prompts: list[set[str]] = []
    for number, place in ((1, "rounds/1"), (2, "rounds/2/dpo"), (3, "rounds/3/dpo")):
        rows, _ = read_responses(three / place / "sample/responses.parquet")
        adapter = None if number == 1 else str(three / trained[number - 2])
        scored = score_responses(
            load_model(ModelConfig(name_or_path=base, adapter=adapter)),
            [(row.prompt_token_ids or [], row.token_ids or []) for row in rows],
        )
        for row, values in zip(rows, scored, strict=True):
            np.testing.assert_allclose(row.logps, values, atol=1e-4)
        prompts.append({row.prompt_id for row in rows})
        assert len(prompts[-1]) == 10
    assert not set.intersection(*prompts) and len(set.union(*prompts)) == 30
    fresh = read_pairs(three / "rounds/3/dpo/pair/pairs.parquet")[0]
    mixed = read_pairs(three / "rounds/3/dpo/replay/pairs.parquet")[0]
    earlier = {
        f"{pair.pair_id}@{age}": pair
        for age, place in ((1, "rounds/2/dpo"), (2, "rounds/1"))
        for pair in read_pairs(three / place / "pair/pairs.parquet")[0]
    }
    replayed = mixed[len(fresh) :]
    assert replayed and mixed[: len(fresh)] == fresh
    assert all(pair.chosen == earlier[str(pair.pair_id)].chosen for pair in replayed)
    steps = [read_json(three / place / "trainer_state.json")["global_step"] for place in (*trained, "train/dpo")]
    assert steps == [2] * 4
    # Otherwise in an order that is another one in every process, and so would be the keys of later rounds.
    adapters = [read_json(three / place / "adapter_config.json")["target_modules"] for place in trained]
    assert all(modules == sorted(modules) for modules in adapters)
    assert (three / "train/dpo/adapter_model.safetensors").samefile(three / trained[2] / "adapter_model.safetensors")
    rows_of_table = [json.loads(line) for line in (three / "rounds/rounds.jsonl").read_text().splitlines()]
    assert [(row["round"], row["method"], row["replayed"] > 0) for row in rows_of_table] == [
        *[(1, "dpo", False), (2, "dpo", True), (3, "dpo", True)]
    ]
    assert [row["kl_to_start"]["value"] == 0 for row in rows_of_table] == [True, False, False]
    assert all(0 < row["effective_share"] <= 1 and 0 <= row["mismatch"] < 1e-4 for row in rows_of_table)
    # Results name problems that stand in any of these files.
    run = Run.of(rounds_recipe(three, finished, SHARE, **LORA), RunFolder(three))
    written = {path for path in three.rglob("pairs.parquet") if path.parent.name == "pair"}
    assert set(run.all_of(PAIRS, "evaluate")) == written and len(written) == 3


@pytest.mark.parametrize("stale", [None, "{run}/rounds/1/train/dpo"], ids=["no adapter", "the adapter before"])
def test_rounds_when_another_model_samples_than_the_one_just_trained_then_they_end(
    stale: str | None, again: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(again / "rounds/3")
    adapter = stale and stale.replace("{run}", str(again))
    plain = transformers_engine.load_model
    monkeypatch.setattr(
        transformers_engine, "load_model", lambda config: plain(config.model_copy(update={"adapter": adapter}))
    )
    with pytest.raises(DataError, match=r"rounds/3/dpo/sample, and the same command samples again") as error:
        ran(again, finished, SHARE)
    assert "rounds/2/dpo/train/dpo, which should have written them" in str(error.value)
    finished_units = sorted(path.parent.name for path in (again / "rounds/3").rglob("manifest.json"))
    assert finished_units == ["prompts", "sample"] and not (again / "rounds/3/dpo/train").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "start"),
    [(LORA, "previous"), (LORA, "model"), ({"max_steps": 2}, "previous")],
    ids=["adapter", "new adapters", "all weights"],
)
def test_rounds_when_no_model_stays_loaded_then_all_files_are_equal(
    training: dict[str, Any], start: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(name: str) -> tuple[dict[str, Any], int]:
        rounds = {"count": 2, "prompts": 10, "start": start}
        with patch.object(load, "_pretrained_model", wraps=load._pretrained_model) as reads:
            run_recipe(rounds_recipe(tmp_path / "run", finished, rounds, **training))
        shutil.move(tmp_path / "run", tmp_path / name)
        return contents(tmp_path / name), reads.call_count

    shared, few = made("shared")
    monkeypatch.setattr("regretless.runs.stages.rounds._models_stay", lambda run: False)
    apart, many = made("apart")
    assert differences(shared, apart) == [] and few < many and (few == 1 or "lora" not in training), (few, many)


def ran(folder: Path, made: Path, rounds: dict[str, Any], killed: Callable[[], None] | None = None) -> list[str]:
    """Names of the units that a run of rounds did; `killed` plants a kill."""
    if killed is not None:
        killed()
    outcomes = run_recipe(rounds_recipe(folder, made, rounds, **LORA)).outcomes
    return [name for name, outcome in outcomes.items() if outcome.ran]


def ends_with(*arguments: Any) -> int | None:
    """Exit code of `ran` in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regretless.training.train", __name__, "regretless.workflow.fork_origin"])
    process = context.Process(target=ran, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def again(three: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the finished run in its place: responses name their models by the path."""
    shutil.move(three, tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", three)
    yield three
    shutil.rmtree(three)
    shutil.move(tmp_path / "kept", three)


@pytest.mark.slow
@pytest.mark.everyday
def test_rounds_when_extended_and_killed_within_the_added_one_then_nothing_is_repeated_and_all_is_equal(
    again: Path, finished: Path
) -> None:
    expected = contents(again)
    shutil.rmtree(again / "rounds/3")
    assert ran(again, finished, {**SHARE, "count": 2}) == ["train/dpo"], "the model of round 2 is the result"
    assert ends_with(again, finished, SHARE, AtWrite(again, 60)) == -signal.SIGKILL
    done = ran(again, finished, SHARE)
    assert done and all(name.startswith(("rounds/3/", "train/")) for name in done)
    assert differences(expected, contents(again)) == []


def test_rounds_when_a_bound_is_exceeded_then_the_result_is_the_round_that_was_measured_last(
    again: Path, finished: Path
) -> None:
    assert ran(again, finished, {**SHARE, "stop": {"kl": 1e-9}}) == ["train/dpo"]
    manifest = read_json(again / "train/dpo/manifest.json")
    divergence = read_json(again / "rounds/2/dpo/writer/measures.json")["kl_to_start"]["value"]
    assert divergence > 1e-9, "else the test shows nothing"
    assert manifest["summary"] == {"round": 2, "of": 3, "stopped": manifest["settings"]["stopped"]}
    assert f"is {divergence:.3g} nats" in manifest["summary"]["stopped"]
    assert len((again / "rounds/rounds.jsonl").read_text().splitlines()) == 2


def test_rounds_when_planned_then_all_are_known_before_the_first_and_done_behind_the_last(
    three: Path, finished: Path, tmp_path: Path
) -> None:
    def states(folder: Path) -> dict[str, State]:
        plan = make_plan(rounds_recipe(folder, finished, SHARE, **LORA))
        assert not plan.problems and [row.stage for row in plan.rows] == ["rounds"]
        return {one.unit.name: one.unit.state for one in plan.rows[0].estimates}

    of_a_round = ("sample", "writer", "verify", "pair", "replay", "train/dpo", "measure/dpo")
    names = {f"rounds/{number}/prompts" for number in (1, 2, 3)} | {"train/dpo"}
    names |= {f"rounds/1/{name}" for name in of_a_round if name != "replay"}
    names |= {f"rounds/{number}/dpo/{name}" for number in (2, 3) for name in of_a_round}
    assert states(tmp_path / "new") == dict.fromkeys(names, State.RUN)
    assert states(three) == dict.fromkeys(names, State.DONE)
    recipe = rounds_recipe(tmp_path / "new", finished, SHARE, **LORA)
    assert {unit.name for units in Listing(recipe, recipe.run_dir, "rounds").groups for unit in units} == names


def test_rounds_when_their_prompts_are_parts_of_all_then_another_number_of_rounds_is_refused(
    finished: Path, tmp_path: Path
) -> None:
    def problems(count: int, prompts: Any) -> list[str]:
        return recipe_problems(rounds_recipe(tmp_path / "run", finished, {"count": count, "prompts": prompts}))

    assert problems(3, "disjoint") == []
    (tmp_path / "run/rounds/1/prompts").mkdir(parents=True)
    StageFolder(tmp_path / "run/rounds/1/prompts", "0" * 32).finish("rounds/1/prompts", {"parts": 3}, {}, 1.0)
    assert problems(3, "disjoint") == problems(5, 10) == []
    (problem,) = problems(5, "disjoint")
    assert problem.startswith("rounds.count: ") and "one of 3 disjoint parts" in problem


def test_rounds_when_they_have_one_schedule_then_each_trains_a_part_and_another_number_of_rounds_is_refused(
    finished: Path, tmp_path: Path
) -> None:
    def recipe(count: int, schedule: str = "all", **training: Any) -> Recipe:
        rounds = {"count": count, "prompts": 10, "schedule": schedule}
        return rounds_recipe(tmp_path / "run", finished, rounds, **training)

    def part(number: int, schedule: str = "all") -> Any:
        outer = recipe(3, schedule)
        assert outer.rounds is not None
        train = _Round(outer.rounds, outer, number, "dpo").recipe(training=True).train
        assert train is not None
        return train.values_for("dpo").get("schedule_part")

    assert [part(number) for number in (1, 2, 3)] == [[1, 3], [2, 3], [3, 3]] and part(2, "each") is None
    (problem,) = recipe_problems(
        recipe(3, lr_scheduler_type="reduce_lr_on_plateau", eval_pairs=4, eval_strategy="steps")
    )
    assert problem.startswith("rounds.schedule: ") and "follows what is measured" in problem
    folder = tmp_path / "run/rounds/1/train/dpo"
    folder.mkdir(parents=True)
    StageFolder(folder, "0" * 32).finish("rounds/1/train/dpo", {"values": {"schedule_part": part(1)}}, {}, 1.0)
    assert recipe_problems(recipe(3)) == recipe_problems(recipe(5, "each")) == []
    (problem,) = recipe_problems(recipe(5))
    assert problem.startswith("rounds.count: ") and "over 3 rounds" in problem and "schedule=each" in problem


@pytest.mark.slow
def test_rounds_when_prompts_rest_then_each_method_asks_those_with_both_verdicts_and_others_come_back(
    finished: Path, tmp_path: Path
) -> None:
    def asked(place: str) -> dict[str, bool]:
        return has_both(read_responses(tmp_path / place / "verify/responses.parquet")[0])

    def recipe(count: int) -> Recipe:
        rounds = {"count": count, "prompts": "all", "rest": 1}
        return rounds_recipe(tmp_path, finished, rounds, objective=["dpo", "sft"], **LORA)

    run_recipe(recipe(2))
    done = [name for name, outcome in run_recipe(recipe(3)).outcomes.items() if outcome.ran]
    assert all(name.startswith(("rounds/3/", "train/")) for name in done)
    first = asked("rounds/1")
    for method in ("dpo", "sft"):
        second, third = asked(f"rounds/2/{method}"), asked(f"rounds/3/{method}")
        assert second.keys() == {name for name, both in first.items() if both} < first.keys()
        assert third.keys() == first.keys() - {name for name, both in second.items() if not both}
        assert len(third) > len(second), "else the test shows nothing"


def test_rounds_when_prompts_rest_then_only_later_rounds_have_prompts_of_their_own(
    finished: Path, tmp_path: Path
) -> None:
    def names(prompts: Any, rest: int | None) -> set[str]:
        recipe = rounds_recipe(tmp_path, finished, {"count": 2, "prompts": prompts, "rest": rest}, **LORA)
        units = itertools.chain(*Listing(recipe, recipe.run_dir, "rounds").groups)
        return {unit.name for unit in units if unit.name.endswith("/prompts")}

    assert names("all", None) == set() and names("all", 1) == {"rounds/2/dpo/prompts"}
    assert names(5, None) == {"rounds/1/prompts", "rounds/2/prompts"}
    assert names(5, 1) == {"rounds/1/prompts", "rounds/2/dpo/prompts"}
    recipe = rounds_recipe(tmp_path, finished, {"count": 2, "prompts": 5, "rest": 1})
    with pytest.raises(ConfigError, match=r"rounds\.rest: prompts rest by the verdicts .*add `verify`"):
        parse_recipe({**recipe.model_dump(mode="json", exclude_unset=True), "verify": None}, "test")


@pytest.mark.slow
def test_rounds_when_they_have_one_schedule_and_other_numbers_of_steps_then_each_ends_at_its_share_of_it(
    finished: Path, tmp_path: Path
) -> None:
    rounds = {"count": 3, "prompts": 10, "schedule": "all", "optimizer": "carried"}
    run_recipe(rounds_recipe(tmp_path, finished, rounds, num_train_epochs=1, warmup_steps=0, lora={"r": 4}))
    for number, place in ((1, "rounds/1"), (2, "rounds/2/dpo"), (3, "rounds/3/dpo")):
        log = read_json(tmp_path / place / "train/dpo/trainer_state.json")["log_history"]
        rates = [line["learning_rate"] for line in log if "loss" in line]
        share = [(number - 1 + step / len(rates)) / 3 for step in range(len(rates))]
        np.testing.assert_allclose(rates, [0.01 * (1 - done) for done in share], rtol=1e-9)


@pytest.mark.parametrize(
    ("most_age", "expected"),
    [
        (None, {2: ["1"], 3: ["2/dpo", "1"], 4: ["3/dpo", "2/dpo", "1"]}),
        (1, {2: ["1"], 3: ["2/dpo"], 4: ["3/dpo"]}),
        (2, {2: ["1"], 3: ["2/dpo", "1"], 4: ["3/dpo", "2/dpo"]}),
    ],
)
def test_replay_when_an_age_is_set_then_a_round_draws_from_the_rounds_before_up_to_it_the_last_first(
    most_age: int | None, expected: dict[int, list[str]], tmp_path: Path
) -> None:
    rounds = {"count": 4, "replay": {"share": 0.5, "most_age": most_age}}
    recipe = rounds_recipe(tmp_path, Path(BASE), rounds)
    units = itertools.chain(*Listing(recipe, recipe.run_dir, "rounds").groups)
    earlier = {unit.name: unit.task["earlier"] for unit in units if unit.name.endswith("/replay")}
    assert earlier == {
        f"rounds/{number}/dpo/replay": [tmp_path / "rounds" / place / "pair/pairs.parquet" for place in places]
        for number, places in expected.items()
    }


BASE, SECOND = "base", "{run}/rounds/2/dpo/train/dpo"


@pytest.mark.parametrize(
    ("rounds", "objective", "expected"),
    [
        ({}, "dpo", (SECOND, SECOND, BASE)),
        ({"reference": "previous"}, "dpo", (SECOND, SECOND, None)),
        ({"reference": "behavior"}, "dpo", (SECOND, SECOND, None)),
        ({"start": "model"}, "dpo", (SECOND, BASE, None)),
        ({"start": "model", "reference": "previous"}, "dpo", (SECOND, BASE, SECOND)),
        ({}, "simpo", (SECOND, SECOND, None)),
    ],
    ids=["start", "previous", "behavior", "from the model", "from the model to the previous", "reads none"],
)
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["all weights", "adapter"])
def test_third_round_when_settings_differ_then_its_writer_start_and_reference_are_those_models(
    rounds: dict[str, Any],
    objective: str,
    expected: tuple[str, str, str | None],
    lora: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    recipe = rounds_recipe(tmp_path, Path(BASE), {"count": 3, **rounds}, objective=objective, lora=lora)
    assert recipe.rounds is not None and recipe.model is not None
    now = _Round(recipe.rounds, recipe, 3, objective)
    models = now.writer(), now.recipe().model, now.reference()

    def trained(model: ModelConfig | None) -> str | None:
        if model is None or model == recipe.model:
            return model and BASE
        # An adapter lies on the recipe's model.
        assert lora is None or model.name_or_path == recipe.model.name_or_path
        return str(model.name_or_path if lora is None else model.adapter)

    assert tuple(map(trained, models)) == tuple(one and one.replace("dpo", objective) for one in expected)
    train = now.recipe().train
    assert train is not None
    assert (train.lora is None) == (lora is None or rounds.get("start") != "model"), "an adapter is trained further"
    assert (train.values_for(objective).get("reference") == "behavior") == (rounds.get("reference") == "behavior")


@pytest.mark.slow
def test_rounds_when_methods_run_side_by_side_then_all_is_equal_and_one_round_is_the_recipe_without(
    finished: Path, tmp_path: Path
) -> None:
    def results(name: str, **others: Any) -> dict[str, Any]:
        recipe = rounds_recipe(
            tmp_path / "run", finished, {"count": 2, "prompts": "all"}, objective=["dpo", "repo"], max_steps=2
        )
        run_recipe(recipe.model_copy(update=others))
        shutil.move(tmp_path / "run", tmp_path / name)
        return contents(tmp_path / name)

    one = results("one")
    assert differences(one, results("two", parallel=2)) == []
    plain = results("plain", rounds=None)
    shared = ("sample/responses.parquet", "verify/responses.parquet", "pair/pairs.parquet")
    for name in (*shared, *(f"train/{method}/model.safetensors" for method in ("dpo", "repo"))):
        assert plain[name] == one[f"rounds/1/{name}"], name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rounds_when_killed_between_writes_then_the_same_command_ends_as_an_undisturbed_run(
    again: Path, finished: Path
) -> None:
    expected, kills = contents(again), 0
    shutil.rmtree(again)
    # Each run goes on where the one before was killed, and gets further than that: the numbers rise.
    while ends_with(again, finished, SHARE, AtWrite(again, (kills + 1) * EVERY_WRITE)):
        kills += 1
    assert differences(expected, contents(again)) == []
    assert kills >= 10
