"""Masked pairs: what is removed, what is taken, and what is said about the rest."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from flat_pairs import changed, pair_of
from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Pair
from regretless.data.preferences import read_pairs
from regretless.data.rows import write_records
from regretless.data.tokenization import tokenize_pairs
from regretless.labeling.mask import MaskConfig, mask_pairs, run
from regretless.modeling.load import tokenizer_fingerprint

IM_END = 151645
SOLUTION = "There are 15 trees and then 21, so 21 - 15 = 6 were planted.\nThe answer is \\boxed{6}."


@pytest.fixture(scope="module")
def folder(shared: Path) -> str:
    return str(shared / "data/tokenizers/qwen2")


@pytest.fixture(scope="module")
def pair(folder: str) -> Pair:
    """A pair of two sampled responses of 34 and 2 tokens, ends included."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [[*tokenizer(text)["input_ids"], IM_END] for text in (SOLUTION, "5")]
    return pair_of(
        prompt=[{"role": "user", "content": "How many?"}],
        chosen=[{"role": "assistant", "content": SOLUTION}],
        rejected=[{"role": "assistant", "content": "5"}],
        pair_id="c>r",
        prompt_id="q",
        chosen_id="c",
        rejected_id="r",
        chosen_token_ids=ids[0],
        rejected_token_ids=ids[1],
        chosen_logps=[-0.5 * position for position in range(len(ids[0]))],
        rejected_logps=[-1.0, -1.0],
        logps_kind="raw",
        tokenizer=tokenizer_fingerprint(tokenizer),
        chosen_complete=True,
        rejected_complete=True,
        chosen_model="writer",
    )


# Released data has token strings, which need no tokenizer to be cut.
LETTERS = "abcdefghijklmnopqrstuvwxyzabcdefghijkl"
RELEASED = pair_of(
    prompt="q", chosen=LETTERS, rejected="x", chosen_tokens=list(LETTERS), chosen_logps=[-0.5] * len(LETTERS)
)


def many(count: int, pair: Pair = RELEASED) -> list[Pair]:
    """Two pairs of each of `count` chosen responses, of 38 tokens."""
    return [
        changed(pair, prompt_id=f"q{number}", chosen_id=f"c{number}", rejected_id=f"r{number}{side}")
        for number in range(count)
        for side in "ab"
    ]


def test_masked_pair_when_made_then_the_last_tokens_are_gone_with_their_log_probabilities(
    pair: Pair, folder: str, tmp_path: Path
) -> None:
    pair = changed(pair, preference_probability=0.7)
    write_records(tmp_path / "in.parquet", [pair])
    summary = run(MaskConfig(lengths=(8,), tokenizer=folder), tmp_path / "in.parquet", tmp_path)
    pairs, refused = read_pairs(tmp_path / "pairs.parquet")
    assert refused == []
    assert pairs[0] == pair
    masked, ids = pairs[1], pair.chosen.token_ids or []
    assert masked.rejected.token_ids == ids[:-8]
    assert masked.rejected.logps == (pair.chosen.logps or [])[:-8]
    # The end token is one of the eight.
    assert masked.rejected.text == [{"role": "assistant", "content": SOLUTION.removesuffix(" answer is \\boxed{6}.")}]
    assert (masked.chosen.text, masked.chosen.token_ids, masked.chosen.complete) == (pair.chosen.text, ids, True)
    assert (masked.rejected.complete, masked.kind, masked.rejected.model) == (False, "masked", "writer")
    assert masked.preference_probability is None
    assert (masked.pair_id, masked.chosen.id, masked.rejected.id) == ("c>-8", "c", "c-8")
    assert summary == {
        "pairs": 2,
        "masked": 1,
        "chosen_responses": 1,
        "removed_tokens": {"8": 1},
        "left_out": {},
        "refused": 0,
    }
    tokenized, refused = tokenize_pairs(
        pairs, AutoTokenizer.from_pretrained(folder), max_length=None, max_prompt_length=None
    )
    assert refused == []
    assert tokenized[1].rejected.ids == tuple(ids[:-8])


