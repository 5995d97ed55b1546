"""Log-probabilities of a writer with another tokenizer: units of real tokenizers, and from sampling to the loss."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from regretless.analysis import inspect
from regretless.analysis.first_step import at_start
from regretless.core.errors import DataError
from regretless.core.files import read_json
from regretless.data.alignment import behind_space, common_units, sums_at_ends, within_text
from regretless.data.codec import codec_of
from regretless.data.columns import Pair, Response, Side, Verdict, several_tokenizers
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.tokenization import TokenizedPair, TokenizedSide, missing_values, tokenize_pairs, unit_counts
from regretless.labeling import mask, pair
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.scoring import score_responses
from regretless.objectives import build
from regretless.objectives.inputs import step_numbers
from regretless.sampling import sample
from regretless.training.arguments import PreferenceConfig
from regretless.training.trainer import PreferenceTrainer
from regretless.world.tiny_models import smoke_architecture

TEXT = "Hi 🤗🏽 café  x\n\n  12345 語"
"""Characters of two to four bytes, some of them in several tokens of one tokenizer or of both, and runs of spaces."""


@pytest.fixture(scope="module")
def tokenizers(shared: Path) -> dict[str, Any]:
    """A byte-level vocabulary, and one of SentencePiece with tokens of single bytes, which adds a first space."""
    return {name: AutoTokenizer.from_pretrained(shared / "data/tokenizers" / name) for name in ("qwen2", "mistral-v1")}


def side(tokenizer: Any, text: str, /, *, end: bool = True, **changes: Any) -> Side:
    """A response as `sample` writes it; the log-probabilities are −1, −2, … nats."""
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *[tokenizer.eos_token_id] * end]
    found = tokenizer.decode(ids, skip_special_tokens=True)
    logps = [-1.0 - place for place in range(len(ids))]
    lengths = codec_of(tokenizer).token_bytes(ids, found)
    values = {"text": found, "token_ids": ids, "logps": logps, "token_bytes": lengths, "complete": end}
    return Side(**values | changes)


def read(chosen: Side, rejected: Side, writer: str, reader: Any, **options: Any) -> TokenizedPair:
    """A pair as the policy with the tokenizer `reader` reads it. writer: fingerprint."""
    given = Pair(prompt="2+2?", chosen=chosen, rejected=rejected, tokenizer=writer)
    (found,), refused = tokenize_pairs([given], reader, **{"max_length": None, "max_prompt_length": None} | options)
    assert not refused
    return found


def labels(one: TokenizedSide) -> list[float]:
    return list(one.values["behavior"])


def test_units_when_tokens_end_at_the_same_bytes_then_they_are_the_spans_between() -> None:
    # Bytes at the end of tokens: 2, 3, 3, 6, 6 and 1, 3, 6, 6; a token of no bytes is a part of the next unit.
    assert common_units([2, 1, 0, 3, 0], [1, 2, 3, 0]) == ([0, 0, 1, 1, 2], [0, 0, 1, 2])
    assert common_units([0, 1], [1]) == ([0, 0], [0])
    assert common_units([0], [0, 0]) == ([0], [0, 0])
    assert sums_at_ends([-1, -2, -4, -8, -16], [0, 0, 1, 1, 2], [0, 0, 1, 2]) == [0, -3, -12, -16]
    with pytest.raises(DataError, match="3 bytes, where the policy's tokens have 2"):
        common_units([3], [2])
    with pytest.raises(DataError, match="only one of the two tokenizations closes"):
        common_units([3, 0], [3])


def test_bytes_when_a_text_begins_with_spaces_then_these_count_for_no_token() -> None:
    assert behind_space([1, 4, 2], "  two x") == [0, 3, 2]
    assert behind_space([3, 2], "two x") == [3, 2]


def test_bytes_when_a_response_is_cut_within_a_token_then_the_tokens_within_its_text_are_used() -> None:
    # é has two bytes: the tokens have its first one, the text neither.
    assert within_text([2, 1], "ab\ufffd", cut=True, longest=8) == (1, "ab")
    # Three of the four bytes of a character, which decode to one of three bytes.
    assert within_text([2, 3], "ab\ufffd", cut=True, longest=8) == (1, "ab")
    # A stop string began within a token, whose beginning is in the text.
    assert within_text([2, 2], "abcdef", cut=True, longest=8) == (2, "abcd")
    # The last token ends within a character.
    assert within_text([2, 1], "abé", cut=True, longest=8) == (1, "ab")
    for lengths, cut in (([2, 1], False), ([2, 13], True), ([2], True)):
        with pytest.raises(DataError, match=f"token_bytes: {sum(lengths)} bytes, where the text has 11"):
            within_text(lengths, "abcdefghijk", cut=cut, longest=8)


@pytest.mark.parametrize(
    ("writer", "reader", "expected"),
    [
        # Tokens of mistral: ▁Hi ▁ F0 9F A4 97 🏽 ▁café ▁ ▁x \n \n ▁▁ 1 2 3 4 5 ▁ 語 </s>, of which "▁ F0 9F" is one of
        # qwen's; \n\n and the last character are units of several tokens on either side.
        ("qwen2", "mistral-v1", [1, 3, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1]),
        ("mistral-v1", "qwen2", [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 3, 1]),
    ],
)
def test_response_when_its_writer_has_another_tokenizer_then_units_have_the_sums_of_its_tokens(
    tokenizers: dict[str, Any], writer: str, reader: str, expected: list[int]
) -> None:
    theirs, mine = tokenizers[writer], tokenizers[reader]
    whole, beginning = side(theirs, TEXT), side(theirs, "two", end=False)
    found = read(whole, beginning, tokenizer_fingerprint(theirs), mine)
    units = found.chosen.units or ()
    assert [units.count(unit) for unit in dict.fromkeys(units)] == expected
    # The same by prefixes: what both have written after each unit, by their own decoding.
    ends = [place for place, unit in enumerate(units, 1) if units[place : place + 1] != (unit,)]
    ids = whole.token_ids or []
    for end in ends[:-1]:
        text = mine.decode(found.chosen.ids[:end]).encode()
        count = next(n for n in range(len(ids) + 1) if sum((whole.token_bytes or [])[:n]) == len(text) or n == len(ids))
        if b"\xef\xbf\xbd" not in text:
            assert theirs.decode(ids[:count]).encode() == text
            assert sum(labels(found.chosen)[:end]) == sum((whole.logps or [])[:count])
    assert sum(labels(found.chosen)) == sum(whole.logps or [])
    assert labels(found.chosen)[-1] == -len(ids), "the end token is a unit of its own"
    assert found.chosen.ids[-1] == mine.eos_token_id
    # A response that was cut gets no end token.
    assert found.rejected is not None
    assert (mine.decode(found.rejected.ids), labels(found.rejected)) == ("two", [-1.0])
    longer = {"pairs": 1, "responses": 2, "units": len(expected) + 1, "longer": sum(count > 1 for count in expected)}
    assert unit_counts([found]) == longer


def test_pair_when_only_one_writer_has_the_policys_tokenizer_then_its_side_is_as_without_the_other(
    tokenizers: dict[str, Any],
) -> None:
    qwen, mistral = tokenizers["qwen2"], tokenizers["mistral-v1"]
    mine, theirs = tokenizer_fingerprint(qwen), tokenizer_fingerprint(mistral)
    of_qwen, of_mistral = side(qwen, TEXT), side(mistral, "It is  4.")
    mixed = read(of_qwen, of_mistral, several_tokenizers(mine, theirs), qwen)
    assert mixed.chosen == read(of_qwen, side(qwen, "x"), mine, qwen).chosen
    assert set(mixed.chosen.values) == {"behavior"} and labels(mixed.chosen) == of_qwen.logps
    assert mixed.rejected is not None and mixed.rejected.units is not None
    assert sum(labels(mixed.rejected)) == sum(of_mistral.logps or [])
    # An objective that reads single tokens gets the first side's alone.
    assert missing_values([mixed]) == {} and len(missing_values([mixed.without_units()])) == 1
    filled = mixed.with_missing({"behavior": 0.0})
    assert filled is mixed
    lacking = read(side(qwen, "x", logps=None), of_mistral, several_tokenizers(mine, theirs), qwen)
    assert lacking.with_missing({"behavior": 0.0}).sides[1].values == {"behavior": (0.0,) * len(mixed.rejected.ids)}


def test_response_when_truncated_to_a_length_then_no_unit_is_divided(tokenizers: dict[str, Any]) -> None:
    qwen, mistral = tokenizers["qwen2"], tokenizers["mistral-v1"]
    both = side(qwen, TEXT), side(qwen, "two")
    whole = read(*both, tokenizer_fingerprint(qwen), mistral)
    prompt = len(whole.prompt_ids)
    # ▁Hi, then ▁ F0 9F: two or three more tokens would be a part of that unit.
    for room, kept in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 5)):
        cut = read(*both, tokenizer_fingerprint(qwen), mistral, max_length=prompt + room, truncation="keep_start")
        assert (cut.chosen.ids, labels(cut.chosen)) == (whole.chosen.ids[:kept], labels(whole.chosen)[:kept])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_bytes": None}, "its rows lack logps, or token_bytes"),
        ({"text": "It is 4"}, "token_bytes: 8 bytes, where the text has 7"),
        ({"complete": False}, "marked as cut, yet its tokens end with an end-of-sequence token"),
    ],
)
def test_response_when_its_bytes_do_not_fit_then_the_reason_is_said_and_nothing_is_used(
    tokenizers: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    qwen, mistral = tokenizers["qwen2"], tokenizers["mistral-v1"]
    found = read(side(qwen, "It is 4.", **changes), side(qwen, "two"), tokenizer_fingerprint(qwen), mistral)
    (said,) = missing_values([found])
    assert said.startswith("chosen: made with another tokenizer") and reason in said
    assert found.chosen.values == {}


def test_steps_when_a_unit_holds_the_end_of_one_then_it_belongs_to_it(tokenizers: dict[str, Any]) -> None:
    qwen, mistral = tokenizers["qwen2"], tokenizers["mistral-v1"]
    # Qwen's token of two line breaks is two of mistral's; a step ends between them.
    given = side(qwen, "a\n\nb", step_ends=[2, 4])
    found = read(given, side(qwen, "two"), tokenizer_fingerprint(qwen), mistral).chosen
    assert mistral.convert_ids_to_tokens(list(found.ids)) == ["a", "<0x0A>", "<0x0A>", "b", "</s>"]
    assert (found.steps, found.units) == ((0, 0, 1, 1, 1), (0, 1, 1, 2, 3))
    assert step_numbers([(found.ids, found.steps, found.units)], lambda token: False).tolist() == [[0, 0, 0, 1, 1]]
    # A step within one unit is a part of it.
    assert step_numbers([((5, 6, 7, 8), (0, 1, 1, 2), (0, 0, 0, 1))], lambda token: False).tolist() == [[0, 0, 0, 1]]


def bytes_after(tokenizer: Any, ids: Sequence[int], start: Sequence[int] = ()) -> list[int]:
    """Bytes of the text behind each token, by decoding all before it."""
    texts = [tokenizer.decode([*start, *ids[:count]], skip_special_tokens=True) for count in range(len(ids) + 1)]
    return [len(text.encode()) - len(texts[0].encode()) for text in texts[1:]]


def score_by_hand(
    policy: Any, reference: Any, tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], row: Response, theirs: Any
) -> Any:
    """RePO's score, β = 1, over the spans between bytes where tokens of both end: the double sum as it is printed."""
    mine, written_by = bytes_after(tokenizer, ids, prompt), bytes_after(theirs, row.token_ids or [])
    behavior = list(accumulate(row.logps or []))
    assert mine[-1] == written_by[-1] == len(row.response.encode())
    bounds = [byte for byte in sorted(set(mine) & set(written_by)) if byte]
    units: list[tuple[Any, Any, float]] = []
    first = before = 0
    for byte in bounds:
        # The end tokens add no byte.
        end, count = (max(i for i, b in enumerate(of, 1) if b == byte) for of in (mine, written_by))
        if byte == bounds[-1]:
            end, count = end - 1, count - 1
        total = behavior[count - 1] - (behavior[before - 1] if before else 0.0)
        units.append((policy[first:end].sum(), reference[first:end].sum(), total))
        first, before = end, count
    units.append((policy[-1], reference[-1], (row.logps or [])[-1]))
    ahead = [pi - m for pi, _, m in units]
    return sum(
        (pi - r) + (sum(ahead[t + 1 :]) / len(ahead[t + 1 :]) if ahead[t + 1 :] else 0.0)
        for t, (pi, r, _) in enumerate(units)
    )


