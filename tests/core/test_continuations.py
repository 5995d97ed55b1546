"""Continuations of beginnings: from the files of all stages to tokenized pairs, cut where their responses are."""

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

from regretless.core import continuations
from regretless.core.continuations import Continuation, packed, unpacked
from regretless.core.errors import DataError
from regretless.data.columns import Pair, Response, Side, Verdict
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import TokenizedSide, tokenize_pairs
from regretless.labeling import mask, pair, verify
from regretless.modeling.load import tokenizer_fingerprint
from regretless.objectives import build
from regretless.training.arguments import PreferenceConfig
from regretless.training.pair_reading import pair_table
from regretless.training.pair_store import PairTable
from regretless.world.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id


def drawn(start: int, count: int, seed: int = 0) -> Continuation:
    numbers = np.random.default_rng([start, count, seed])
    logps = -numbers.exponential(1.0, count).astype(np.float32)
    return Continuation(start, numbers.integers(3, 20, count, dtype=np.int32), logps)


def listed(data: bytes | None) -> list[tuple[int, list[int], list[float]]]:
    return [(one.start, one.ids.tolist(), one.logps.tolist()) for one in unpacked(data or b"")]


def responses() -> list[Response]:
    """Right and wrong ones of one prompt; the wrong ones have no context but the prompt."""
    found = []
    for number, text in enumerate(("8 - 1 = \\boxed{7}", "9 - 1 = 8 * 1", "\\boxed{6}")):
        ids = [*TOKENIZER(text)["input_ids"], END]
        kept = [drawn(2, 5, number), drawn(2, 30, number), drawn(4, 3, number)] if number == 0 else []
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
                sampled_logps=[-0.4] * len(ids),
                continuations=packed(kept),
                tokenizer=tokenizer_fingerprint(TOKENIZER),
                finish_reason="stop",
                answer="7",
                verdict=Verdict.WRONG if number else Verdict.CORRECT,
            )
        )
    return found


def tokenized(given: Pair, **options: Any) -> tuple[list[TokenizedSide], list[str]]:
    settings = {"max_length": None, "max_prompt_length": None, "keep": {"continuations"}} | options
    kept, refused = tokenize_pairs([given], TOKENIZER, **settings)
    return [side for one in kept for side in one.sides], [row.reason for row in refused]


@pytest.mark.parametrize("form", [".parquet", ".jsonl"])
def test_continuations_when_stages_hand_them_on_then_a_masked_side_has_the_beginnings_of_its_own(
    form: str, tmp_path: Path
) -> None:
    given = responses()
    write_records(tmp_path / f"given{form}", given)
    verify.run(verify.VerifyConfig(workers=1), tmp_path / f"given{form}", tmp_path / "verified")
    kept, refused = read_responses(tmp_path / "verified" / "responses.parquet")
    assert [row.continuations for row in kept] == [row.continuations for row in given] and not refused
    pair.run(pair.PairConfig(), tmp_path / "verified" / "responses.parquet", tmp_path / "paired")
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    config = mask.MaskConfig(lengths=(2,), tokenizer=str(tmp_path / "tokenizer"))
    mask.run(config, tmp_path / "paired" / "pairs.parquet", tmp_path / "masked")
    pairs, refused = read_pairs(tmp_path / "masked" / "pairs.parquet")
    assert {each.kind for each in pairs} == {"original", "masked"} and not refused
    write_records(tmp_path / f"pairs{form}", pairs)
    again, refused = read_pairs(tmp_path / f"pairs{form}")
    assert [each.sides for each in again] == [each.sides for each in pairs] and not refused
    whole = listed(given[0].continuations)
    for each in again:
        assert listed(each.chosen.continuations) == whole and each.rejected is not None
        length = len(each.rejected.token_ids or ())
        cut = [(start, ids[: length - start], logps[: length - start]) for start, ids, logps in whole]
        assert listed(each.rejected.continuations) == (cut if each.kind == "masked" else [])
        sides, _ = tokenized(each)
        assert [side.continuations for side in sides] == [side.continuations for side in each.sides.values()]
    # Who does not ask for them is not refused for their length, and stores none.
    sides, problems = tokenized(again[0], keep=(), max_length=len(again[0].chosen.token_ids or ()) + 1)
    assert not problems and [side.continuations for side in sides] == [None, None]


def paired(**changes: Any) -> Pair:
    right, wrong, _ = responses()
    both = [
        Side(text=row.response, token_ids=row.token_ids, logps=row.logps, continuations=row.continuations, id=name)
        for name, row in (("right", right), ("wrong", wrong))
    ]
    return Pair(
        prompt="1", chosen=replace(both[0], **changes), rejected=both[1], tokenizer=right.tokenizer, logps_kind="raw"
    )


def test_continuation_when_longer_than_max_length_then_the_pair_is_refused_or_it_is_cut() -> None:
    prompt = len(TOKENIZER("1")["input_ids"])
    room = prompt + len(paired().chosen.token_ids or ()) + 3
    _, problems = tokenized(paired(), max_length=room)
    assert problems == [
        f"chosen: a continuation is too long, with its prompt, for max_length {room}; raise it, or set "
        "truncation=keep_start"
    ]
    assert tokenized(paired(), max_length=prompt + 32)[1] == []
    (chosen, _), _ = tokenized(paired(), max_length=room, truncation="keep_start")
    assert [one.end for one in unpacked(chosen.continuations or b"")] == [7, room - prompt, 7]
    assert chosen.ids == tuple(paired().chosen.token_ids or ())
    # Where the response itself is cut, contexts behind its end are dropped.
    (short, _), _ = tokenized(paired(), max_length=prompt + 4, truncation="keep_start")
    assert [(one.start, len(one.ids)) for one in unpacked(short.continuations or b"")] == [(2, 2), (2, 2)]


