"""The search of a study, on real trials of a small model."""

from __future__ import annotations

import contextlib
import json
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
from regretless.studies.search import Choice, Trial, check_apart, trials_of
from regretless.studies.study import Study, load_study

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


def test_search_when_done_then_the_study_trains_with_the_best_trial_and_a_failed_one_is_never_best(
    tmp_path: Path,
) -> None:
    # One value makes every training fail; the others are judged by what the models answered.
    changes = {"settings": {"train.optim": "sgd", "train.max_grad_norm": 1e9}, "seeds": {"training": [0]}}
    study = load(tmp_path, SEARCH, **changes)
    (trials,) = trials_of(study)
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
            scores.setdefault(key, []).append(result["pass_at_1"])
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
    assert "Every method had 6 trials" in page and "2 of 2 failed" in page


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
    common, ipo = trials_of(study)
    assert [cell.methods for cell in (common.cells[0], ipo.cells[0])] == [["dpo", "repo"], ["ipo"]]
    assert {cell.data_seed for cell in [*common.cells, *ipo.cells]} == {3, 4}
    assert len(common.cells) == len(ipo.cells) == 12
    tried = {(cell.recipe.train.learning_rate, cell.recipe.train.max_grad_norm) for cell in ipo.cells}  # type: ignore
    assert tried == {(rate, norm) for rate in (1e-3, 3e-3, 1e-2) for norm in (0.5, 1.0)}
    assert common.folder != ipo.folder


@pytest.mark.parametrize(("seed", "is_refused"), [(3, True), (4, False)])
def test_problems_of_the_search_when_worlds_are_generated_then_they_count_for_their_own_seed(
    seed: int, is_refused: bool, tmp_path: Path
) -> None:
    study = load(tmp_path, {**SEARCH, "seeds": [], "data_seeds": [3]}, seeds={"data": [3, 4]})
    (tested,) = [cell for cell in study.cells if cell.data_seed == seed]
    for cell, name in ((trials_of(study)[0].cells[0], "validation"), (tested, "arithmetic")):
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

    middle = Choice("", {}, "dpo", (trial(1e-4, 0.1, 0.3), trial(1e-3, 0.3, 0.3), trial(1e-2, 0.2, 0.2)))
    assert (middle.best.values, middle.edges) == ({"train.learning_rate": 1e-3}, [])
    edge = Choice("", {}, "dpo", (trial(1e-4, 0.4, 0.3), trial(1e-3, 0.9, failed=1), trial(1e-2, 0.2, 0.2)))
    assert (edge.best.values, edge.edges) == ({"train.learning_rate": 1e-4}, ["train.learning_rate"])
    assert edge.overrides == ["train.methods.dpo.learning_rate=0.0001"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"values": {"mask.count": [0, 1]}}, "mask.count: expected a setting of training"),
        ({"values": {"train.methods.dpo.beta": [0, 1]}}, "expected a setting of training that methods have in common"),
        ({"values": {"train.beta": [0.1]}}, "expected at least two values"),
        ({"benchmarks": {}}, "search.benchmarks"),
        ({"methods": {"dpo": {"train.beta": [0.1, 1.0]}}}, "`values` has 6, dpo has 2"),
        ({"seeds": []}, "search.*seeds: expected at least one seed"),
    ],
)
def test_search_when_it_cannot_work_then_it_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, {**SEARCH, **changes})


def test_value_when_searched_and_given_then_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search.values: train.beta: also in `overrides`"):
        load(tmp_path, SEARCH, overrides={"train.beta": [0.1, 1.0]})
