"""The search of a study, on real trials of a small model."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_study import RECIPE

from regretless.cli import verbs
from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.studies.samplers import JOURNAL, Journal
from regretless.studies.search import Choice, Target, Trial, search_settings, trials_of
from regretless.studies.search_problems import check_apart
from regretless.studies.study import Cell, Study, load_study

PROBLEMS = {"dataset": "{run}/world/prompts.jsonl", "answer_column": "answer", "limit": 12}
SEARCH: dict[str, Any] = {
    "values": {"train.learning_rate": [1e-4, 1e-2, 1e30], "train.beta": [0.1, 1.0]},
    "seeds": [5, 6],
    "benchmarks": {"validation": PROBLEMS},
}
OPTIONS: dict[str, Any] = {"processes": 2, "smoke": False, "output_dir": None, "cluster": None}


def load(folder: Path, search: dict[str, Any], **changes: Any) -> Study:
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    study = {"name": "small", "recipe": "small.yaml", "methods": ["dpo"], "search": search, **changes}
    (folder / "study.yaml").write_text(json.dumps({**study, "output_dir": str(folder / "out")}))
    return load_study(folder / "study.yaml")


@pytest.mark.slow
def test_search_when_done_then_the_study_trains_with_the_best_trial_and_a_failed_one_is_never_best(
    tmp_path: Path,
) -> None:
    # One value makes every training fail; the others are judged by what the models answered.
    changes = {"settings": {"train.optim": "sgd", "train.max_grad_norm": 1e9}, "seeds": {"training": [0]}}
    study = load(tmp_path, SEARCH, **changes)
    trials = trials_of(study)
    assert len(trials.cells) == 3 * 2 * 2
    assert {cell.training_seed for cell in trials.cells} == {5, 6}
    verbs.study(tmp_path / "study.yaml", [], **OPTIONS)

    (found,) = read_json(tmp_path / "out" / "search" / "search.json")
    assert len(found["trials"]) == 6
    scores: dict[str, list[float]] = {}
    for cell in trials.cells:
        file = cell.recipe.run_dir / "evaluate" / "dpo" / "validation" / "result.json"
        key = json.dumps([float(cell.variant[name]) for name in SEARCH["values"]])
        if file.is_file():
            result = read_json(file)
            assert result["n"] == 12
            scores.setdefault(key, []).append(100 * result["pass_at_1"])
    for trial in found["trials"]:
        key = json.dumps([float(value) for value in trial["values"].values()])
        assert trial["scores"] == scores.get(key, [])
        assert trial["failed"] == (2 if trial["values"]["train.learning_rate"] == 1e30 else 0)
    best = max((trial for trial in found["trials"] if not trial["failed"]), key=lambda trial: trial["score"])
    assert found["best"] == best["values"]
    recipe = yaml.safe_load((tmp_path / "out" / "runs" / "training-0" / "recipe.yaml").read_text())
    assert recipe["train"]["methods"]["dpo"] == {
        key.removeprefix("train."): value for key, value in best["values"].items()
    }
    assert list(recipe["evaluate"]["benchmarks"]) == ["arithmetic"], "the study has its own benchmarks"
    page = (tmp_path / "out" / "comparison" / "comparison.html").read_text()
    assert "Every method had 6 trials, every combination" in page and "2 of 2 failed" in page


@pytest.mark.slow
def test_search_by_a_sampler_when_interrupted_then_it_ends_with_the_trials_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = {
        "sampler": "tpe",
        "trials": 3,
        "values": {"train.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "train.beta": [0.1, 1.0]},
        "seeds": [5],
        "benchmarks": {"validation": PROBLEMS},
    }
    shared = {"methods": ["dpo", "ipo"], "store": str(tmp_path / "units")}
    _, choices = search_settings(load(tmp_path, search, **shared), 2)
    assert [choice.target.method for choice in choices] == ["dpo", "ipo"]
    assert all(len(choice.trials) == 3 for choice in choices), "an equal budget"
    rates = [trial.values["train.learning_rate"] for trial in choices[0].trials]
    assert len(set(rates)) == 3 and all(1e-4 <= rate <= 1e-1 for rate in rates)
    for number, rate in enumerate(rates):
        run = tmp_path / "out" / "search" / "runs" / f"method=dpo_trial={number}_training-5"
        recipe = yaml.safe_load((run / "recipe.yaml").read_text())
        assert recipe["train"]["methods"]["dpo"]["learning_rate"] == rate
        assert recipe["train"]["objective"] == ["dpo"]
        result = read_json(run / "evaluate" / "dpo" / "validation" / "result.json")
        assert choices[0].trials[number].scores == (100 * result["pass_at_1"],)

    # Another folder, stopped when the second trial of the first method was scored and not yet kept.
    (tmp_path / "out").rename(tmp_path / "undisturbed")
    added, add = [], Journal.add

    def stopped(journal: Journal, name: str, number: int, *rest: Any) -> None:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(number)
        add(journal, name, number, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "add", stopped)
        search_settings(load(tmp_path, search, **shared), 2)
    assert added == [0, 0]
    kept = (tmp_path / "out" / "search" / JOURNAL).read_bytes()
    _, resumed = search_settings(load(tmp_path, search, **shared), 2)
    assert resumed == choices
    assert (tmp_path / "out" / "search" / JOURNAL).read_bytes().startswith(kept), "what was kept is not tried again"
    files = [tmp_path / folder / "search" / "search.json" for folder in ("undisturbed", "out")]
    assert read_json(files[0]) == read_json(files[1])
    # More trials go on from those that are there; other settings of training begin again.
    longer = {**search, "trials": 4}
    _, more = search_settings(load(tmp_path, longer, **shared), 2)
    assert [choice.trials[:3] for choice in more] == [choice.trials for choice in choices]
    names = journal_names(tmp_path)
    assert len(names) == 2
    other = {**shared, "methods": ["dpo"], "settings": {"train.max_steps": 5}}
    search_settings(load(tmp_path, {**search, "trials": 1}, **other), 2)
    assert len(journal_names(tmp_path)) == 3


def journal_names(folder: Path) -> set[str]:
    """Names of the searches in a journal, one for each method."""
    lines = (folder / "out" / "search" / JOURNAL).read_text().splitlines()
    return {name for line in lines if (name := json.loads(line).get("study_name")) is not None}


def test_values_when_searched_then_they_win_over_those_of_the_method_in_the_recipe(tmp_path: Path) -> None:
    settings = {"train.methods.dpo.learning_rate": 7e-3, "train.methods.ipo.beta": 0.7}
    search = {**SEARCH, "values": {"train.learning_rate": [1e-4, 1e-2], "train.eta": [0.1, 0.2]}}
    for sampler in ({}, {"sampler": "random", "trials": 2}):
        study = load(tmp_path, {**search, **sampler}, methods=["dpo", "rpo"], settings=settings)
        cells = trials_of(study).cells
        trainings = [(train, method) for cell in cells if (train := cell.recipe.train) for method in cell.methods]
        rates = {train.values_for(method)["learning_rate"] for train, method in trainings}
        assert rates == ({1e-4} if sampler else {1e-4, 1e-2}), "of a sampler's trials, the first with the least values"
        for cell in cells:
            assert cell.recipe.train is not None
            assert "eta" not in cell.recipe.train.values_for("dpo"), "rpo's hyperparameter"
            assert "eta" not in cell.recipe.train.methods.get("dpo", {})


def test_search_when_its_problems_are_those_of_the_study_then_its_results_are_refused(tmp_path: Path) -> None:
    search = {"values": {"train.beta": [0.1, 1.0]}, "seeds": [5], "benchmarks": {"validation": None}}
    search["benchmarks"] = {"validation": {"dataset": "{run}/world/test.jsonl", "answer_column": "answer", "limit": 3}}
    load(tmp_path, search)
    with pytest.raises(ConfigError, match="3 of their 3 problems are also in the study's benchmarks"):
        verbs.study(tmp_path / "study.yaml", [], **OPTIONS)


def test_search_when_methods_have_values_of_their_own_then_each_tries_these_on_every_data_seed(tmp_path: Path) -> None:
    own = {"ipo": {"train.learning_rate": [1e-3, 3e-3, 1e-2], "train.max_grad_norm": [0.5, 1.0]}}
    values = {"train.learning_rate": [1e-4, 1e-3, 1e-2], "train.beta": [0.1, 1.0]}
    search = {**SEARCH, "values": values, "methods": own, "seeds": [], "data_seeds": [3, 4]}
    study = load(tmp_path, search, methods=["dpo", "ipo", "repo"], seeds={"data": [3, 4, 5]})
    cells = trials_of(study).cells
    common, alone = ([cell for cell in cells if cell.methods == names] for names in (["dpo", "repo"], ["ipo"]))
    assert len(common) == len(alone) == 12 and len(cells) == 24
    assert {cell.data_seed for cell in common} == {cell.data_seed for cell in alone} == {3, 4}
    entries = [cell.recipe.train.methods["ipo"] for cell in alone]  # type: ignore[union-attr]
    tried = {(entry["learning_rate"], entry["max_grad_norm"]) for entry in entries}
    assert tried == {(rate, norm) for rate in (1e-3, 3e-3, 1e-2) for norm in (0.5, 1.0)}


@pytest.mark.parametrize(("seed", "is_refused"), [(3, True), (4, False)])
def test_problems_of_the_search_when_worlds_are_generated_then_they_count_for_their_own_seed(
    seed: int, is_refused: bool, tmp_path: Path
) -> None:
    study = load(tmp_path, {**SEARCH, "seeds": [], "data_seeds": [3]}, seeds={"data": [3, 4]})
    (tested,) = [cell for cell in study.cells if cell.data_seed == seed]
    for cell, name in ((trials_of(study).cells[0], "validation"), (tested, "arithmetic")):
        folder = cell.recipe.run_dir / "evaluate" / "base" / name
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["the same problem"]}), folder / "responses.parquet")
    with pytest.raises(ConfigError, match="1 of their 1 problems") if is_refused else contextlib.nullcontext():
        check_apart(study, [tested])


def test_problems_of_the_search_when_they_are_missing_then_nothing_is_begun(tmp_path: Path) -> None:
    load(tmp_path, {**SEARCH, "benchmarks": {"validation": {**PROBLEMS, "dataset": str(tmp_path / "none.jsonl")}}})
    with pytest.raises(ConfigError, match=r"evaluate.benchmarks.validation.*none.jsonl"):
        verbs.study(tmp_path / "study.yaml", [], **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_choice_when_the_best_lies_at_the_edge_then_it_says_so_and_a_mean_with_a_failed_seed_is_no_score() -> None:
    def trial(rate: float, *scores: float, failed: int = 0) -> Trial:
        return Trial({"train.learning_rate": rate}, scores, failed)

    def choice(*trials: Trial) -> Choice:
        return Choice(Target("", (), "dpo"), "Pass@1 (%)", {"train.learning_rate": [1e-4, 1e-3, 1e-2]}, trials)

    middle = choice(trial(1e-4, 0.1, 0.3), trial(1e-3, 0.3, 0.3), trial(1e-2, 0.2, 0.2))
    assert (middle.best.values, middle.edges) == ({"train.learning_rate": 1e-3}, [])
    edge = choice(trial(1e-4, 0.4, 0.3), trial(1e-3, 0.9, failed=1), trial(1e-2, 0.2, 0.2))
    assert (edge.best.values, edge.edges) == ({"train.learning_rate": 1e-4}, ["train.learning_rate"])
    assert edge.overrides == ["train.methods.dpo.learning_rate=0.0001"]
    assert middle.remarks == []
    assert edge.remarks == [
        "the best value of train.learning_rate lies at the edge of those tried; a better one may lie beyond"
    ]
    tied = choice(trial(1e-4, 0.1), trial(1e-3, 0.5), trial(1e-2, 0.5))
    assert tied.best.values == {"train.learning_rate": 1e-3}
    assert tied.remarks == ["1 other trial(s) have the same score; the first was taken"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"values": {"mask.count": [0, 1]}}, "mask.count: expected a setting of training"),
        ({"values": {"train.methods.dpo.beta": [0, 1]}}, "expected a setting of training that methods have in common"),
        ({"values": {"train.beta": [0.1]}}, "expected at least two values"),
        ({"benchmarks": {}}, "search: expected at least one benchmark"),
        ({"seeds": []}, "search.*seeds: expected at least one seed"),
        ({"methods": {"dpo": {"train.beta": [0.1, 1.0]}}}, "`values` has 6, dpo has 2"),
        ({"seeds": [1, 1]}, "seeds: a seed occurs twice"),
        ({"sampler": "tpe"}, "trials: required by sampler tpe"),
        ({"trials": 3}, "trials: a grid tries every combination once"),
        ({"values": {"train.beta": {"low": 0.1, "high": 1}}}, "train.beta: a grid needs a list of values"),
        ({"sampler": "tpe", "trials": 3, "values": {"train.beta": {"low": 1, "high": 1}}}, "expected low < high"),
        ({"sampler": "tpe", "trials": 3, "values": {"train.beta": {"low": 0, "high": 1, "log": True}}}, "both above 0"),
    ],
)
def test_search_when_it_cannot_work_then_it_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, {**SEARCH, **changes})


def test_value_when_searched_and_given_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search.values: train.beta: also in `overrides`"):
        load(tmp_path, SEARCH, overrides={"train.beta": [0.1, 1.0]})


CHAT = {"benchmark": "alpaca_eval", "questions": "validation.json", "judge": "judge"}


def test_search_by_chat_benchmarks_when_a_recipe_evaluates_these_then_its_trials_are_judged_by_them(
    tmp_path: Path,
) -> None:
    search = {**SEARCH, "chat": {"judged": CHAT}}
    server = {"api_key_env": "A_KEY", "concurrency": 3}
    chat = {"evaluate": {"server": server, "benchmarks": {"arithmetic": None}, "chat": {"test": {**CHAT, "limit": 5}}}}
    study = load(tmp_path, search, models={"answers": {}, "chat": chat})
    found = {cell.model: cell.recipe.evaluate for cell in trials_of(study).cells}
    assert found["answers"] is not None and found["chat"] is not None
    assert (list(found["answers"].benchmarks), list(found["answers"].chat)) == (["validation"], [])
    assert (list(found["chat"].benchmarks), list(found["chat"].chat)) == ([], ["judged"])
    judged = found["chat"].chat["judged"]
    assert (judged.server.concurrency, judged.limit) == (3, None), "the server of the recipe, the search's questions"
    with pytest.raises(ConfigError, match=r"one metric, got Pass@1 \(%\), win rate \(%\)"):
        both = {"evaluate": {"server": server, "chat": {"test": CHAT}}}
        trials_of(load(tmp_path, search, models={"both": both}))
    with pytest.raises(ConfigError, match="judge"):
        trials_of(load(tmp_path, {**search, "chat": {"judged": {"benchmark": "alpaca_eval"}}}, models={"chat": chat}))


def test_chat_questions_when_the_search_shares_one_with_the_study_then_it_is_refused(tmp_path: Path) -> None:
    server = {"api_key_env": "A_KEY"}
    chat = {"evaluate": {"server": server, "benchmarks": {"arithmetic": None}, "chat": {"test": CHAT}}}
    search = {**SEARCH, "benchmarks": {}, "chat": {"judged": {**CHAT, "template": "assistant", "questions": "a.json"}}}
    study = load(tmp_path, search, models={"chat": chat})

    def answered(cell: Cell, *prompts: list[dict[str, str]]) -> None:
        assert cell.recipe.evaluate is not None
        (benchmark,) = cell.recipe.evaluate.chat.values()
        folder = cell.recipe.run_dir / "evaluate" / "samples" / "base" / benchmark.answers / "turn-1-temperature-0"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"prompt": list(prompts)}), folder / "responses.parquet")

    def asked(text: str, *system: str) -> list[dict[str, str]]:
        return [*({"role": "system", "content": line} for line in system), {"role": "user", "content": text}]

    (cell,) = study.cells
    trial = trials_of(study).cells[0]
    answered(trial, asked("Why?", "You are a helpful assistant."), asked("Who?", "You are a helpful assistant."))
    answered(cell, asked("When?"))
    check_apart(study, study.cells)
    shutil.rmtree(cell.recipe.run_dir)
    answered(cell, asked("When?"), asked("Who?"))
    with pytest.raises(ConfigError, match="1 of their 2 problems are also in the study's benchmarks"):
        check_apart(study, study.cells)
