"""Pairs read and tokenized: each keeps its row, and each rejected row its line and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regretless.analysis.inspect import InspectConfig
from regretless.core.errors import DataError
from regretless.data.pair_source import PairSource
from regretless.world.tokenizer import build_tokenizer

GOOD = {"prompt": "1+1=?\n", "chosen": "2", "rejected": "3"}
ROWS = [
    {**GOOD, "chosen": "2" * 60},  # too long for the policy
    GOOD,
    {**GOOD, "rejected": None},
    {**GOOD, "prompt": "1" * 60},
    {**GOOD, "chosen": "4"},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return tmp_path / "pairs.jsonl"


def test_pairs_when_tokenized_then_each_keeps_its_row_and_rejected_rows_are_in_order(
    file: Path, tmp_path: Path
) -> None:
    source = PairSource.read(file)
    assert [refusal.line for refusal in source.refused] == [3]
    limits = InspectConfig(max_length=40)
    tokenized = source.tokenize(build_tokenizer(), limits)
    assert [pair.source for pair in tokenized] == [f"{file}:2", f"{file}:5"]
    assert [pair.row for pair in tokenized] == [source.pairs[1], source.pairs[3]]
    reasons = ((1, "chosen: "), (3, "missing column(s) rejected"), (4, "prompt: "))
    for refusal, (line, reason) in zip(source.refused, reasons, strict=True):
        assert refusal.line == line and refusal.reason.startswith(reason)
    source.check(tokenized, tmp_path / "refused.jsonl")
    lines = (tmp_path / "refused.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 3, 4]


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_pairs_when_none_is_usable_then_the_error_names_the_first_rows(file: Path, one_at_a_time: bool) -> None:
    source = PairSource.read(file)
    selected = source.pairs[::-1]
    limits = InspectConfig(max_length=5)
    parts = [[pair] for pair in selected] if one_at_a_time else [selected]
    tokenized = [pair for part in parts for pair in source.tokenize(build_tokenizer(), limits, pairs=part)]
    assert tokenized == [] and [refusal.line for refusal in source.refused] == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"no usable row is left \(5 skipped\)\n.*pairs\.jsonl:1"):
        source.check(tokenized)
