"""Pairing rules on hand-made responses, where every pair can be counted by hand."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flat_pairs import pair_of
from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Pair, Response, Verdict
from regretless.data.contamination import Benchmarks
from regretless.data.preferences import read_pairs
from regretless.data.responses import read_responses
from regretless.data.rows import write_records
from regretless.data.steps import joined
from regretless.labeling.pair import PairConfig, make_pairs, run
from regretless.labeling.pairing_rules import RULES, Rule

PROMPT = [{"role": "user", "content": "2+2?"}]


def response(name: str, verdict: str | None = None, *, prompt: str = "q1", **values: Any) -> Response:
    """A response whose name is its text and its id."""
    defaults: dict[str, Any] = {"prompt": PROMPT, "finish_reason": "stop", "model": "writer"}
    return Response(
        prompt_id=prompt,
        response_id=f"{prompt}-{name}",
        response=name,
        verdict=None if verdict is None else Verdict(verdict),
        **defaults | values,
    )


def texts(pairs: list[Pair]) -> list[tuple[str, str]]:
    return [(pair.chosen.text[0]["content"], pair.rejected.text[0]["content"]) for pair in pairs]  # type: ignore[index]


CORRECT = [response(name, "correct") for name in ("c1", "c2", "c3")]
WRONG = [response(name, "wrong") for name in ("w1", "w2", "w3")]


def test_correct_vs_wrong_when_more_than_two_of_each_then_all_combinations_of_two_and_two() -> None:
    pairs, counts = make_pairs([*CORRECT, *WRONG], PairConfig())
    chosen, rejected = {pair[0] for pair in texts(pairs)}, {pair[1] for pair in texts(pairs)}
    assert (len(chosen), len(rejected)) == (2, 2)
    assert chosen < {"c1", "c2", "c3"}
    assert rejected < {"w1", "w2", "w3"}
    assert set(texts(pairs)) == {(one, other) for one in chosen for other in rejected}
    assert counts == {
        "pairs": 4,
        "prompts_paired": 1,
        "distinct_responses": 4,
        "pairs_without_logps": 4,
        "prompts_dropped": {},
        "responses_left_out": {},
    }


def test_correct_vs_wrong_when_one_side_has_one_then_it_stands_in_every_pair() -> None:
    pairs, _ = make_pairs([CORRECT[0], *WRONG[:2]], PairConfig())
    assert sorted(texts(pairs)) == [("c1", "w1"), ("c1", "w2")]
    pairs, _ = make_pairs([*CORRECT, *WRONG], PairConfig(max_correct=1, max_wrong=3))
    assert len(pairs) == 3


def test_correct_vs_wrong_when_seeds_change_then_each_response_is_taken_equally_often() -> None:
    counts = dict.fromkeys(("c1", "c2", "c3"), 0)
    for seed in range(300):
        pairs, _ = make_pairs([*CORRECT, WRONG[0]], PairConfig(seed=seed))
        for chosen, _rejected in texts(pairs):
            counts[chosen] += 1
    # 2 of 3, so 200 of 300 each; the standard deviation is 8.
    assert all(abs(count - 200) < 35 for count in counts.values())


def test_prompts_when_one_sided_or_undecided_then_they_are_dropped_and_counted_by_reason() -> None:
    rows = [
        response("a", "correct", prompt="right"),
        response("a", "wrong", prompt="wrong"),
        response("a", "unknown", prompt="open"),
        response("b", prompt="open"),
        *CORRECT[:1],
        *WRONG[:1],
        response("u", "unknown"),
    ]
    pairs, counts = make_pairs(rows, PairConfig())
    assert texts(pairs) == [("c1", "w1")]
    assert counts["prompts_dropped"] == {"no_usable_response": 1, "only_correct": 1, "only_wrong": 1}
    assert counts["responses_left_out"] == {"verdict_unknown": 3}


def test_equal_texts_when_repeated_then_they_count_once_and_contradictions_are_unknown() -> None:
    again = replace(CORRECT[0], response_id="q1-again", logps=[-1.0], token_ids=[7])
    both_ways = [response("x", "correct"), replace(response("x", "wrong"), response_id="q1-x2")]
    pairs, counts = make_pairs([CORRECT[0], again, WRONG[0], *both_ways], PairConfig())
    assert texts(pairs) == [("c1", "w1")]
    assert counts["responses_left_out"] == {"duplicate": 2, "verdict_unknown": 1}
    # Of equal texts, one with log-probabilities is kept.
    assert (pairs[0].chosen.id, pairs[0].chosen.logps) == ("q1-again", [-1.0])


def test_most_likely_when_asked_for_then_the_highest_means_a_token_are_combined() -> None:
    likelihoods = {"c1": [-0.1, -0.9], "c2": [-0.4], "c3": [-0.2, -0.2, -0.5], "w1": [-3.0], "w2": [-1.0, -1.0]}
    rows = [
        replace(row, logps=likelihoods[row.response], token_ids=[1] * len(likelihoods[row.response]))
        for row in [*CORRECT, *WRONG[:2]]
    ]
    pairs, counts = make_pairs([*rows, WRONG[2]], PairConfig(rule="most_likely", max_wrong=1))
    # Means: c1 −0.5, c2 −0.4, c3 −0.3; w1 −3, w2 −1. By their sums c2 would come before c3.
    assert texts(pairs) == [("c3", "w2"), ("c2", "w2")]
    assert counts["responses_left_out"] == {"without_logps": 1}


def test_best_vs_random_when_scored_then_a_best_one_meets_a_strictly_lower_one() -> None:
    scores = {"a": 4.5, "b": 4.5, "c": 3.0, "d": 1.0}
    rows = [response(name, score=score) for name, score in scores.items()]
    seen = set()
    for seed in range(60):
        pairs, _ = make_pairs(rows, PairConfig(rule="best_vs_random", seed=seed))
        assert len(pairs) == 1
        seen.update(texts(pairs))
    assert seen == {("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")}
    rows = [
        response("a", prompt="same", score=2.0),
        response("b", prompt="same", score=2.0),
        response("a", prompt="one", score=2.0),
        response("b", prompt="one"),
        # The mean of equal scores differs from them in the last bit.
        *(response("a", prompt="copies", score=5 / 3) for _ in range(11)),
        response("b", prompt="copies", score=5 / 3),
    ]
    _, counts = make_pairs(rows, PairConfig(rule="best_vs_random"))
    assert counts["prompts_dropped"] == {"equal_scores": 2, "single_response": 1}
    assert counts["responses_left_out"] == {"duplicate": 10, "without_score": 1}


def test_pairs_when_rows_are_shuffled_or_other_prompts_come_and_go_then_they_stay_the_same() -> None:
    rows = [
        response(f"{kind}{number}", verdict, prompt=f"q{prompt}")
        for prompt in range(6)
        for kind, verdict in (("c", "correct"), ("w", "wrong"))
        for number in range(4)
    ]
    pairs, _ = make_pairs(rows, PairConfig(seed=5))
    shuffled = random.Random(0).sample(rows, len(rows))
    # Rows without ids of their own get them from their line numbers, so ids may not decide.
    renamed = [replace(row, response_id=f"{row.prompt_id}-{line}") for line, row in enumerate(shuffled)]
    assert make_pairs(shuffled, PairConfig(seed=5))[0] == pairs
    assert texts(make_pairs(renamed, PairConfig(seed=5))[0]) == texts(pairs)
    some = [row for row in shuffled if row.prompt_id in ("q1", "q4")]
    assert make_pairs(some, PairConfig(seed=5))[0] == [pair for pair in pairs if pair.prompt_id in ("q1", "q4")]
    assert [pair.prompt_id for pair in pairs] == sorted(pair.prompt_id or "" for pair in pairs)


def labeled(row: Response, **values: Any) -> Response:
    defaults: dict[str, Any] = {
        "token_ids": [5, 6],
        "logps": [-0.5, -0.25],
        "logps_kind": "raw",
        "sampled_logps": [-0.25, -0.125],
        "prompt_token_ids": [1, 2],
        "tokenizer": "f",
    }
    return replace(row, **defaults | values)


def test_labels_when_responses_have_them_then_the_pair_carries_both_sides(tmp_path: Path) -> None:
    rows = [labeled(CORRECT[0], score=4.0), labeled(WRONG[0], token_ids=[7], logps=[-2.0], sampled_logps=[-1.0])]
    write_records(tmp_path / "responses.parquet", rows)
    summary = run(PairConfig(), tmp_path / "responses.parquet", tmp_path)
    pairs, _ = read_pairs(tmp_path / "pairs.parquet")
    assert pairs == [
        pair_of(
            prompt=PROMPT,
            chosen=[{"role": "assistant", "content": "c1"}],
            rejected=[{"role": "assistant", "content": "w1"}],
            pair_id="q1-c1>q1-w1",
            prompt_id="q1",
            chosen_id="q1-c1",
            rejected_id="q1-w1",
            prompt_token_ids=[1, 2],
            chosen_token_ids=[5, 6],
            rejected_token_ids=[7],
            chosen_logps=[-0.5, -0.25],
            rejected_logps=[-2.0],
            logps_kind="raw",
            tokenizer="f",
            chosen_model="writer",
            rejected_model="writer",
            chosen_complete=True,
            rejected_complete=True,
            chosen_score=4.0,
        )
    ]
    assert summary["pairs_without_logps"] == 0
    run(PairConfig(logps="sampled"), tmp_path / "responses.parquet", tmp_path)
    pairs, _ = read_pairs(tmp_path / "pairs.parquet")
    assert (pairs[0].chosen.logps, pairs[0].rejected.logps, pairs[0].logps_kind) == ([-0.25, -0.125], [-1.0], "sampled")


def test_labels_when_two_vocabularies_meet_then_each_side_keeps_its_own_and_the_prompt_has_no_tokens() -> None:
    rows = [labeled(CORRECT[0], token_bytes=[1, 1]), labeled(WRONG[0], tokenizer="g", token_bytes=[2, 0])]
    (found,), counts = make_pairs(rows, PairConfig())
    assert (found.chosen.token_ids, found.chosen.token_bytes) == ([5, 6], [1, 1])
    assert (found.rejected.logps, found.rejected.token_bytes) == ([-0.5, -0.25], [2, 0])
    assert (found.tokenizer, found.tokenizer_of("chosen"), found.tokenizer_of("rejected")) == ("f and g", "f", "g")
    assert (found.prompt_token_ids, found.logps_kind, counts["pairs_without_logps"]) == (None, "raw", 0)
    (found,), _ = make_pairs([labeled(CORRECT[0]), labeled(WRONG[0], tokenizer=None)], PairConfig())
    assert (found.tokenizer_of("chosen"), found.tokenizer_of("rejected")) == ("f", None)


def test_stage_when_rows_are_bad_then_each_is_refused_with_file_line_and_reason(tmp_path: Path) -> None:
    def line(name: str, verdict: str, **values: Any) -> str:
        return json.dumps({"prompt": "2+2?", "response": name, "verdict": verdict, **values}) + "\n"

    path = tmp_path / "responses.jsonl"
    path.write_text(
        line("4", "correct")
        + line("  ", "wrong")
        + line("5, becau", "wrong", finish_reason="length")
        + '{"prompt": "2+2?",\n'
        + line("6", "maybe")
        + line("7", "wrong", token_ids=[1], logps=[-1.0, -2.0])
        + line("8", "wrong", tools=[], chat_template_kwargs={"enable_thinking": None})
        + line("9", "wrong", tools=[{"type": "function", "function": {"name": "add"}}])
        + line("10", "wrong", chat_template_kwargs={"enable_thinking": False})
    )
    summary = run(PairConfig(), path, tmp_path)
    arguments = (
        "tools, chat_template_kwargs: a response is judged and paired without them, so that it would answer another "
        "prompt; remove the columns, or write pairs (chosen, rejected), which may have them; "
        "model.chat_template_kwargs holds for all prompts"
    )
    refused = [json.loads(text) for text in (tmp_path / "refused.jsonl").read_text().splitlines()]
    assert {refusal["line"]: refusal["reason"] for refusal in refused} == {
        2: "empty completion",
        3: "truncated at the token limit (finish_reason length): no end-of-sequence token",
        4: "not valid JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 19)",
        5: "verdict: expected correct, wrong or unknown, got 'maybe'",
        6: "logps: expected one value per token, got 2 values for 1 tokens",
        8: arguments,
        9: arguments,
    }
    assert {refusal["source"] for refusal in refused} == {str(path)}
    assert (summary["pairs"], summary["refused"], summary["prompts"]) == (1, 7, 1)


def test_stage_when_no_pair_results_then_it_fails_and_says_why(tmp_path: Path) -> None:
    write_records(tmp_path / "r.jsonl", [CORRECT[0], replace(WRONG[0], finish_reason="length")])
    write_records(tmp_path / "raw.jsonl", [replace(row, verdict=None) for row in (CORRECT[0], WRONG[0])])
    with pytest.raises(DataError, match=r"no response has a verdict or a score: run verify or judge first$"):
        run(PairConfig(), tmp_path / "raw.jsonl", tmp_path)
    with pytest.raises(DataError, match=r"no pairs from 2 responses: only_correct 1, rejected rows 1$"):
        run(PairConfig(), tmp_path / "r.jsonl", tmp_path)
    assert (tmp_path / "refused.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"select": lambda rows, *_: [rows[0]]},
            r"select, for prompt_id q1, returned \[Response.*; expected a list of pairs",
        ),
        ({"select": lambda rows, *_: [(rows[0], rows[0])]}, "select, .* of two different responses"),
        ({"select": lambda rows, *_: [(0, 1)]}, r"select, .* returned \[\(0, 1\)\]; expected a list of pairs"),
        ({"select": lambda *_: None}, "select, .* returned None; expected a list of pairs"),
        (
            {"select": lambda *_: 1 / 0},
            r"raised ZeroDivisionError: division by zero \(test_pair\.py, line \d+\); correct",
        ),
        ({"unusable": lambda row: True}, "unusable, .* returned True; expected a text, or None"),
        ({"compare": lambda rows: None}, "compare, .* returned None; expected a list of responses"),
        ({"probability": lambda *_: 1.5}, r"probability, .* returned 1\.5; expected a number from 0 to 1"),
    ],
)
def test_rule_when_it_raises_or_returns_another_form_then_it_is_named(
    changes: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "mine", replace(RULES["correct_vs_wrong"], **changes))
    with pytest.raises(ConfigError, match=f"^rule mine: .*{told}"):
        make_pairs([*CORRECT, *WRONG], PairConfig(rule="mine"))


def test_prompt_id_when_it_stands_for_two_prompts_then_both_places_are_named(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "another"}]
    write_records(tmp_path / "r.jsonl", [CORRECT[0], replace(WRONG[0], prompt=other)])
    rows, _ = read_responses(tmp_path / "r.jsonl")
    with pytest.raises(DataError, match=r"prompt id q1: stands for two prompts \(.*r.jsonl:1 and .*r.jsonl:2\)"):
        make_pairs(rows, PairConfig())


def test_stage_when_single_rows_do_not_fit_the_others_then_they_alone_are_refused(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "another"}]
    rows = [
        CORRECT[0],
        WRONG[0],
        replace(CORRECT[0], prompt_id="q2"),
        replace(WRONG[0], prompt_id="q2", prompt=other),
        replace(CORRECT[0], prompt_id="q3", prompt="a text"),
    ]
    write_records(tmp_path / "r.jsonl", rows)
    summary = run(PairConfig(), tmp_path / "r.jsonl", tmp_path)
    assert (summary["pairs"], summary["refused"]) == (1, 3)
    refused = [json.loads(line) for line in (tmp_path / "refused.jsonl").open()]
    assert [(row["line"], row["reason"][:35]) for row in refused] == [
        (3, "prompt_id: 'q2' stands for two prom"),
        (4, "prompt_id: 'q2' stands for two prom"),
        (5, "prompt: a text, where most rows hav"),
    ]


def test_published_samples_when_paired_then_the_seven_prompts_with_both_kinds_give_pairs(
    shared: Path, tmp_path: Path
) -> None:
    lines = (shared / "data/sampled_outputs/qwen2.5_math_cot.jsonl").read_text().splitlines()
    rows = [
        {"prompt": row["question"], "response": text, "verdict": "correct" if is_correct else "wrong"}
        for row in map(json.loads, lines)
        for text, is_correct in zip(row["code"], row["score"], strict=True)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = run(PairConfig(), tmp_path / "samples.jsonl", tmp_path)
    assert (summary["prompts"], summary["responses"], summary["prompts_paired"]) == (50, 400, 7)
    assert summary["prompts_dropped"] == {"only_correct": 41, "only_wrong": 2}
    pairs, _ = read_pairs(tmp_path / "pairs.parquet")
    verdicts = {(row["prompt"], row["response"]): row["verdict"] for row in rows}
    sides = [(pair.prompt, side.text) for pair in pairs for side in (pair.chosen, pair.rejected)]  # type: ignore[union-attr]
    assert set(zip(map(verdicts.get, sides[::2]), map(verdicts.get, sides[1::2]), strict=True)) == {
        ("correct", "wrong")
    }


def by_writer(name: str, writer: str, verdict: str) -> Response:
    return response(name, verdict, model=writer)


def test_above_writer_when_writers_differ_then_responses_are_measured_by_their_writers_mean() -> None:
    able = [by_writer(f"a{number}", "able", "correct") for number in range(3)] + [by_writer("a3", "able", "wrong")]
    poor = [by_writer(f"p{number}", "poor", "wrong") for number in range(3)] + [by_writer("p3", "poor", "correct")]
    pairs, _ = make_pairs([*able, *poor], PairConfig(rule="above_writer", max_correct=4, max_wrong=4))
    scores = {side.id: side.score for pair in pairs for side in pair.sides.values()}
    assert scores["q1-p3"] == 0.75, "right where its writer mostly fails"
    assert scores["q1-a0"] == 0.25 and scores["q1-p0"] == -0.25
    assert scores["q1-a3"] == -0.75, "wrong where its writer mostly succeeds"
    assert all(pair.chosen.score > pair.rejected.score for pair in pairs)  # type: ignore[union-attr, operator]
    assert len(pairs) == 16, "at most max_correct times max_wrong of the 22 that there are"
    every, _ = make_pairs([*able, *poor], PairConfig(rule="above_writer", max_correct=5, max_wrong=5))
    assert ("p0", "a3") in texts(every), "a poor writer's failure is no news, an able one's is"


def test_above_writer_when_writers_differ_then_the_weak_ones_right_response_is_preferred_which_regret_never_does() -> (
    None
):
    able = [by_writer(f"a{number}", "able", "correct" if number else "wrong") for number in range(10)]
    weak = [by_writer(f"w{number}", "weak", "wrong" if number else "correct") for number in range(5)]
    pairs, _ = make_pairs([*able, *weak], PairConfig(rule="above_writer", max_correct=10, max_wrong=10))
    right = {"w0", *(f"a{number}" for number in range(1, 10))}
    # An advantage: by regret, a right response of the abler writer is at least as good (docs/theory.md, Two writers).
    among_right = [pair for pair in texts(pairs) if set(pair) <= right]
    assert sorted(among_right) == [("w0", f"a{number}") for number in range(1, 10)]


def test_rule_when_named_as_before_then_the_error_says_why_it_is_gone_and_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"rule: .*advantage.* the other way round from regret; above_writer makes"):
        PairConfig.parse({"rule": "least_regret"}, "pair")


def test_above_writer_when_a_text_was_drawn_twice_then_it_counts_twice_in_its_writers_mean() -> None:
    again = replace(by_writer("a", "able", "wrong"), response_id="q1-again")
    rows = [by_writer("a", "able", "wrong"), again, by_writer("b", "able", "correct")]
    (pair,), _ = make_pairs(rows, PairConfig(rule="above_writer"))
    assert pair.rejected is not None
    assert (pair.chosen.score, pair.rejected.score) == pytest.approx((2 / 3, -1 / 3))


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [("rloo", 1.0, -1 / 3), ("grpo", 0.75 / math.sqrt(3 / 16), -0.25 / math.sqrt(3 / 16))],
)
def test_normalized_returns_when_one_of_four_is_right_then_they_are_scores_and_their_gap_is_the_target(
    rule: str, right: float, wrong: float
) -> None:
    # The text w1 was drawn twice: both draws count in the group's mean and deviation.
    rows = [CORRECT[0], WRONG[0], replace(WRONG[0], response_id="q1-again"), WRONG[1], response("u", "unknown")]
    pairs, _ = make_pairs(rows, PairConfig(rule=rule, label_temperature=0.5))
    assert sorted(texts(pairs)) == [("c1", "w1"), ("c1", "w2")]
    for pair in pairs:
        assert pair.rejected is not None
        assert (pair.chosen.score, pair.rejected.score) == pytest.approx((right, wrong))
        assert pair.preference_probability == pytest.approx(1 / (1 + math.exp(-(right - wrong) / 0.5)))
    certain, _ = make_pairs(rows, PairConfig(rule=rule))
    assert {pair.preference_probability for pair in certain} == {1.0}
    assert make_pairs(WRONG, PairConfig(rule=rule))[1]["prompts_dropped"] == {"equal_scores": 1}


def test_best_start_when_lines_are_shared_then_a_start_is_worth_what_it_usually_leads_to() -> None:
    rows = [
        response("good\nright", "correct"),
        response("good\nslip", "wrong"),
        response("good\nalso right", "correct"),
        response("bad\nwrong", "wrong"),
        response("bad\nlucky", "correct"),
        response("bad\nunknown", "unknown"),
    ]
    pairs, counts = make_pairs(rows, PairConfig(rule="best_start", max_correct=3, max_wrong=3))
    assert counts["responses_left_out"] == {"verdict_unknown": 1}
    assert set(texts(pairs)) == {
        (good, bad)
        for good in ("good\nright", "good\nslip", "good\nalso right")
        for bad in ("bad\nwrong", "bad\nlucky")
    }, "a wrong response with the good start is preferred to a right one with the bad start"
    assert [pair.chosen.score for pair in pairs] == pytest.approx([2 / 3] * 6)


def of_regret(name: str, halves: tuple[float, float], error: float = 0.1, units: int = 3, **values: Any) -> Response:
    """A response that `rollout` has measured: two estimates of its regret, each with √2 times the error."""
    ends = list(range(1, units + 1))
    measured = {"regret": sum(halves) / 2, "regret_error": error, "regret_halves": list(halves), "unit_ends": ends}
    return response(name, "correct", **{**measured, **values})


@pytest.mark.parametrize(
    ("rows", "pairs", "counts"),
    [
        # Less regret is better. The error of a difference, with half of the continuations, is 0.1 · √2 · √2 = 0.2.
        (
            [of_regret("a", (0.0, 0.0)), of_regret("b", (0.5, 0.5))],
            [("a", "b")],
            {"confirmed": 1.0, "pairs_dropped": {}},
        ),
        ([of_regret("a", (0.0, 0.0)), of_regret("b", (0.21, 0.01))], [("a", "b")], {"confirmed": 1.0}),
        ([of_regret("a", (0.0, 0.0)), of_regret("b", (0.19, 9.0))], [], {"pairs_dropped": {"close": 1}}),
        # The order is the first half's; the second one does not choose, it only confirms.
        (
            [of_regret("a", (0.0, 0.6)), of_regret("b", (0.5, 0.5)), of_regret("c", (1.0, 1.0))],
            [("a", "c"), ("b", "c")],
            {"pairs_dropped": {"unconfirmed": 1}, "confirmed": 2 / 3},
        ),
        (
            [of_regret("a", (0.0, 0.0)), of_regret("b", (0.5, 0.5), units=2), of_regret("c", (0.6, 0.6), units=2)],
            [],
            {"prompts_dropped": {"doubtful": 1}, "pairs_dropped": {"close": 1, "unequal_units": 2}, "confirmed": None},
        ),
        (
            [of_regret("a", (0.0, 0.0)), of_regret("b", (0.5, 0.5), units=2)],
            [],
            {"prompts_dropped": {"doubtful": 1}, "pairs_dropped": {"unequal_units": 1}},
        ),
        ([of_regret("a", (0.5, 0.0)), of_regret("b", (0.5, 0.5))], [], {"prompts_dropped": {"equal_regret": 1}}),
        (
            [of_regret("a", (0.0, 0.0)), response("b", "wrong")],
            [],
            {"prompts_dropped": {"single_response": 1}, "responses_left_out": {"without_regret": 1}},
        ),
    ],
)
def test_response_regret_when_measured_then_pairs_are_apart_confirmed_and_of_equally_many_units(
    rows: list[Response], pairs: list[tuple[str, str]], counts: dict[str, Any]
) -> None:
    made, found = make_pairs(rows, PairConfig(rule="response_regret"))
    assert sorted(texts(made)) == pairs
    assert {name: found[name] for name in counts} == counts


def test_response_regret_when_smallest_gap_is_larger_then_closer_pairs_are_dropped() -> None:
    rows = [of_regret("a", (0.0, 0.0)), of_regret("b", (0.5, 0.5))]
    assert [
        len(make_pairs(rows, PairConfig(rule="response_regret", smallest_gap=gap))[0]) for gap in (0, 2.4, 2.6)
    ] == [1, 1, 0]


def test_response_regret_when_unequal_is_allowed_then_all_are_compared_and_the_correlation_with_units_is_said() -> None:
    rows = [
        of_regret(name, (value,) * 2, units=units)
        for name, value, units in [("a", 0.0, 2), ("b", 0.5, 3), ("c", 1.0, 5)]
    ]
    made, found = make_pairs(rows, PairConfig(rule="response_regret", allow_unequal=True))
    assert sorted(texts(made)) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert found["regret_rank_correlation_with_units"] == pytest.approx(1.0)
    assert make_pairs(rows[:1] * 2, PairConfig(rule="response_regret"))[1]["regret_rank_correlation_with_units"] is None


def test_response_regret_when_many_are_confirmed_then_a_prompt_keeps_as_many_as_other_rules_make() -> None:
    rows = [of_regret(name, (float(number),) * 2) for number, name in enumerate("abcd")]
    made, found = make_pairs(rows, PairConfig(rule="response_regret"))
    assert (len(made), found["confirmed"]) == (4, 1.0)


def of_units(name: str, ids: list[int], ends: list[int], halves: list[tuple[float, float]], **values: Any) -> Response:
    """A response of letters, one for each token; Q^μ of its units by two halves, each with an error of √2 · 0.1."""
    text = "".join("abcdefghij"[token] for token in ids)
    measured = {"regret": 0.0, "regret_error": 0.1, "regret_halves": [0.0, 0.0], "unit_ends": ends}
    measured |= {"unit_characters": ends, "unit_q_error": [*[0.1] * (len(ends) - 1), 0.0]}
    measured |= {"unit_q_halves": [list(half) for half in zip(*halves, strict=True)]}
    logps = [-0.5 * place for place in range(len(ids))]
    known: dict[str, Any] = {"token_ids": ids, "logps": logps, "finish_reason": "stop", "prompt_token_ids": [9]}
    return replace(response(name, "correct"), **{**known, **measured, "response": text, **values})


def test_siblings_when_responses_part_then_the_units_there_are_a_pair_behind_their_context() -> None:
    first = of_units("x", [0, 1, 2, 3, 4], [2, 3, 5], [(0.9, 0.9), (0.8, 0.8), (1.0, 1.0)])
    other = of_units("y", [0, 1, 5, 6], [2, 3, 4], [(0.9, 0.9), (0.3, 0.4), (0.0, 0.0)])
    (pair,), counts = make_pairs([first, other], PairConfig(rule="regret"))
    assert (pair.pair_id, pair.prefix_tokens, texts([pair])) == ("q1-x:2>q1-y:2", 2, [("abc", "abf")])
    assert (pair.chosen.token_ids, pair.chosen.logps, pair.chosen.cut_at) == (first.token_ids, first.logps, 3)
    assert [side.complete for side in pair.sides.values()] == [False, False]
    assert counts["confirmed"] == 1.0


@pytest.mark.parametrize("error", [0.1, 0.0])
@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
def test_preference_probability_when_by_regret_then_it_is_the_mean_over_the_posterior(
    error: float, temperature: float
) -> None:
    first, other = of_regret("a", (0.0, 0.0)), of_regret("b", (0.4, 0.5))
    rows = [replace(row, regret_error=error) for row in (first, other)]
    (pair,), _ = make_pairs(rows, PairConfig(rule="response_regret", label_temperature=temperature))
    # The gap, of both halves together, and its error.
    draws = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gaps = 0.45 + math.sqrt(2) * error * draws
    expected = ((gaps / temperature).sigmoid() if temperature else (gaps > 0).double()).mean().item()
    assert pair.preference_probability == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("other", "pairs", "counts"),
    [
        # Against Q^μ = 0.5 ± 0.1 of the unit "ab", whose context is the prompt.
        (of_units("y", [5, 6], [1, 2], [(0.9, 0.8), (1.0, 1.0)]), [("f", "ab")], {"confirmed": 1.0}),
        (of_units("y", [5, 6], [1, 2], [(0.1, 0.4), (0.0, 0.0)]), [("ab", "f")], {"confirmed": 1.0}),
        (of_units("y", [5, 6], [1, 2], [(0.31, 0.0), (0.0, 0.0)]), [], {"pairs_dropped": {"close": 1}}),
        (of_units("y", [5, 6], [1, 2], [(0.1, 0.9), (0.0, 0.0)]), [], {"pairs_dropped": {"unconfirmed": 1}}),
        (of_units("y", [5, 6], [1, 2], [(0.5, 0.9), (0.0, 0.0)]), [], {"prompts_dropped": {"equal_regret": 1}}),
        # The last unit is whole, and its Q^μ is the return.
        (of_units("y", [5, 6], [2], [(1.0, 1.0)]), [("fg", "ab")], {"confirmed": 1.0}),
        # No two units behind one context: one is the beginning of the other, or all of the response is.
        (of_units("y", [0, 1, 2, 6], [3, 4], [(0.9, 0.9), (1.0, 1.0)]), [], {"prompts_dropped": {"no_siblings": 1}}),
        (of_units("y", [0, 1], [2], [(0.9, 0.9)]), [], {"prompts_dropped": {"no_siblings": 1}}),
        (
            of_units("y", [5, 6], [1, 2], [(0.9, 0.9)] * 2, response="\n7"),
            [],
            {"prompts_dropped": {"no_siblings": 1}},
        ),
        (
            of_units("y", [5, 6], [1, 3], [(0.9, 0.9)] * 2),
            [],
            {"responses_left_out": {"units_do_not_fit_its_tokens": 1}},
        ),
        (of_units("y", [5], [1], [(1.0, 1.0)], unit_q_error=None), [], {"responses_left_out": {"without_regret": 1}}),
    ],
)
def test_regret_when_units_are_measured_then_siblings_are_apart_and_confirmed(
    other: Response, pairs: list[tuple[str, str]], counts: dict[str, Any]
) -> None:
    made, found = make_pairs(
        [of_units("x", [0, 1, 2], [2, 3], [(0.5, 0.5), (1.0, 1.0)]), other], PairConfig(rule="regret")
    )
    assert texts(made) == pairs
    assert {name: found[name] for name in counts} == counts
    assert all(pair.prefix_tokens is None for pair in made)
    # A whole response is complete, and the others are cut.
    assert [side.complete for pair in made for side in pair.sides.values()] == [
        text == "fg" for sides in pairs for text in sides
    ]


def test_siblings_when_written_then_readers_take_them(tmp_path: Path) -> None:
    rows = [
        of_units("x", [0, 1, 2, 3], [2, 3, 4], [(0.9, 0.9), (0.8, 0.8), (1.0, 1.0)]),
        of_units("y", [0, 1, 5, 6], [2, 3, 4], [(0.9, 0.9), (0.3, 0.4), (0.0, 0.0)]),
    ]
    write_records(tmp_path / "measured.parquet", rows)
    run(PairConfig(rule="regret"), tmp_path / "measured.parquet", tmp_path)
    pairs, refused = read_pairs(tmp_path / "pairs.parquet")
    assert refused == []
    assert pairs == make_pairs(rows, PairConfig(rule="regret"))[0]


@pytest.mark.parametrize("rule", ["best_vs_random", "above_writer", "best_start"])
def test_rules_of_scores_when_a_score_is_null_then_it_counts_as_missing_and_not_as_an_unknown_verdict(
    rule: str,
) -> None:
    rows = [response("a\nx", score=3.0), response("b\ny", score=1.0), response("c\nz"), response("d\nz")]
    pairs, counts = make_pairs(rows, PairConfig(rule=rule))
    assert [(pair.chosen.id, pair.rejected and pair.rejected.id) for pair in pairs] == [("q1-a\nx", "q1-b\ny")]
    assert counts["responses_left_out"] == {"without_score": 2}


def test_stage_when_another_rule_could_use_the_responses_then_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of another package that fails is not in the way.
    monkeypatch.setitem(RULES, "broken", Rule(lambda response: str(1 / 0), RULES["best_vs_random"].select))
    scored = [response("a", score=3.0), response("b", score=1.0)]
    write_records(tmp_path / "scored.jsonl", scored)
    write_records(tmp_path / "verified.jsonl", [CORRECT[0], WRONG[0]])
    wanted = (
        r"no_usable_response 1, verdict_unknown 2; correct_vs_wrong uses none of these responses, which have scores: "
        r"set rule to one of best_vs_random, above_writer, best_start, rloo, grpo$"
    )
    with pytest.raises(DataError, match=wanted):
        run(PairConfig(), tmp_path / "scored.jsonl", tmp_path)
    wanted = (
        r"without_score 2; best_vs_random uses none of these responses, which have verdicts: "
        r"set rule to one of correct_vs_wrong, above_writer, best_start, rloo, grpo$"
    )
    with pytest.raises(DataError, match=wanted):
        run(PairConfig(rule="best_vs_random"), tmp_path / "verified.jsonl", tmp_path)
    # A rule that could use the responses and finds no pair is not the problem.
    write_records(tmp_path / "equal.jsonl", [response("a", score=3.0), response("b", score=3.0)])
    with pytest.raises(DataError, match=r"equal_scores 1$"):
        run(PairConfig(rule="best_vs_random"), tmp_path / "equal.jsonl", tmp_path)


def test_rules_of_scores_when_all_are_equal_then_there_is_no_pair() -> None:
    with_one_start = [response("same\na", "correct"), response("same\nb", "wrong")]
    _, counts = make_pairs(with_one_start, PairConfig(rule="best_start"))
    assert counts["prompts_dropped"] == {"equal_scores": 1}


def test_scores_when_closer_than_the_smallest_margin_then_the_pair_is_dropped_and_counted() -> None:
    rows = [response(name, score=score) for name, score in (("a", 9.0), ("b", 8.5), ("c", 7.0))]
    config = PairConfig(rule="above_writer", max_correct=3, max_wrong=3, smallest_margin=1.5)
    pairs, counts = make_pairs(rows, config)
    assert sorted(texts(pairs)) == [("a", "c"), ("b", "c")]
    assert counts["pairs_dropped"] == {"small_margin": 1}
    # Verdicts are no scores.
    pairs, counts = make_pairs([CORRECT[0], WRONG[0]], PairConfig(smallest_margin=1.5))
    assert len(pairs) == 1 and counts["pairs_dropped"] == {}


def test_responses_when_their_prompt_stands_in_a_benchmark_then_they_are_rejected(tmp_path: Path) -> None:
    rows = [response(name, verdict, prompt="q1") for name, verdict in (("c", "correct"), ("w", "wrong"))]
    rows += [replace(row, prompt_id="q2", prompt=[{"role": "user", "content": "3+3?"}]) for row in rows]
    write_records(tmp_path / "responses.jsonl", rows)
    summary = run(PairConfig(), tmp_path / "responses.jsonl", tmp_path, Benchmarks({"sums": {"0": "2 + 2"}}))
    assert (summary["pairs"], summary["refused"], summary["prompts_dropped"]) == (1, 2, {"no_usable_response": 1})
    (pair,), _ = read_pairs(tmp_path / "pairs.parquet")
    assert pair.prompt == [{"role": "user", "content": "3+3?"}]


def test_responses_when_paired_within_their_writer_then_each_has_its_pairs_and_one_without_writer_has_none() -> None:
    rows = [
        response(name, verdict, model=model, tokenizer=model)
        for model in ("a", "b", None)
        for name, verdict in ((f"c{model}", "correct"), (f"w{model}", "wrong"))
    ]
    across, counts = make_pairs(rows, PairConfig(max_correct=9, max_wrong=9))
    assert len(across) == 9 and counts["prompts_paired"] == 1
    within, counts = make_pairs(rows, PairConfig(max_correct=9, max_wrong=9, within_writer=True))
    assert texts(within) == [("ca", "wa"), ("cb", "wb")]
    assert [pair.tokenizer for pair in within] == ["a", "b"]
    assert counts["responses_left_out"] == {"without_writer": 2}
    # Equal texts of two writers stay those of each.
    same = [replace(row, response=row.response[0]) for row in rows]
    assert texts(make_pairs(same, PairConfig(within_writer=True))[0]) == [("c", "w"), ("c", "w")]
    # The draw of one writer's pairs does not depend on the others.
    many = [
        replace(row, response=f"{row.response}{n}", response_id=f"{row.response}{n}") for row in rows for n in range(5)
    ]
    config = PairConfig(max_correct=1, max_wrong=1, within_writer=True)
    alone, _ = make_pairs([row for row in many if row.model == "b"], config)
    assert texts(make_pairs(many, config)[0])[1:] == texts(alone)


def of_steps(name: str, steps: list[str], labels: list[int | None], **values: Any) -> Response:
    text, ends = joined(steps)
    defaults: dict[str, Any] = {"finish_reason": None, "step_ends": ends, "step_labels": labels}
    return replace(response(name, **{**defaults, **values}), response=text)


GOOD_STEPS = of_steps("x", ["a", "b", "c"], [1, 1, 1])


@pytest.mark.parametrize(
    ("others", "pairs", "dropped"),
    [
        # The step "b" ends a line in one response and the text in the other.
        ([of_steps("y", ["a", "d"], [1, -1])], [("a\nb", "a\nd")], {}),
        ([of_steps("y", ["a", "d", "e"], [1, -1, -1])], [("a\nb", "a\nd")], {}),
        (
            [of_steps("y", ["d"], [-1]), of_steps("z", ["a", "b", "f"], [1, 1, -1])],
            [("a", "d"), ("a\nb\nc", "a\nb\nf")],
            {},
        ),
        # Neutral and unknown steps are neither; nor is one that has two labels.
        ([of_steps("y", ["a", "d"], [1, 0]), of_steps("z", ["a", "e"], [1, None])], [], {"no_siblings": 1}),
        ([of_steps("y", ["a", "d"], [1, -1]), of_steps("z", ["a", "d", "e"], [1, 1, 1])], [], {"no_siblings": 1}),
        ([of_steps("y", ["a", "d"], [1, -1]), of_steps("y", ["a", "d"], [1, 1])], [], {"no_siblings": 1}),
    ],
)
def test_step_labels_when_a_context_has_good_and_bad_steps_then_they_are_pairs_of_beginnings(
    others: list[Response], pairs: list[tuple[str, str]], dropped: dict[str, int]
) -> None:
    made, counts = make_pairs([GOOD_STEPS, *others], PairConfig(rule="step_labels"))
    assert sorted(texts(made)) == pairs
    assert counts["prompts_dropped"] == dropped
    for side in (side for pair in made for side in pair.sides.values()):
        assert side.complete is False
        assert side.step_ends is not None
        assert (side.step_ends[-1], len(side.step_labels or [])) == (len(side.text[0]["content"]), len(side.step_ends))  # type: ignore[index]


def test_step_labels_when_a_context_has_many_then_so_many_of_each_are_drawn_and_others_are_left_out() -> None:
    rows = [of_steps(f"{sign}{number}", [f"{sign}{number}"], [sign]) for sign in (1, -1) for number in range(5)]
    rows.append(response("unlabeled", "correct"))
    made, counts = make_pairs(rows, PairConfig(rule="step_labels", max_correct=3, max_wrong=1))
    assert len(made) == len(set(texts(made))) == 3
    assert {chosen[0] for chosen, _ in texts(made)} == {"1"}
    assert len({rejected for _, rejected in texts(made) if rejected[0] == "-"}) == 1
    assert counts["responses_left_out"] == {"without_step_labels": 1}


def test_step_labels_when_tokens_are_recorded_then_they_are_kept_where_the_response_ends_with_the_step() -> None:
    known: dict[str, Any] = {"token_ids": [5, 6, 7], "logps": [-1.0, -2.0, -3.0], "finish_reason": "stop"}
    rows = [of_steps("x", ["a", "b"], [1, 1], **known), of_steps("y", ["c"], [-1], **known)]
    (pair,), counts = make_pairs(rows, PairConfig(rule="step_labels"))
    assert (pair.chosen.token_ids, pair.chosen.logps, pair.chosen.complete) == (None, None, False)
    assert (pair.rejected.token_ids, pair.rejected.logps, pair.rejected.complete) == (
        [5, 6, 7],
        [-1.0, -2.0, -3.0],
        True,
    )  # type: ignore[union-attr]
    assert counts["pairs_without_logps"] == 1


def test_public_steps_when_paired_then_contexts_with_both_signs_give_pairs(shared: Path, tmp_path: Path) -> None:
    summary = run(PairConfig(rule="step_labels"), shared / "data/prm/prm800k_steps.jsonl", tmp_path)
    pairs, refused = read_pairs(tmp_path / "pairs.parquet")
    assert (refused, summary["prompts"], summary["responses"], summary["refused"]) == ([], 108, 676, 0)
    contexts = Counter((pair.prompt_id, len(pair.chosen.step_ends or ())) for pair in pairs)
    assert (len(contexts), sum(steps == 1 for _, steps in contexts), len(pairs)) == (29, 27, 67)
    assert {(pair.chosen.step_labels or [0])[-1] for pair in pairs} == {1}
    assert {(pair.rejected.step_labels or [0])[-1] for pair in pairs if pair.rejected} == {-1}
    with pytest.raises(DataError, match="labels of steps: set rule to one of step_labels"):
        run(PairConfig(), shared / "data/prm/prm800k_steps.jsonl", tmp_path)