def test_mask_when_the_rest_is_stored_then_its_tokens_stay_behind_the_cut(pair: Pair, folder: str) -> None:
    (masked,), _ = mask_pairs([pair], MaskConfig(lengths=(8,), tokenizer=folder, horizon="stored"))
    (cut,), _ = mask_pairs([pair], MaskConfig(lengths=(8,), tokenizer=folder))
    assert (masked.rejected.token_ids, masked.rejected.logps) == (pair.chosen.token_ids, pair.chosen.logps)
    assert (masked.rejected.text, masked.rejected.cut_at, masked.rejected.complete) == (cut.rejected.text, 27, False)
    # Steps that are stored stay, others are cut with the text.
    stepwise = changed(pair, chosen_step_ends=[60, 70, len(SOLUTION)], chosen_step_labels=[1, 0, -1])
    for horizon, ends, labels in (("stored", [60, 70, len(SOLUTION)], [1, 0, -1]), ("cut", [60, 64], [1, None])):
        config = MaskConfig(lengths=(8,), tokenizer=folder, horizon=horizon)  # type: ignore[arg-type]
        side = mask_pairs([stepwise], config)[0][0].rejected
        assert side is not None
        assert (side.step_ends, side.step_labels) == (ends, labels)
    # A cut response is masked again, from its cut on.
    graded = replace(masked, chosen=masked.rejected, rejected=pair.rejected, kind="original")
    for horizon in ("cut", "stored"):
        config = MaskConfig.parse({"lengths": [8, 27], "tokenizer": folder, "horizon": horizon}, "mask")
        (twice,), _ = mask_pairs([graded], config)
        assert (twice.chosen.cut_at, twice.rejected.text) == (27, cut_text(pair, 19, folder))
        assert len(twice.rejected.token_ids or ()) == (19 if horizon == "cut" else 35)
    with pytest.raises(DataError, match=r"left out: cannot_store_what_is_removed 1"):  # token strings
        mask_pairs([RELEASED], MaskConfig(horizon="stored"))


