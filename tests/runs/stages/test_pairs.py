"""Stage `pairs`: a user's own file, whose rows keep their file and line in all later stages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regretless.core.errors import ConfigError
from regretless.data.preferences import read_pairs
from regretless.data.rows import read_rows, write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.runs.recipe import PairsSource, parse_recipe
from regretless.runs.stages import Run, Session
from regretless.runs.stages.pairs import STAGE
from regretless.training.pair_store import PairTable
from regretless.workflow.run_folder import RunFolder
from regretless.world.tokenizer import build_tokenizer

MESSAGES = [{"role": "user", "content": "7-2"}], [{"role": "assistant", "content": "5"}]


def test_rows_of_a_users_file_when_read_by_later_stages_then_they_are_named_by_its_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "7+2", "chosen": "9", "rejected": "5"},
        {"prompt": "7+2", "chosen": "", "rejected": "5"},
        # A text and a conversation, in one file.
        {"prompt": MESSAGES[0], "chosen": MESSAGES[1], "rejected": [{"role": "assistant", "content": "9"}]},
        {"prompt": "1+1", "chosen": "2", "rejected": "2" * 60},
    ]
    file, place = tmp_path / "mine.jsonl", tmp_path / "pair"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    place.mkdir()
    unit: Any = SimpleNamespace(task={"config": PairsSource(dataset=str(file))})
    assert STAGE.do(unit, place, Session()) == {"pairs": 3, "refused": 1}
    pairs, refused = read_pairs(place / "pairs.parquet")
    assert not refused
    assert pairs[0].prompt == [{"role": "user", "content": "7+2"}], "a column of a table holds one kind"
    assert pairs[0].chosen.text == [{"role": "assistant", "content": "9"}]
    # Through another stage's file, the reasons, and the table for training.
    write_records(tmp_path / "masked.parquet", pairs)
    pairs, _ = read_pairs(tmp_path / "masked.parquet")
    limits = {"max_length": 20, "max_prompt_length": None, "need_logps": False}
    kept, skipped = tokenize_pairs(pairs, build_tokenizer(), **limits)
    assert [pair.source for pair in kept] == ["mine.jsonl:1", "mine.jsonl:3"]
    assert [f"{one.source}:{one.line}" for one in skipped] == ["mine.jsonl:4"]
    PairTable.write(kept, tmp_path / "table")
    assert [pair.source for pair in PairTable.open(tmp_path / "table", "elsewhere.parquet")] == [
        "mine.jsonl:1",
        "mine.jsonl:3",
    ]


def made(tmp_path: Path, rows: list[dict[str, Any]], recipe: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Summary of the stage in a recipe, and the reasons of the rows that it rejects."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {"name": "x", "output_dir": str(tmp_path / "run"), **recipe}
    values["pairs"] = {"dataset": str(file), **recipe.get("pairs", {})}
    parsed = parse_recipe(values, "x")
    assert parsed.pairs is not None
    ((unit,),) = STAGE.units(parsed.pairs, Run.of(parsed, RunFolder(tmp_path / "run")))
    place = tmp_path / "pair"
    place.mkdir(exist_ok=True)
    summary = STAGE.do(unit, place, Session())
    return summary, [row["reason"] for _, row in read_rows(place / "refused.jsonl") if isinstance(row, dict)]


def test_pairs_when_scores_are_closer_than_the_smallest_margin_then_they_are_skipped_and_those_without_stay(
    tmp_path: Path,
) -> None:
    scores = [(3.0, 2.0), (3.0, 2.5), (2.0, 3.0), (3.0, None)]
    rows = [
        {"prompt": f"q{number}", "chosen": "a", "rejected": "b", "chosen_score": chosen, "rejected_score": rejected}
        for number, (chosen, rejected) in enumerate(scores)
    ]
    assert made(tmp_path, rows, {}) == ({"pairs": 4, "refused": 0}, [])
    summary, reasons = made(tmp_path, rows, {"pairs": {"smallest_margin": 1.0, "limit": 2}})
    assert summary == {"pairs": 2, "refused": 2}
    assert set(reasons) == {"chosen_score minus rejected_score: less than smallest_margin 1"}
    kept, _ = read_pairs(tmp_path / "pair" / "pairs.parquet")
    assert [pair.prompt for pair in kept] == ["q0", "q3"]


def test_pairs_when_their_prompts_stand_in_a_benchmark_of_the_run_then_they_are_skipped_if_asked(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in ("What is 3+4?", "What is 3+5?")]
    (tmp_path / "test.jsonl").write_text('{"prompt": "what is 3 + 4", "answer": "7"}\n', encoding="utf-8")
    sums = {"dataset": str(tmp_path / "test.jsonl"), "answer_column": "answer", "template": "math"}
    recipe = {"model": {"name_or_path": "a/b"}, "evaluate": {"benchmarks": {"sums": sums}}}
    assert made(tmp_path, rows, recipe) == ({"pairs": 2, "refused": 0}, [])
    summary, reasons = made(tmp_path, rows, {**recipe, "decontaminate": True})
    assert summary == {"pairs": 1, "refused": 1}
    assert reasons == ["prompt: equal to a problem of the benchmark sums"]
    with pytest.raises(ConfigError, match="decontaminate: no benchmark whose problems could be left out"):
        parse_recipe({"name": "x", "pairs": {"dataset": "a"}, "decontaminate": True}, "x")
