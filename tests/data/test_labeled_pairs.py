"""Public data sets in which a label says which of two responses is better: the better one is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regretless.core.errors import DataError
from regretless.data.preferences import parse_pairs, read_pairs
from regretless.data.rejected_rows import check_some_left


def turns(*contents: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant" if place % 2 else "user", "content": content, "num_tokens": 3}
        for place, content in enumerate(contents)
    ]


HELPSTEER3 = {
    "domain": "general",
    "language": "english",
    "context": turns("Name a color."),
    "response1": "one",
    "response2": "two",
    "individual_preference": [{"score": 3, "reasoning": "two is better", "feedback1": "", "feedback2": ""}],
}
HELPSTEER2 = {"prompt": "q", "response_1": "one", "response_2": "two", "preference_statement": "better"}
SAFE = {
    "prompt": "q",
    "response_0": "one",
    "response_1": "two",
    "is_response_0_safe": False,
    "is_response_1_safe": True,
}
ARENA = {
    "question_id": "x",
    "model_a": "vicuna",
    "model_b": "koala",
    "judge": "arena",
    "conversation_a": turns("q", "one"),
    "conversation_b": turns("q", "two"),
    "language": "English",
}
SHP = {
    "post_id": "x",
    "history": "q",
    "human_ref_A": "one",
    "human_ref_B": "two",
    "score_A": 5,
    "score_B": 8,
    "score_ratio": 1.6,
}
FARM = {"instruction": "q", "input": "", "output_1": "one", "output_2": "two"}
WEBGPT = {"question": {"dataset": "eli5", "id": "x", "full_text": "q"}, "answer_0": "one", "answer_1": "two"}
READ = [
    (HELPSTEER3 | {"overall_preference": 3}, "two"),
    (HELPSTEER3 | {"overall_preference": -1}, "one"),
    (HELPSTEER2 | {"preference_strength": 1}, "two"),
    (HELPSTEER2 | {"preference_strength": -2.0}, "one"),
    (SAFE | {"better_response_id": 1, "safer_response_id": 1}, "two"),
    (SAFE | {"better_response_id": 0}, "one"),
    (ARENA | {"winner": "model_b"}, "two"),
    (ARENA | {"winner": "model_a"}, "one"),
    (HELPSTEER2 | {"winner": "model_b"}, "two"),
    (SHP | {"labels": 1}, "one"),
    (SHP | {"labels": 0}, "two"),
    (FARM | {"preference": 1}, "one"),
    (FARM | {"preference": 2}, "two"),
    (WEBGPT | {"score_0": -0.5, "score_1": 0.5}, "two"),
    (WEBGPT | {"score_0": 1, "score_1": -1}, "one"),
]
"""A row of each layout, and its better response; the question is `q` or about a color."""


@pytest.mark.parametrize(("row", "better"), READ)
@pytest.mark.parametrize("need_rejected", [True, False])
def test_row_when_a_label_says_which_response_is_better_then_that_one_is_chosen(
    row: dict[str, Any], better: str, need_rejected: bool
) -> None:
    (pair,), refused = parse_pairs([row], need_rejected=need_rejected)
    assert not refused
    texts = [side.text if isinstance(side.text, str) else side.text[-1]["content"] for side in pair.sides.values()]
    assert texts == [better, "one" if better == "two" else "two"][: len(texts)] and len(texts) == 1 + need_rejected
    asked = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1]["content"]
    assert asked == ("Name a color." if row.get("domain") else "q")


TIE = "a tie, which expresses no preference"
REFUSED = [
    (HELPSTEER3 | {"overall_preference": 0}, f"overall_preference 0: {TIE}"),
    (HELPSTEER3 | {"overall_preference": None}, "overall_preference: expected one of -3, -2, -1, 0, 1, 2, 3, got None"),
    (HELPSTEER3 | {"overall_preference": "3"}, "overall_preference: expected one of -3, -2, -1, 0, 1, 2, 3, got '3'"),
    (HELPSTEER3 | {"overall_preference": [3]}, "overall_preference: expected one of"),
    (SAFE | {"better_response_id": True}, "better_response_id: expected one of 0, 1, got True"),
    (
        SAFE | {"better_response_id": 0, "safer_response_id": 1},
        "better_response_id 0, safer_response_id 1: they name different responses; remove the column that should not",
    ),
    (ARENA | {"winner": "tie"}, f"winner 'tie': {TIE}"),
    (ARENA | {"winner": "tie (bothbad)"}, f"winner 'tie (bothbad)': {TIE}"),
    (ARENA | {"winner": "both_bad"}, f"winner 'both_bad': {TIE}"),
    (
        ARENA | {"winner": "gpt-4"},
        "winner: expected one of model_a, model_b, tie, tie (bothbad), both_bad, got",
    ),
    (FARM | {"preference": 1.5}, f"preference 1.5: {TIE}"),
    (WEBGPT | {"score_0": 0.0, "score_1": 0.0}, f"score_0 0.0, score_1 0.0: {TIE}"),
    (WEBGPT | {"score_0": 0.5}, "score_0, score_1: expected two numbers, got score_0 0.5"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_row_when_its_label_prefers_none_then_it_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    pairs, (refusal,) = parse_pairs([row])
    assert not pairs and refusal.reason.startswith(reason), refusal.reason
    with pytest.raises(DataError, match="no usable row is left"):
        check_some_left(pairs, [refusal], "rows")


def test_judgment_when_it_is_of_an_earlier_turn_then_later_ones_are_left_out() -> None:
    row = {
        "model_a": "a",
        "model_b": "b",
        "winner": "model_b",
        "conversation_a": turns("q", "one", "more", "three"),
        "conversation_b": turns("q", "two", "more", "four"),
    }
    chosen = [parse_pairs([row | {"turn": turn}])[0][0].chosen.text for turn in (1, 2)]
    assert [len(text) for text in chosen] == [1, 3] and chosen[0][0]["content"] == "two"


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"prompt": "q", "y_w": "one", "y_l": "two"}, "y_w is the better response: chosen_key=y_w rejected_key=y_l"),
        ({"question": "q", "response_j": "one", "response_k": "two"}, "chosen_key=response_j rejected_key=response_k"),
        ({"prompt": "q", "answer_a": "one", "answer_b": "two", "preferred": 1}, "if preferred says which response"),
        ({"prompt": "q", "response_0": "one", "response_1": "two", "label": 1}, "if label says which response"),
        ({"prompt": "q", "answers": [{"answer": "one", "rank": 1.0}]}, "rank 1 is the best (score: -rank)"),
        (
            {"instruction": "q", "completions": [{"response": "one"}]},
            "completions is a list of several responses",
        ),
        ({"info": {"post": "q"}, "summaries": [{"text": "one"}], "choice": 1}, "choice is the place of the better one"),
        ({"prompt": "q", "completion": "one", "label": 1}, "single responses with a label are unpaired data"),
        ({"prompt": "q", "x": "one", "y": "two"}, "chosen_key names a column with the better response in every row"),
    ],
)
def test_row_when_its_layout_is_unknown_then_the_advice_does_not_train_the_worse_response(
    row: dict[str, Any], hint: str
) -> None:
    (refusal,) = parse_pairs([row])[1]
    assert hint in refusal.reason


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (HELPSTEER3 | {"overall_preference": 3}, "overall_preference: it says which response is better, so response1"),
        ({"prompt": "q", "answer_a": "one", "answer_b": "two", "preference": 1}, "or remove preference"),
    ],
)
def test_keys_when_a_label_decides_between_the_columns_then_they_are_refused(
    tmp_path: Path, row: dict[str, Any], remedy: str
) -> None:

    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    first, second = (name for name in row if name.startswith(("response", "answer_")))
    for chosen, rejected in ((first, second), (second, first)):
        pairs, (refusal,) = read_pairs(tmp_path / "a.jsonl", chosen_key=chosen, rejected_key=rejected)
        assert not pairs and remedy.replace("response1", chosen) in refusal.reason