def cut_text(pair: Pair, count: int, folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [{"role": "assistant", "content": tokenizer.decode((pair.chosen.token_ids or [])[:count])}]


def test_masked_pairs_when_all_are_asked_for_then_each_distinct_chosen_response_gives_one() -> None:
    masked, counts = mask_pairs(many(40), MaskConfig())
    assert [item.chosen.id for item in masked] == [f"c{number}" for number in range(40)]
    # Of 38 tokens, 48, 64 and 80 are too many to remove.
    left = Counter(len(item.rejected.tokens or []) for item in masked)
    assert left.keys() == {38 - 16, 38 - 32}
    assert counts["removed_tokens"] == {"16": left[22], "32": left[6]}
    assert masked[0].rejected.text == LETTERS[: len(masked[0].rejected.tokens or [])]
    assert masked[0].rejected.logps == [-0.5] * len(masked[0].rejected.tokens or [])


def test_count_when_smaller_then_it_takes_part_of_what_a_larger_one_takes() -> None:
    def taken(count: Any, responses: int = 40) -> set[str | None]:
        return {item.pair_id for item in mask_pairs(many(responses), MaskConfig(count=count))[0]}

    assert len(taken(7)) == 7
    assert taken(7) < taken(20) < taken("all")
    assert len(taken(0.25)) == 20  # of 80 pairs
    assert taken(0) == set()
    # Other responses do not change how much is removed from one.
    assert taken("all", 5) < taken("all")
    with pytest.raises(
        DataError, match=r"mask.count: expected at most 40, .*; got 41 \(left out: none\); mask.per_response=2 allows"
    ):
        taken(41)


def test_several_masks_of_a_response_when_made_then_each_has_another_cut_and_first_ones_come_first() -> None:
    # Of 38 tokens, 16, 24 and 32 can be removed; of the last two responses, 16 only.
    short = [
        changed(pair, chosen_tokens=list(LETTERS[:20]), chosen=LETTERS[:20], chosen_logps=[-0.5] * 20)
        for pair in many(42)[80:]
    ]
    rows = [*many(40), *short]

    def masked(count: Any, per_response: int) -> list[Pair]:
        config = MaskConfig(lengths=(16, 24, 32, 48), count=count, per_response=per_response)
        return mask_pairs(rows, config)[0]

    everything = masked("all", 3)
    cuts = Counter((item.prompt_id, item.chosen.id) for item in everything)
    assert sorted(cuts.values()) == [1, 1] + [3] * 40
    assert len({item.pair_id for item in everything}) == len(everything) == 122
    assert {len(item.rejected.tokens or []) for item in everything if item.prompt_id == "q0"} == {22, 14, 6}
    for item in everything:
        assert item.pair_id == f"{item.chosen.id}>-{len(item.chosen.tokens or []) - len(item.rejected.tokens or [])}"
    # What one mask a response reaches stays what it was, pair by pair.
    assert masked(42, 1) == masked(42, 3) == masked("all", 1)
    assert masked(17, 1) == masked(17, 3)
    for count in (50, 82, 100):
        taken = Counter(item.prompt_id for item in masked(count, 3))
        assert sum(taken.values()) == count
        long = [taken[f"q{number}"] for number in range(40)]
        assert max(long) - min(long) <= 1, "nobody has a third one before all have a second one"
    assert {item.pair_id for item in masked(50, 3)} < {item.pair_id for item in masked(100, 3)}
    with pytest.raises(DataError, match=r"at most 122, those of the 42 distinct .* \(up to 3 of each\); got 123"):
        masked(123, 3)
    with pytest.raises(ConfigError, match=r"per_response: expected at most 4"):
        MaskConfig.parse({"lengths": [16, 24, 32, 48], "per_response": 5}, "mask")


def test_responses_when_they_cannot_be_masked_then_they_are_counted_by_reason() -> None:
    rows = [
        *many(2),
        changed(RELEASED, chosen_id="short", chosen_tokens=list(LETTERS[:16])),
        changed(RELEASED, chosen_id="text", chosen_tokens=None),
        changed(RELEASED, chosen_id="masked before", kind="masked"),
        changed(RELEASED, chosen_id="blank", chosen_tokens=[" "] * 20),
    ]
    masked, counts = mask_pairs(rows, MaskConfig())
    assert len(masked) == 2
    assert counts["left_out"] == {"no_text_left": 1, "too_short": 1, "without_token_ids": 1}
    assert counts["chosen_responses"] == 5
    with pytest.raises(DataError, match=r"at most 0, .*; got 1 \(left out: too_short 1, without_token_ids 1\)"):
        mask_pairs(rows[4:7], MaskConfig())


def test_tokenizer_when_missing_or_of_another_vocabulary_then_the_error_says_which_one(
    pair: Pair, folder: str, shared: Path
) -> None:
    with pytest.raises(ConfigError, match=r"mask.tokenizer: required to write the text"):
        mask_pairs([pair], MaskConfig())
    with pytest.raises(ConfigError, match=r"mask.tokenizer: expected the tokenizer that made the ids"):
        mask_pairs([pair], MaskConfig(tokenizer=str(shared / "data/tokenizers/mistral-v1")))
    drifted = changed(pair, chosen=[{"role": "assistant", "content": "Something else."}], origin="p.jsonl:3")
    with pytest.raises(DataError, match=r"at most 0, .*ids_do_not_spell_the_text 1"):
        mask_pairs([drifted], MaskConfig(tokenizer=folder))
    foreign = changed(pair, chosen_id="other", tokenizer="0" * 32)
    masked, counts = mask_pairs([drifted, foreign, changed(pair, chosen_id="good")], MaskConfig(tokenizer=folder))
    assert (len(masked), counts["left_out"]) == (1, {"another_tokenizer": 1, "ids_do_not_spell_the_text": 1})


def test_run_when_originals_are_left_out_then_only_masked_pairs_are_written(tmp_path: Path) -> None:
    write_records(tmp_path / "pairs.parquet", [RELEASED])
    (tmp_path / "out").mkdir()
    counts = run(MaskConfig(lengths=(4,), keep_originals=False), tmp_path / "pairs.parquet", tmp_path / "out")
    written, _ = read_pairs(tmp_path / "out" / "pairs.parquet")
    assert [pair.kind for pair in written] == ["masked"] and counts["pairs"] == 1
    with pytest.raises(DataError, match=r"mask.keep_originals is false and there is no masked pair"):
        run(MaskConfig(count=0, keep_originals=False), tmp_path / "pairs.parquet", tmp_path / "out")
