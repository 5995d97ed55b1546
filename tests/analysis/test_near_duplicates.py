"""Nearly equal texts, against the share of common sequences computed for every two of them."""

from __future__ import annotations

import random

import pytest

from flat_pairs import pair_of
from regretless.analysis import near_duplicates as module
from regretless.analysis.near_duplicates import ALIKE, first_alike, near_duplicates
from regretless.data.columns import Pair
from regretless.data.contamination import words


def sequences(text: str) -> set[tuple[str, ...]]:
    split = words(text)
    return {tuple(split[start : start + 5]) for start in range(max(1, len(split) - 4))}


def first_by_hand(texts: list[str]) -> list[int]:
    first: list[int] = []
    for index, text in enumerate(texts):
        mine = sequences(text)
        leaders = [other for other in range(index) if first[other] == other]
        shares = {other: len(mine & sequences(texts[other])) / len(mine | sequences(texts[other])) for other in leaders}
        first.append(next((other for other, share in shares.items() if share >= ALIKE), index))
    return first


@pytest.mark.parametrize("seed", range(5))
def test_texts_when_changed_in_a_few_words_then_the_first_alike_is_that_of_all_comparisons(seed: int) -> None:
    numbers = random.Random(seed)
    texts = []
    for _ in range(12):
        text = [f"w{numbers.randrange(30)}" for _ in range(numbers.randrange(1, 60))] + ["the same end"] * 3
        for _ in range(5):
            changed = [word if numbers.random() > 0.02 else "other" for word in text]
            texts.append(" ".join(changed[numbers.randrange(3) :]))
    numbers.shuffle(texts)
    expected = first_by_hand(texts)
    assert first_alike(texts) == expected
    assert 12 < len(set(expected)) < 60, "neither all alike nor none"


def test_texts_when_short_then_only_case_spaces_and_punctuation_may_differ() -> None:
    assert first_alike(["What is 3+4?", "what is 3 + 4", "What is 3+5?", "", "?", "…"]) == [0, 0, 2, 3, 3, 3]
    assert first_alike([]) == []


def test_work_when_all_texts_share_a_long_phrase_then_none_are_compared_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    share = module._share
    monkeypatch.setattr(module, "_share", lambda *both: (compared.append(1), share(*both))[1])
    phrase = " ".join(f"phrase{number}" for number in range(40))
    texts = [" ".join([phrase, *(f"w{number}-{word}" for word in range(40))]) for number in range(200)]
    assert len(set(first_alike([*texts, texts[3]]))) == 200
    assert len(compared) == 1


def test_pairs_when_prompt_and_both_responses_are_alike_then_they_repeat_an_earlier_one_and_equal_ones_do_not() -> None:
    def pair(prompt: str, chosen: str, rejected: str) -> Pair:
        return pair_of(prompt=prompt, chosen=chosen, rejected=rejected)

    rows = [
        pair("How many trees?", "six", "five"),
        pair("how many trees", "Six.", "five"),  # alike
        pair("How many trees?", "six", "seven"),
        pair("How many trees?", "five", "six"),  # exchanged
        pair("How many trees?", "six", "five"),  # equal: counted as repeated elsewhere
        pair("How many cars?", "six", "five"),
    ]
    prompts, pairs = near_duplicates(rows)
    assert prompts == {1: 0}
    assert pairs == {1: 0}
