"""The studies of the paper's tables and figures, each in miniature, with the shape of the table that it ends in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from regretless.core.files import read_json
from regretless.runs.preflight import recipe_problems
from regretless.studies.compare import compare
from regretless.studies.distances import distance_tables, measure_distances
from regretless.studies.page import write_page
from regretless.studies.runner import run_study
from regretless.studies.search import search_settings, trials_of
from regretless.studies.study import Study, load_study
from regretless.workflow.run_folder import BASE

PROJECT = Path(__file__).resolve().parents[1]
QWEN = {"Qwen3-1.7B", "Qwen3-4B"}
ALL = {"base", "dpo", "ipo", "rpo", "kto", "tdpo", "repo", "repo_det"}
SHAPES = {
    "table1-chat": (QWEN, ALL, {""}, {"greedy"}),
    "table2-math": (QWEN, ALL, {""}, {"greedy"}),
    "table2-math-released": (
        {f"{model}, {scripts}" for model in QWEN for scripts in ("full sweep", "released")},
        ALL,
        {""},
        {"greedy"},
    ),
    "table3-llama": ({"Llama-3.1-8B", "Llama-3.1-8B-Instruct"}, ALL - {"repo"}, {""}, {"greedy"}),
    "table4-masked": (QWEN, {"base", "dpo", "repo"}, {"mask=unmasked", "mask=masked"}, {"greedy"}),
    "table11-seeds": (QWEN, ALL, {""}, {"greedy", "sampled"}),
    "figure4-families": ({"Llama-3.2-1B", "Gemma-2-2B"}, {"base", "dpo", "repo_det"}, {""}, {"greedy", "sampled"}),
    "figure5-masks": (
        QWEN,
        {"base", "dpo", "repo"},
        {f"mask.count={count}" for count in (0, 10000, 20000, 30000)},
        {"greedy"},
    ),
    "tables9-10-search": ({"chat (Table 9)", "mathematics (Table 10)"}, ALL, {""}, {"greedy"}),
    "rounds": (
        {"reference start", "reference behavior"},
        {"base", "repo", "repo_det", "dpo", "sft"},
        {f"rounds.count={count}" for count in (1, 3, 8)},
        {"greedy"},
    ),
    "quickstart": ({"quickstart"}, {"base", "dpo", "repo", "repo_det"}, {""}, {"greedy"}),
}

MARKS = dict.fromkeys(("quickstart", "table4-masked"), pytest.mark.slow)
"""Chat and mathematics, masks and distances; the others are run by `make test-extended`."""


WORLDS = {"writers-regret": (3, 1)}
"""Data seeds of a claim's study, and of its search, where they are not five and three."""


def test_studies_when_listed_then_each_has_a_shape() -> None:
    assert {path.stem for path in (PROJECT / "studies").glob("*.yaml")} == SHAPES.keys()


@pytest.mark.parametrize("path", sorted((PROJECT / "studies" / "claims").glob("*.yaml")), ids=lambda path: path.stem)
def test_claim_when_loaded_then_it_has_its_worlds_and_an_equal_search(path: Path) -> None:
    study = load_study(path)
    worlds, searched = WORLDS.get(path.stem, (5, 3))
    assert {cell.data_seed for cell in study.cells} == set(range(worlds))
    assert [problem for cell in study.cells[::5] for problem in recipe_problems(cell.recipe)] == []
    if study.config.search is not None:
        assert {cell.data_seed for cell in trials_of(study).cells} == set(range(searched))
        assert len(load_study(path, smoke=True).cells) == len(study.cells)


@pytest.fixture(scope="session")
def units(session_folder: Path) -> Path:
    """The store that the paper's studies share, for all processes of this test session."""
    return session_folder / "paper-units"


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.extended)) for name in SHAPES])
def test_study_when_run_small_then_its_table_has_its_shape(name: str, tmp_path: Path, units: Path) -> None:
    study = load_study(PROJECT / "studies" / f"{name}.yaml", output_dir=str(tmp_path / "study"), smoke=True)
    study = replace(study, store=units)
    if study.config.search is not None:
        study, choices = search_settings(study, 2)
        assert {(choice.target.model, choice.target.method) for choice in choices} == {
            (cell.model, method) for cell in study.cells for method in cell.methods
        }
        rates = [[trial.values["train.learning_rate"] for trial in choice.trials] for choice in choices]
        assert rates == [[5e-7, 2e-5]] * len(choices), "the first and the last value"
        assert {choice.metric for choice in choices} == {"win rate (%)", "Pass@1 (%)"}
        assert all(trial.score is not None for choice in choices for trial in choice.trials)
    assert run_study(study, processes=2) == []
    write_page(compare([cell.run for cell in study.cells], study.config.baseline), tmp_path, title=name)
    cells = read_json(tmp_path / "comparison.json")["cells"]
    models, methods, variants, decodings = SHAPES[name]
    assert {cell["model"] for cell in cells} == models
    assert {cell["method"] for cell in cells} == methods
    # The base model is the same in all variants, and has one row.
    trained = [cell for cell in cells if cell["method"] != BASE]
    assert {cell["variant"] for cell in trained} == variants
    columns = {(cell["benchmark"], cell["metric"], cell["judge"], cell["decoding"]) for cell in cells}
    places = {(cell["model"], *(cell[key] for key in ("benchmark", "metric", "judge", "decoding"))) for cell in cells}
    if name != "tables9-10-search":  # its models have benchmarks of their own
        assert len(places) == len(models) * len(columns)
    if name != "rounds":  # of its two references, one is of RePO alone
        assert len(trained) == len(places) * (len(methods) - 1) * len(variants)
    # Eight verdicts at random do not determine the length-controlled rate; its result says so.
    assert {cell["metric"] for cell in cells if cell["value"] is None} <= {"length_controlled_win_rate"}
    if name == "table4-masked":
        check_distances(study)
    if name == "table1-chat":
        assert {benchmark for benchmark, *_ in columns} == {"alpaca_eval", "arena_hard", "mt_bench", "mt_bench_gpt5"}
    else:
        assert {decoding for *_, decoding in columns} == decodings


def check_distances(study: Study) -> None:
    """The paper's Table 4: results, and the distance of every row's token scores to those of both RePO models."""
    distances, failures = measure_distances(study, [], processes=2)
    assert failures == []
    methods = [f"{method} (mask={mask})" for mask in ("unmasked", "masked") for method in ("dpo", "repo")]
    targets = methods[1::2]
    for model, columns, rows in distance_tables(compare([cell.run for cell in study.cells]), distances):
        assert model in QWEN
        assert columns[-2:] == [f"MSE to {target}" for target in targets]
        assert list(rows) == ["base", *methods]
        assert all(cells.keys() == set(columns) for cells in rows.values())
        zeros = [(row, column) for row, cells in rows.items() for column in columns[-2:] if cells[column] == "0"]
        assert zeros == [(target, f"MSE to {target}") for target in targets]
    values = {(one.model, one.row, one.to): tuple(each.value for each in one.measured) for one in distances}
    assert len(values) == len(QWEN) * 4 * 2, "the base model and three others, to each of two"
    for model in QWEN:
        assert values[model, targets[0], targets[1]] == values[model, targets[1], targets[0]]
        # What the run itself measured between its own models, on the same pairs.
        (run,) = [cell.recipe.run_dir for cell in study.cells if cell.name == f"{model}_mask=unmasked"]
        own = read_json(run / "analyze" / "score_distance.json")["models"]
        (within,) = [one["value"] for one in own if {one["first"], one["second"]} == {"dpo", "repo"}]
        assert values[model, methods[0], targets[0]] == (within,)
