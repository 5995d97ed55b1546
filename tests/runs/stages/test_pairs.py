"""Stage `pairs`: a user's own file, whose rows keep their file and line in all later stages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from regretless.data.preferences import read_pairs
from regretless.data.rows import write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.runs.recipe import PairsSource
from regretless.runs.stages import Session
from regretless.runs.stages.pairs import STAGE
from regretless.training.pair_store import PairTable
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
