"""Steps of responses: formats that have them, columns that say where they end, and the tokens that they consist of."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch
from transformers import AutoTokenizer

from flat_pairs import changed, pair_of
from regretless.analysis.first_step import at_reference
from regretless.data.codec import codec_of
from regretless.data.columns import Pair
from regretless.data.preferences import parse_pairs
from regretless.data.responses import read_responses
from regretless.data.steps import first_steps, joined
from regretless.data.tokenization import TokenizedPair, tokenize_pairs
from regretless.objectives import build
from regretless.training.batch import build_batch
from regretless.training.data import TrainingPair
from regretless.training.pair_store import PairTable
from regretless.world.tokenizer import build_tokenizer

TRL = {"prompt": "1+1?", "completions": ["Add.", "It is 2."], "labels": [True, False]}
SHEPHERD = {
    "input": "Step 1: is this? 1+1? Step 1: Add. ки\nStep 2: It is 2. ки",
    "label": "Step 1: is this? 1+1? Step 1: Add. +\nStep 2: It is 2. -",
    "task": "GSM8K",
}


def rated(text: str, rating: int | None) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": False}


def step(*completions: dict[str, Any], chosen: Any = None, human: Any = None) -> dict[str, Any]:
    return {"completions": list(completions), "chosen_completion": chosen, "human_completion": human}


def prm800k(*steps: Any) -> dict[str, Any]:
    question = {"problem": "1+1?", "ground_truth_answer": "2"}
    return {"labeler": "l", "question": question, "label": {"steps": list(steps), "finish_reason": "solution"}}


def read(rows: list[Any], folder: Path) -> tuple[list[Any], list[str]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    responses, refused = read_responses(folder / "rows.jsonl")
    return responses, [str(refusal).removeprefix(f"{folder}/") for refusal in refused]


@pytest.mark.parametrize(
    ("steps", "text", "ends"),
    [
        (["a", "b"], "a\nb", [2, 3]),
        (["a.", " b.", "c"], "a. b.\nc", [2, 6, 7]),
        (["a\n\n", "b\n"], "a\n\nb\n", [3, 5]),
        (["a"], "a", [1]),
    ],
)
def test_steps_when_joined_then_a_line_break_is_put_where_no_white_space_is(
    steps: list[str], text: str, ends: list[int]
) -> None:
    assert joined(steps) == (text, ends)


def test_steps_when_a_text_is_cut_then_the_step_that_is_cut_has_no_label() -> None:
    assert first_steps([2, 5, 7], [1, -1, 0], 5) == {"step_ends": [2, 5], "step_labels": [1, -1]}
    assert first_steps([2, 5, 7], [1, -1, 0], 3) == {"step_ends": [2, 3], "step_labels": [1, None]}
    assert first_steps([2, 5], None, 1) == {"step_ends": [1], "step_labels": None}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (TRL, [("1+1?", "Add.\nIt is 2.", [5, 13], [1, -1])]),
        (
            {"problem": "1+1?", "steps": ["Add.", "2", "So"], "labels": ["positive", "neutral", None]},
            [("1+1?", "Add.\n2\nSo", [5, 7, 9], [1, 0, None])],
        ),
        (SHEPHERD, [("Step 1: is this? 1+1?", "Step 1: Add.\nStep 2: It is 2.", [13, 29], [1, -1])]),
        (
            prm800k(
                step(rated("A", -1), rated("B", 1), rated("C", None), chosen=1),
                step(rated("D", -1), human={"text": "E", "rating": None}),
                step(rated("F", 0), chosen=0),
            ),
            [
                ("1+1?", "A", [1], [-1]),
                ("1+1?", "B\nD", [2, 3], [1, -1]),
                ("1+1?", "B\nE\nF", [2, 4, 5], [1, None, 0]),
            ],
        ),
        # Where nothing was chosen and nobody wrote a step, the path ends.
        (
            prm800k(step(rated("A", 1), chosen=0), step(rated("B", -1)), {"completions": None}),
            [("1+1?", "A\nB", [2, 3], [1, -1]), ("1+1?", "A", [1], [1])],
        ),
        ({"prompt": "1+1?", "response": "2", "completions": ["x"], "labels": [True]}, [("1+1?", "2", None, None)]),
    ],
)
def test_rows_of_steps_when_read_then_they_are_responses(row: Any, expected: list[Any], tmp_path: Path) -> None:
    responses, refused = read([{"prompt": "another", "response": "x"}, row], tmp_path)
    assert refused == []
    found = [(row.prompt, row.response, row.step_ends, row.step_labels) for row in responses[1:]]
    assert found == expected
    assert len({row.response_id for row in responses}) == len(responses)
    assert {row.answer for row in responses[1:]} == {"2" if "question" in row else None}
    assert {row.origin for row in responses[1:]} == {f"{tmp_path}/rows.jsonl:2"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (TRL | {"labels": [True]}, "labels: expected one for each of 2 steps, got [True]"),
        (TRL | {"labels": "ab"}, "labels: expected one for each of 2 steps, got 'ab'"),
        (TRL | {"labels": [1, 0]}, "labels: value 0 is 1; expected true, false, positive, neutral, negative or null"),
        (TRL | {"completions": ["Add.", 2]}, "completions: value 1 is 2; expected the text of a step"),
        (TRL | {"completions": ["Add.", " "]}, "step 2: empty"),
        (TRL | {"prompt": None}, "prompt: expected a value, got null; fill it in, or remove the row"),
        (SHEPHERD | {"label": SHEPHERD["label"][:-1]}, "label: expected the text of input with + or - for each ки"),
        (SHEPHERD | {"label": SHEPHERD["label"].replace("Add", "Sub")}, "label: expected the text of input with + or"),
        (SHEPHERD | {"input": SHEPHERD["input"] + " more"}, "input: expected a problem, 'Step 1:' and further steps"),
        (SHEPHERD | {"input": SHEPHERD["input"].replace("Step 1", "Step")}, "input: expected a problem, 'Step 1:' and"),
        (prm800k(), "label.steps: expected a list of steps, got []"),
        (prm800k(step(rated("A", None))), "label.steps: expected a step with a completion that was chosen or rated"),
        (prm800k("A"), "label.steps: step 1: expected an object with completions, got 'A'"),
        (prm800k(step(rated("A", 1), chosen=1)), "label.steps: step 1: chosen_completion: expected one of 1 compl"),
        (prm800k(step(rated("A", 1), chosen=True)), "label.steps: step 1: chosen_completion: expected one of 1 compl"),
        (prm800k(step(rated("A", 2), chosen=0)), "label.steps: step 1: expected a text and a rating of -1, 0, 1 or"),
        (prm800k(step(rated("A", 1), chosen=0), step("B")), "label.steps: step 2: expected a text and a rating"),
    ],
)
def test_rows_of_steps_when_malformed_then_each_is_refused_with_its_line(row: Any, told: str, tmp_path: Path) -> None:
    responses, refused = read([TRL, row], tmp_path)
    assert (len(responses), len(refused)) == (1, 1)
    assert refused[0].startswith(f"rows.jsonl:2: {told}")


@pytest.mark.parametrize("row", [TRL, SHEPHERD])
def test_rows_of_steps_when_read_as_pairs_then_the_rule_that_makes_pairs_of_them_is_named(row: Any) -> None:
    (refusal,) = parse_pairs([row])[1]
    assert "`regretless pair rule=step_labels` makes pairs of good and bad steps" in str(refusal)


TEXT = {"prompt": "1+1?", "response": "Add. 2"}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (
            {"step_ends": [4, 5]},
            "step_ends: expected rising numbers of characters above 0, of which the last is the text",
        ),
        (
            {"step_ends": [4, 7]},
            "step_ends: expected rising numbers of characters above 0, of which the last is the text",
        ),
        ({"step_ends": [4, 4, 6]}, "step_ends: expected rising numbers"),
        ({"step_ends": [0, 6]}, "step_ends: expected rising numbers"),
        ({"step_ends": []}, "step_ends: expected rising numbers"),
        ({"step_ends": [4, 6], "step_labels": [1]}, "step_labels: expected one for each of 2 steps, got 1"),
        (
            {"step_ends": [4, 6], "step_labels": [1, 2]},
            "step_labels: value 1 is 2; expected a list of 1, 0, -1 or null",
        ),
        ({"step_ends": [4, 6], "step_labels": [True, 0]}, "step_labels: value 0 is True; expected"),
        ({"step_labels": [1]}, "step_labels: present without"),
    ],
)
def test_ends_of_steps_when_they_do_not_fit_the_text_then_response_and_pair_are_refused(
    columns: dict[str, Any], told: str, tmp_path: Path
) -> None:
    good = {"step_ends": [4, 6], "step_labels": [1, None]}
    responses, refused = read([TEXT | good, TEXT | columns], tmp_path)
    assert [(row.step_ends, row.step_labels) for row in responses] == [([4, 6], [1, None])]
    assert [text.partition(": ")[2][: len(told)] for text in refused] == [told]
    sides = {"prompt": "1+1?", "chosen": "3", "rejected": TEXT["response"]}
    pairs, refusals = parse_pairs(
        [sides | {f"rejected_{name}": of for name, of in made.items()} for made in (good, columns)]
    )
    assert [pair.rejected and pair.rejected.step_ends for pair in pairs] == [[4, 6]]
    assert f"rejected_{told}" in str(refusals[0])


def test_ends_of_steps_when_a_side_has_several_messages_or_is_cut_then_refused_or_behind_its_text() -> None:
    ask = {"role": "user", "content": "1+1?"}
    answers = [{"role": "assistant", "content": "2"}, ask, {"role": "assistant", "content": "2"}]
    row = {"prompt": [ask], "chosen": answers, "rejected": [{"role": "assistant", "content": "3"}]}
    (refusal,) = parse_pairs([row | {"chosen_step_ends": [1]}])[1]
    assert "chosen_step_ends: expected a response of one message" in str(refusal)
    assert parse_pairs([row | {"rejected_step_ends": [1]}])[1] == []
    cut = {"prompt": "1+1?", "chosen": "A", "rejected": "3", "chosen_token_ids": [1, 2, 3], "chosen_cut_at": 1}
    assert parse_pairs([cut | {"chosen_step_ends": [1, 4]}])[1] == []


def stepwise(tokenizer: Any, text: str, ends: list[int] | None, **columns: Any) -> TokenizedPair:
    pair = pair_of(prompt="1+1?", chosen=text, rejected="5", chosen_step_ends=ends, **columns)
    (tokenized,), refused = tokenize_pairs([pair], tokenizer, max_length=None, max_prompt_length=None)
    assert refused == []
    return tokenized


def texts_of_steps(tokenizer: Any, pair: TokenizedPair) -> list[str]:
    steps = pair.chosen.steps
    assert steps is not None
    ids = {number: [] for number in steps}
    for token, number in zip(pair.chosen.own, steps, strict=True):
        ids[number].append(token)
    assert list(ids) == list(range(len(ids)))
    return [tokenizer.decode(of_step, skip_special_tokens=True) for of_step in ids.values()]


@pytest.mark.parametrize(
    ("text", "ends", "expected"),
    [
        ("First add. Then\nstop.", [10, 16, 21], ["First add.", " Then\n", "stop."]),
        # A token that an end divides belongs to the step before it; steps within one token are one.
        ("It is forty", [7, 8, 11], ["It is forty"]),
        (" It is. 4", [7, 9], [" It is.", " 4"]),
        ("é = 🙂 ok. e\u0301 4", [5, 9, 12, 14], ["é = 🙂", "ok.", "é", "4"]),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "mistral-v1"])
def test_steps_when_tokenized_then_each_token_has_the_step_that_its_last_character_is_in(
    name: str, text: str, ends: list[int], expected: list[str], shared: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers" / name)
    found = texts_of_steps(tokenizer, stepwise(tokenizer, text, ends))
    assert [normalize("NFC", part).strip() for part in found] == [part.strip() for part in expected]


def test_steps_when_a_side_is_cut_or_behind_a_context_then_those_of_its_tokens_are_left(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "data/tokenizers/qwen2")
    text = "One. Two. Three."
    ids = tokenizer(text)["input_ids"]
    whole = pair_of(
        prompt="1+1?",
        chosen=text,
        rejected="One. 5",
        chosen_token_ids=ids,
        rejected_token_ids=tokenizer("One. 5")["input_ids"],
    )
    whole = changed(whole, chosen_step_ends=[4, 9, 16])

    def steps(pair: Pair, **options: Any) -> Any:
        (made,), _ = tokenize_pairs(
            [pair], tokenizer, max_length=None, max_prompt_length=None, need_logps=False, **options
        )
        return PairTable.temporary([made])[0].chosen.steps

    assert len(ids) == 6
    assert steps(whole) == (0, 0, 1, 1, 2, 2)
    assert steps(changed(whole, prefix_tokens=2)) == (0, 0, 1, 1)
    cut = changed(whole, chosen="One. Two.", chosen_cut_at=4, chosen_complete=False)
    assert steps(cut) == (0, 0, 1, 1)
    assert steps(cut, keep={"future"}) == (0, 0, 1, 1, 2, 2)


def test_objectives_of_steps_when_the_data_says_where_steps_end_then_these_are_their_units() -> None:
    tokenizer = build_tokenizer()
    text = "1+1=2\n2+2=4\n4+4=8"
    objective = build("repo_det", granularity="step")
    codec = codec_of(tokenizer)

    def inputs(*pairs: TokenizedPair) -> list[list[list[int]]]:
        """The steps of the chosen responses, as training and `inspect` give them to objectives."""
        reference = {item: torch.zeros(len(item[1])).numpy() for pair in pairs for item in pair.items}
        built = build_batch(
            [TrainingPair(pair) for pair in pairs],
            objective,
            reference=reference.__getitem__,
            ends_step=codec.ends_step,
        )
        shown = at_reference(objective, pairs, reference, codec.ends_step)
        rows = [built.inputs["steps"][built.pairs[:, 0]], shown.steps[::2]]  # type: ignore[index]
        return [[row[: len(pair.chosen.own)].tolist() for row, pair in zip(both, pairs, strict=True)] for both in rows]

    lines, given, single = (stepwise(tokenizer, text, ends) for ends in (None, [6, 12, len(text)], [len(text)]))
    assert lines.chosen.steps is None
    trained, inspected = inputs(lines, given, single)
    assert trained == inspected
    assert trained[0] == trained[1]
    assert max(trained[0]) == 2
    assert set(trained[2]) == {0}


def test_public_samples_when_read_then_every_step_has_its_label(shared: Path) -> None:
    found = {}
    for name in ("prm800k_steps", "openr_samples_prm800k", "openr_samples_math-shepherd"):
        responses, refused = read_responses(shared / f"data/prm/{name}.jsonl")
        assert refused == []
        labels = Counter(label for row in responses for label in row.step_labels or ())
        found[name] = (len(responses), labels[1], labels[0], labels[-1], labels[None])
    assert found["prm800k_steps"] == (676, 3876, 310, 557, 0)
    lines = (shared / "data/prm/openr_samples_math-shepherd.jsonl").read_text()
    assert found["openr_samples_math-shepherd"][0] == 7
    assert sum(found["openr_samples_math-shepherd"][1:]) == lines.count("\\u043a\\u0438")