def test_repo_when_its_pairs_were_sampled_with_another_tokenizer_then_its_loss_is_that_of_units(
    shared: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Sample with the world's tokenizer, of whole words; mark even responses as correct; pair and mask.
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Tom has 3 coins. How many?\n"}) + "\n")
    settings = {
        "prompts": {"dataset": str(tmp_path / "prompts.jsonl"), "template": "plain"},
        "models": [{"name_or_path": str(model)}],
        **{"n": 300, "max_new_tokens": 24, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
    }
    sample.run(sample.SampleConfig.parse(settings, "sample"), tmp_path)
    rows, _ = read_responses(tmp_path / "responses.parquet")
    # The bytes of one with a padding token in its midst are unknown.
    rows = [row for row in rows if row.finish_reason == "stop" and row.token_bytes and len(row.token_bytes) > 7][:4]
    assert len(rows) == 4
    verdicts = [Verdict.CORRECT, Verdict.WRONG, Verdict.CORRECT, Verdict.WRONG]
    labeled = [replace(row, verdict=verdict) for row, verdict in zip(rows, verdicts, strict=True)]
    write_records(tmp_path / "verified.parquet", labeled)
    pair.run(pair.PairConfig(), tmp_path / "verified.parquet", tmp_path)
    (tmp_path / "masked").mkdir()
    mask.run(mask.MaskConfig(lengths=(3,), tokenizer=str(model)), tmp_path / "pairs.parquet", tmp_path / "masked")
    pairs, _ = read_pairs(tmp_path / "masked" / "pairs.parquet")
    assert len(pairs) == 6

    # A policy with another tokenizer, whose reference is its start.
    folder = str(shared / "data/tokenizers/mistral-v1")
    config = ModelConfig(architecture=smoke_architecture("qwen3", 32000), tokenizer=folder)
    theirs, tokenizer = load_tokenizer(ModelConfig(name_or_path=str(model))), load_tokenizer(config)
    beta = 0.003  # the score of an untrained policy has hundreds of nats: with more, every loss would be 0
    objective = build("repo", beta=beta)
    tokenized, refused = tokenize_pairs(pairs, tokenizer, max_length=None, max_prompt_length=None)
    assert not refused and missing_values(tokenized) == {}
    counts = unit_counts(tokenized)
    assert (counts["pairs"], counts["responses"]) == (6, 12) and 0 < counts["longer"] < counts["units"]
    of_text = {row.response: row for row in rows}
    for one in tokenized:
        assert one.row is not None
        whole = of_text[str(one.row.chosen.text)].logps or []
        if one.kind == "masked":
            assert one.sides[1].ids[-1] != tokenizer.eos_token_id
            assert sum(labels(one.sides[1])) == pytest.approx(sum(whole[:-3]), rel=1e-12)

    def loss_by_hand(one: TokenizedPair, policy: dict[Any, Any], reference: dict[Any, Any]) -> float:
        assert one.row is not None and one.row.rejected is not None
        scores = []
        for known, tokens in zip((one.row.chosen, one.row.rejected), one.sides, strict=True):
            item = one.prompt_ids, tokens.ids
            row = of_text[str(known.text)]
            scores.append(
                score_by_hand(policy[item], reference[item], tokenizer, one.prompt_ids, tokens.ids, row, theirs)
            )
        return math.log1p(math.exp(beta * float(scores[1] - scores[0])))

    # The loss at the start, in float64.
    originals = [one for one in tokenized if one.kind == "original"]
    items = [item for one in tokenized for item in one.items]
    start = load_model(config)
    reference = dict(zip(items, [row.astype(float) for row in score_responses(start, items)], strict=True))
    assert unit_counts(originals)["longer"] > 0
    expected = [loss_by_hand(one, reference, reference) for one in originals]
    found = at_start(objective, originals, reference, lambda token: False)  # type: ignore[arg-type]
    assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-10) and min(expected) > 0.1

    # What is said of them; none is scored again by its writer, whose tokens are others.
    (tmp_path / "inspect").mkdir()
    asked = inspect.InspectConfig(rescore=True)
    inspect.run(asked, tmp_path / "pairs.parquet", config, tmp_path / "inspect", {"repo": {"beta": beta}, "dpo": {}})
    told = read_json(tmp_path / "inspect" / "inspect.json")
    assert told["data"]["by_units"] == unit_counts(originals) and told["data"]["without_behavior_logps"] == {}
    assert told["objectives"]["repo β=0.003"]["loss"] == pytest.approx(found["loss"], rel=1e-6)
    distinct = {one.chosen.ids: len(set(one.chosen.units or ())) for one in originals}
    assert told["behavior_minus_reference"]["chosen"]["tokens"] == sum(distinct.values())
    assert told["stored_minus_rescored"] == {} and any("longer than one token" in note for note in told["notes"])

    # The loss of a step of a policy that has moved, by the trainer, from the file.
    def trainer_of(objective: str, **hyperparameters: Any) -> PreferenceTrainer:
        arguments = {"per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none"}
        args = PreferenceConfig(
            output_dir=str(tmp_path / "out"), objective=objective, objective_kwargs=hyperparameters, **arguments
        )
        return PreferenceTrainer(
            load_model(config), args=args, train_dataset=str(tmp_path / "pairs.parquet"), processing_class=tokenizer
        )

    with pytest.raises(DataError, match=r"dpo needs the behavior .* 4 of 4 pairs have none: chosen: made with"):
        trainer_of("dpo", reference="behavior")
    trainer = trainer_of("repo", beta=beta)
    share = f"{100 * unit_counts(originals)['longer'] / unit_counts(originals)['units']:.1f} %"
    said = " ".join(capsys.readouterr().err.split())
    assert "4 of 4 pairs have responses by a model with another tokenizer" in said and f"{share} of the units" in said
    trainer.prepare_reference()
    for parameter in trainer.model.parameters():
        parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    loss = trainer.training_step(trainer.model, list(trainer.train_dataset))
    moved = dict(zip(items, [row.astype(float) for row in score_responses(trainer.model, items)], strict=True))
    expected = [loss_by_hand(one, moved, reference) for one in originals]
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)
