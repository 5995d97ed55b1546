"""Lists of the most likely tokens: from sampling through the files of all stages to a batch, cut with their tokens."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from regretless.core.errors import DataError
from regretless.core.top_logps import ENTRY, packed, packed_top, unpacked
from regretless.data.columns import Response, Verdict
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.labeling import mask, pair, verify
from regretless.modeling.load import tokenizer_fingerprint
from regretless.objectives import build
from regretless.training.arguments import PreferenceConfig
from regretless.training.batch import build_batch
from regretless.training.data import TrainingPair
from regretless.training.pair_reading import pair_table
from regretless.training.pair_store import PairTable
from regretless.world.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
TOPK = build("repo", estimator="topk", reference_weight=0)


def lists_of(count: int, listed: int, seed: int) -> bytes:
    """Lists of a response of so many tokens."""
    numbers = np.random.default_rng(seed)
    ids = np.stack([numbers.permutation(40)[:listed] for _ in range(count)])
    return packed(ids, np.log(numbers.dirichlet(np.ones(listed + 1), count)[:, :listed])).tobytes()


def responses(listed: tuple[int, ...] = (4, 4, 4, 4)) -> list[Response]:
    found = []
    for number, (text, width) in enumerate(
        zip(("\\boxed{7}", "8 - 1 = 7", "9 - 1 = 8 * 1", "\\boxed{6}"), listed, strict=True)
    ):
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        found.append(
            Response(
                prompt_id="p",
                response_id=str(number),
                prompt="1",
                response=TOKENIZER.decode(ids, skip_special_tokens=True),
                prompt_token_ids=TOKENIZER("1")["input_ids"],
                token_ids=ids,
                logps=[-0.5] * len(ids),
                logps_kind="raw",
                top_logps=lists_of(len(ids), width, number),
                top_logps_kind="raw",
                tokenizer=tokenizer_fingerprint(TOKENIZER),
                finish_reason="stop",
                answer="7",
                verdict=Verdict.CORRECT if number < 2 else Verdict.WRONG,
            )
        )
    return found


@pytest.mark.parametrize("form", [".parquet", ".jsonl"])
def test_lists_when_stages_hand_them_on_then_each_token_keeps_its_own_down_to_the_batch(
    form: str, tmp_path: Path
) -> None:
    given = responses()
    of_id = {row.response_id: row.top_logps for row in given}
    write_records(tmp_path / f"given{form}", given)
    verify.run(verify.VerifyConfig(workers=1), tmp_path / f"given{form}", tmp_path / "verified")
    kept, refused = read_responses(tmp_path / "verified" / "responses.parquet")
    assert {row.response_id: row.top_logps for row in kept} == of_id and not refused
    write_records(tmp_path / f"labeled{form}", given)
    pair.run(pair.PairConfig(), tmp_path / f"labeled{form}", tmp_path / "paired")
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    config = mask.MaskConfig(lengths=(2,), tokenizer=str(tmp_path / "tokenizer"))
    mask.run(config, tmp_path / "paired" / "pairs.parquet", tmp_path / "masked")
    pairs, refused = read_pairs(tmp_path / "masked" / "pairs.parquet")
    assert {each.kind for each in pairs} == {"original", "masked"} and not refused
    for each in pairs:
        for side in each.sides.values():
            whole = of_id[(side.id or "").partition("-")[0]] if each.kind == "original" else each.chosen.top_logps
            assert side.top_logps_kind == "raw" and side.token_ids is not None and whole is not None
            assert side.top_logps == whole[: 4 * 8 * len(side.token_ids)]
    write_records(tmp_path / f"pairs{form}", pairs)
    again, refused = read_pairs(tmp_path / f"pairs{form}")
    assert [each.sides for each in again] == [each.sides for each in pairs] and not refused

    # To the trainer, in a file of its own form, with the ends of long responses cut off.
    longest = max(len(side.token_ids or ()) for each in pairs for side in each.sides.values())
    tokenized, refused = tokenize_pairs(
        again, TOKENIZER, max_length=longest, max_prompt_length=None, truncation="keep_start"
    )
    table = PairTable.temporary(tokenized)
    assert [*table] == tokenized and not refused
    batch = build_batch([TrainingPair(each) for each in table], TOPK)
    assert batch.top is not None and batch.layouts[0].listed is not None
    cut = 0
    for number, rows in enumerate(batch.pairs.tolist()):
        for row, side, stored in zip(rows, table[number].sides, pairs[number].sides.values(), strict=True):
            entries = unpacked(stored.top_logps or b"", len(stored.token_ids or ()))[: len(side.ids)]
            entries = np.take_along_axis(entries, entries["id"].argsort(axis=1), axis=1)
            assert batch.top[row, : len(side.ids)].tolist() == entries["logp"].tolist()
            listed = batch.layouts[0].listed[batch.gather[row, : len(side.ids)]]
            assert listed.tolist() == entries["id"].tolist()
            targets = batch.layouts[0].targets[batch.gather[row, : len(side.ids)]]
            assert tuple(targets.tolist()) == side.ids
            cut += len(side.ids) < len(stored.token_ids or ())
    assert cut, "some responses are longer than max_length leaves room for"


def test_files_when_nothing_is_listed_then_they_have_no_column_for_it(tmp_path: Path) -> None:
    rows = [replace(row, top_logps=None, top_logps_kind=None) for row in responses()]
    write_records(tmp_path / "responses.parquet", rows)
    assert not [name for name in pq.read_schema(tmp_path / "responses.parquet").names if "top" in name]


FAULTS: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "a byte less": (lambda entries: entries.tobytes()[:-1], "expected 8 bytes for each listed token, and equally many"),
    "a token less": (lambda entries: entries[:-1].tobytes() + b"\0" * 8, "expected 8 bytes for each listed token"),
    "nothing": (lambda entries: b"", "got 0 bytes"),
    "no base64": (lambda entries: "ä?", "top_logps: expected bytes, or a text in base64, got 'ä"),
    "an id twice": (lambda entries: put(entries, "id", (1, 0), entries["id"][1, 1]), "token 1 lists .*; expected ids"),
    "a negative id": (lambda entries: put(entries, "id", (0, 2), -1), "token 0 lists .*; expected ids from 0"),
    "above 1": (lambda entries: put(entries, "logp", (2, 0), 0.3), "token 2 lists .*probabilities sum up to at most 1"),
    "no number": (lambda entries: put(entries, "logp", (0, 0), np.nan), "token 0 lists .*expected log-probabilities"),
}


def put(entries: np.ndarray, name: str, at: tuple[int, int], value: Any) -> bytes:
    changed = entries.copy()
    changed[name][at] = value
    return changed.tobytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_lists_that_are_broken_when_read_then_the_row_is_refused_with_the_place(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    row = responses()[1]
    changed = change(unpacked(row.top_logps or b"", len(row.token_ids or ())))
    text = changed if isinstance(changed, str) else base64.b64encode(changed).decode()
    given = {"prompt": "1", "response": row.response, "token_ids": row.token_ids, "top_logps": text}
    (tmp_path / "rows.jsonl").write_text(json.dumps(given) + "\n", encoding="utf-8")
    _, (refused,) = read_responses(tmp_path / "rows.jsonl")
    assert re.search(message, refused.reason), refused.reason
    both = {"prompt": "1", "chosen": row.response, "rejected": "other", "chosen_token_ids": row.token_ids}
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**both, "chosen_top_logps": text}) + "\n", encoding="utf-8")
    _, (refused,) = read_pairs(tmp_path / "pairs.jsonl")
    assert refused.reason.startswith("chosen_top_logps: ") and re.search(message, refused.reason), refused.reason


def test_tokens_that_cannot_be_drawn_when_listed_have_no_probability() -> None:
    data = packed_top([[(3, -0.0), (5, -np.inf)], [(1, -0.7), (0, 1e-6)]])
    assert unpacked(data, 2).tolist() == [[(3, 0.0), (5, -np.inf)], [(1, np.float32(-0.7)), (0, 0.0)]]
    assert ENTRY.itemsize == 8


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ((4, 4, 5, 5), "expected equally many tokens in all lists of top_logps, got 4 and 5"),
        ((4, 4, 0, 4), "repo needs the behavior policy's top_logps, and . of . pairs have none: .*top_logps=20"),
    ],
)
def test_data_when_lists_differ_in_length_or_are_missing_then_training_is_refused(
    listed: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    rows = [replace(row, top_logps=row.top_logps or None) for row in responses(listed)]
    write_records(tmp_path / "responses.parquet", rows)
    pair.run(pair.PairConfig(), tmp_path / "responses.parquet", tmp_path / "paired")
    args = PreferenceConfig(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    with pytest.raises(DataError, match=message):
        pair_table(tmp_path / "paired" / "pairs.parquet", TOKENIZER, args, TOPK, "pairs")