def test_side_when_it_is_a_unit_behind_a_context_then_continuations_from_its_end_are_its_future() -> None:
    ids = paired().chosen.token_ids or []
    unit = paired(text=TOKENIZER.decode(ids[:4], skip_special_tokens=True), complete=False, cut_at=4)
    unit = replace(unit, rejected=replace(unit.rejected, token_ids=[*ids[:2], 5, END], logps=[-1.0] * 4))
    unit = replace(
        unit, rejected=replace(unit.rejected, text=TOKENIZER.decode([*ids[:2], 5]), continuations=packed([]))
    )
    unit = replace(unit, prefix_tokens=2)
    (stored, _), _ = tokenized(unit, keep={"continuations", "future"})
    assert [(one.start, ids) for one, ids in stored.paths()] == [(2, (*stored.ids[:4], *drawn(4, 3).ids.tolist()))]
    assert stored.longest == len(ids) and stored.continued == 3
    # With horizon=cut the future ends at the cut, and so do they.
    (cut, _), _ = tokenized(unit)
    assert (cut.own, cut.paths()) == (tuple(ids[2:4]), [])
    # Contexts behind the first one at the cut are read by no unit.
    later = packed([drawn(2, 5), drawn(5, 4), drawn(6, 2)])
    (stored, _), _ = tokenized(replace(unit, chosen=replace(unit.chosen, continuations=later)), keep={*KEEP})
    assert [one.start for one, _ in stored.paths()] == [3]


KEEP = ("continuations", "future")


def test_table_of_pairs_when_written_then_it_has_their_continuations_and_counts_them() -> None:
    kept, _ = tokenize_pairs([paired()], TOKENIZER, max_length=None, max_prompt_length=None, keep=KEEP)
    table = PairTable.temporary(kept)
    assert [*table] == kept and table[0].chosen.continuations == kept[0].chosen.continuations
    assert table.continued.tolist() == [38] and table.response_tokens.tolist() == [32]
    assert table.tokens[0] == 38 + sum(len(ids) for _, ids in kept[0].items) + len(kept[0].prompt_ids)


FAULTS: dict[str, tuple[Callable[[bytes], bytes | str], str]] = {
    "a byte less": (lambda data: data[:-1], "expected the number of continuations, .* got 331 bytes"),
    "nothing": (lambda data: b"", "got 0 bytes"),
    "too many": (lambda data: np.int32(10**6).tobytes() + data[4:], "expected the number of continuations"),
    "no base64": (lambda data: "ä?", "continuations: expected bytes, or a text in base64"),
    "the prompt": (lambda data: packed([drawn(0, 2)]), "continuation 0 has 2 tokens behind 0; expected one or more"),
    "behind the end": (lambda data: packed([drawn(2, 1), drawn(40, 2)]), "continuation 1 has 2 tokens behind 40"),
    "no token": (lambda data: packed([drawn(2, 0)]), "continuation 0 has 0 tokens behind 2"),
    "no number": (lambda data: data[:-4] + np.float32(np.nan).tobytes(), "continuation 2 has ids .* to nan; expected"),
    "above 0": (lambda data: data[:-4] + np.float32(0.5).tobytes(), "continuation 2 .* to 0.5; expected ids from 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_continuations_that_are_broken_when_read_then_the_row_is_refused_with_the_place(
    fault: str, tmp_path: Path
) -> None:
    change, message = FAULTS[fault]
    row = responses()[0]
    changed = change(row.continuations or b"")
    text = changed if isinstance(changed, str) else base64.b64encode(changed).decode()
    given = {"prompt": "1", "response": row.response, "token_ids": row.token_ids, "continuations": text}
    (tmp_path / "rows.jsonl").write_text(json.dumps(given) + "\n", encoding="utf-8")
    _, (refused,) = read_responses(tmp_path / "rows.jsonl")
    assert re.search(message, refused.reason), refused.reason
    both = {"prompt": "1", "chosen": row.response, "rejected": "other", "chosen_token_ids": row.token_ids}
    (tmp_path / "pairs.jsonl").write_text(json.dumps({**both, "chosen_continuations": text}) + "\n", encoding="utf-8")
    _, (refused,) = read_pairs(tmp_path / "pairs.jsonl")
    assert refused.reason.startswith("chosen_continuations: ") and re.search(message, refused.reason), refused.reason


def test_training_when_pairs_lack_continuations_then_it_is_refused_and_else_says_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = build("repo", estimator="rollouts", reference_weight=0)
    args = PreferenceConfig(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True)
    for name, kind in (("all", "raw"), ("sampled", "sampled")):
        write_records(tmp_path / f"{name}.parquet", responses())
        pair.run(pair.PairConfig(logps=kind), tmp_path / f"{name}.parquet", tmp_path / name)
    table = pair_table(tmp_path / "all" / "pairs.parquet", TOKENIZER, args, objective, "pairs")
    total = int(table.tokens.sum())
    assert f"continuations are {38 * len(table)} of {total} tokens" in " ".join(capsys.readouterr().err.split())
    # Those of another kind than the log-probabilities are not kept.
    with pytest.raises(DataError, match=r"continuations, and . of . pairs have none: .*Run rollout with keep_cont"):
        pair_table(tmp_path / "sampled" / "pairs.parquet", TOKENIZER, args, objective, "pairs")
    names = pq.read_schema(tmp_path / "sampled" / "pairs.parquet").names
    assert not [name for name in names if name.endswith("continuations")]


def test_columns_of_none_stay_none() -> None:
    assert [continuations.cut(None, 3), continuations.behind(None, 3), continuations.up_to(None, 3)] == [None] * 3
