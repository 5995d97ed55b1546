"""The studies of the paper's tables and figures, each in miniature, with the shape of the table that it ends in."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.files import read_json
from regretless.core.run_folder import BASE
from regretless.runs.preflight import recipe_problems
from regretless.studies.comparison import compare
from regretless.studies.page import write_page
from regretless.studies.runner import run_study
from regretless.studies.search import trials_of
from regretless.studies.study import load_study

PROJECT = Path(__file__).resolve().parents[1]
QWEN = {"Qwen3-1.7B", "Qwen3-4B"}
ALL = {"base", "dpo", "ipo", "rpo", "kto", "tdpo", "repo", "repo_det"}
SHAPES = {
    "table1-chat": (QWEN, ALL, {""}, {"greedy"}),
    "table2-math": (QWEN, ALL, {""}, {"greedy"}),
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
    "quickstart": ({"quickstart"}, {"base", "dpo", "repo", "repo_det"}, {""}, {"greedy"}),
}


def test_studies_when_listed_then_each_has_a_shape() -> None:
    assert {path.stem for path in (PROJECT / "studies").glob("*.yaml")} == SHAPES.keys()


@pytest.mark.parametrize("path", sorted((PROJECT / "studies" / "claims").glob("*.yaml")), ids=lambda path: path.stem)
def test_claim_when_loaded_then_it_has_five_worlds_and_an_equal_search_on_three(path: Path) -> None:
    study = load_study(path)
    assert {cell.data_seed for cell in study.cells} == {0, 1, 2, 3, 4}
    assert [problem for cell in study.cells[::5] for problem in recipe_problems(cell.recipe)] == []
    if study.config.search is not None:
        trials = [cell for searched in trials_of(study) for cell in searched.cells]
        assert {cell.data_seed for cell in trials} == {0, 1, 2}
        assert len(load_study(path, smoke=True).cells) == len(study.cells)


@pytest.mark.parametrize("name", SHAPES)
def test_study_when_run_small_then_its_table_has_its_shape(name: str, tmp_path: Path) -> None:
    study = load_study(PROJECT / "studies" / f"{name}.yaml", output_dir=str(tmp_path / "study"), smoke=True)
    assert run_study(study) == []
    write_page(compare([cell.run for cell in study.cells], study.config.baseline), tmp_path, title=name)
    cells = read_json(tmp_path / "comparison.json")["cells"]
    models, methods, variants, decodings = SHAPES[name]
    assert {cell["model"] for cell in cells} == models
    assert {cell["method"] for cell in cells} == methods
    # The base model is the same in all variants, and has one row.
    trained = [cell for cell in cells if cell["method"] != BASE]
    assert {cell["variant"] for cell in trained} == variants
    columns = {(cell["benchmark"], cell["metric"], cell["judge"], cell["decoding"]) for cell in cells}
    assert len(trained) == len(models) * (len(methods) - 1) * len(variants) * len(columns)
    assert all(cell["value"] is not None for cell in cells)
    if name == "table1-chat":
        assert {benchmark for benchmark, *_ in columns} == {"alpaca_eval", "arena_hard", "mt_bench", "mt_bench_gpt5"}
    else:
        assert {decoding for *_, decoding in columns} == decodings
