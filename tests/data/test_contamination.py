"""Training prompts that stand in a benchmark, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from flat_pairs import pair_of
from regretless.data.contamination import EQUAL, Benchmarks, Problem

LONG = "Tom buys three red apples and then two green pears for his old friend Ann on Monday."
RUN = "tom buys three red apples and then two green pears for his old"
PROBLEMS: dict[str, dict[str, Any]] = {
    "sums": {"a": "What is 3 - 5?", "b": LONG, "empty": "?!"},
    "chat": {"c": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Écris un poème !"}]},
}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("what IS  ３ -\n5", {Problem("sums", "a"): EQUAL}),
        ("What is 3 + 5?", {}),
        ("What is 3 - 5? Answer in words.", {}),
        ("?!", {}),
        # Thirteen words in a row, and twelve.
        (f"Read this: {LONG.replace('Monday', 'Friday')}", {Problem("sums", "b"): RUN}),
        (LONG.replace("his old", "his dear"), {}),
        # What the user asks, in any turn; not what the system or an earlier answer says.
        ([{"role": "user", "content": "écris un poème"}], {Problem("chat", "c"): EQUAL}),
        ([{"role": "system", "content": "What is 3 - 5?"}, {"role": "user", "content": "Hello"}], {}),
        (
            [
                {"role": "user", "content": "What is 3 - 5?"},
                {"role": "assistant", "content": LONG},
                {"role": "user", "content": "Why?"},
            ],
            {Problem("sums", "a"): EQUAL},
        ),
    ],
)
def test_problems_when_a_prompt_is_equal_or_has_thirteen_of_their_words_then_it_repeats_them(
    prompt: Any, expected: dict[Problem, str]
) -> None:
    assert Benchmarks(PROBLEMS).repeated_by(prompt) == expected


def test_phrase_when_more_than_ten_problems_have_it_then_a_prompt_with_it_repeats_none_of_them() -> None:
    phrase = " ".join(f"word{number}" for number in range(13))
    for count, repeated in ((10, 10), (11, 0)):
        benchmarks = Benchmarks({"b": {str(number): f"{phrase} of {number}" for number in range(count)}})
        assert len(benchmarks.repeated_by(f"{phrase} elsewhere")) == repeated
        assert set(benchmarks.repeated_by(f"{phrase} of 3").values()) >= {EQUAL}
    # The same problem in two benchmarks is one text.
    twice = Benchmarks({name: {"1": phrase} for name in map(str, range(11))})
    assert len(twice.repeated_by(f"{phrase} elsewhere")) == 11


def test_notes_when_prompts_repeat_problems_then_each_problem_counts_once_for_its_benchmark() -> None:
    prompts = ["What is 3-5?", "what is 3 - 5", "another", LONG]
    (note,) = Benchmarks(PROBLEMS).notes(prompts)
    assert note.startswith("sums: 2 of 3 problems stand in the training prompts (equal, or 13 words in a row)")
    assert Benchmarks(PROBLEMS).notes(["another"]) == []


def test_rows_when_they_repeat_problems_then_they_are_rejected_with_benchmark_and_line() -> None:
    rows = [
        pair_of(prompt=prompt, chosen="a", rejected="b", origin=f"mine.jsonl:{line}")
        for line, prompt in enumerate(["another", "what is 3 - 5", f"So: {LONG}"], 1)
    ]
    kept, rejected = Benchmarks(PROBLEMS).without(rows)
    assert kept == rows[:1]
    assert list(map(str, rejected)) == [
        "mine.jsonl:2: prompt: equal to a problem of the benchmark sums",
        "mine.jsonl:3: prompt: 13 words in a row as in a problem of the benchmark sums",
    ]
