"""What is read from judges' replies, and what is not."""

from __future__ import annotations

import math

import pytest

from regretless.core.intervals import ratio
from regretless.evaluation.chat.judging import bounded, means
from regretless.evaluation.chat.verdicts import FIVE_WAY, parse_label, parse_rating, two_token_preference
from regretless.servers.ask import UnreadableError


@pytest.mark.parametrize(
    ("outcomes", "low", "high"),
    [((0.5, 0.5, 0.5), None, None), ((1, 1, 0.5, 1), pytest.approx(87.5 - 3.18245 * 12.5, abs=1e-3), 100)],
)
def test_win_rate_when_questions_are_few_stays_possible_or_has_no_interval(
    outcomes: tuple[float, ...], low: float | None, high: float | None
) -> None:
    sums = {str(number): (outcome, 1.0) for number, outcome in enumerate(outcomes)}
    found = bounded(ratio(sums, 100.0), means(sums), 0, 100).shown()
    assert (found["low"], found["high"]) == (low, high)


@pytest.mark.parametrize(
    ("reply", "code", "meaning"),
    [
        ("Both are fine. [[A>>B]]", None, 2),
        ("so [[A>B]], my verdict is [[B<A]].", None, 1),
        ("[[A=B]] or [[ref 1]] [[2]]", None, 0),
        ("A says [[A>>B]] of itself.\n**Verdict c0de: [[B>A]]**", "c0de", -1),
        ("Verdict c0de: [[B>>A]]", "c0de", -2),
    ],
)
def test_label_when_the_reply_gives_one_is_read(reply: str, code: str | None, meaning: int) -> None:
    assert parse_label(reply, FIVE_WAY, code) == meaning


@pytest.mark.parametrize(
    ("reply", "code", "problem"),
    [
        ("A is better.", None, "no verdict"),
        ("[A>>B]", None, "no verdict"),
        ("[[A>B]] at first, but then [[A=B]]", None, "several verdicts"),
        ("Verdict beef: [[A>>B]]", "c0de", "no verdict"),
        ("c0de: [[A>B]], or c0de: [[B>A]]", "c0de", "several verdicts"),
    ],
)
def test_label_when_the_reply_gives_none_or_several_is_not_guessed(reply: str, code: str | None, problem: str) -> None:
    with pytest.raises(UnreadableError, match=problem):
        parse_label(reply, FIVE_WAY, code)


def test_rating_is_read_on_its_scale_only() -> None:
    assert parse_rating("Good. Rating: [[7]]") == 7
    assert parse_rating("Rating: [[8.5]], that is [[8.5/10]]. The form was [[rating]].") == 8.5
    assert parse_rating('It ends with "Rating: [[10]]".\nRating c0de: [[2]]', "c0de") == 2
    for reply, problem in {
        "Rating: [[11]]": "not on the scale",
        "Rating: [[0]]": "not on the scale",
        "Rating: 7": "no rating",
        'It ends with "Rating: [[10]]". Rating: [[2]]': "several ratings",
    }.items():
        with pytest.raises(UnreadableError, match=problem):
            parse_rating(reply)


def likely(**shares: float) -> list[tuple[str, float]]:
    """Tokens with the logarithms of their probabilities; `_` in a name stands for a space."""
    return [(name.replace("_", " "), math.log(share)) for name, share in shares.items()]


def test_two_token_preference_when_a_token_is_not_among_the_likely_ones_takes_it_for_impossible() -> None:
    top = likely(m=0.9, The=0.05)
    assert two_token_preference(top, "m", "M", 2) == 1.0
    assert two_token_preference(top, "M", "m", 2) == 0.0
    assert two_token_preference([*top, ("M", -math.inf)], "m", "M", 5) == 1.0, "listed as impossible"
    assert two_token_preference([*top, ("M", -9999.0)], "m", "M", 5) == 1.0, "as servers write it"
    assert two_token_preference(likely(m=0.3, M=0.3), "M", "m", 5) == 0.5
    assert two_token_preference([("m", -900.0), ("M", 0.0)], "m", "M", 5) == 0.0
    for nothing in (likely(The=0.9), [("m", -math.inf), ("M", -math.inf)]):
        with pytest.raises(UnreadableError, match="neither answer"):
            two_token_preference(nothing, "m", "M", 5)


@pytest.mark.parametrize(
    ("top", "share"),
    [
        (likely(_m=0.85, M=0.1, m=0.01), 0.86 / 0.96),
        (likely(_m=0.85, M=0.1), 0.85 / 0.95),
        ([*likely(m=0.6, M=0.3), *likely(m=0.02)], 0.62 / 0.92),
        ([("Ġm", math.log(0.6)), ("▁M", math.log(0.2)), ("M\n", math.log(0.1))], 0.6 / 0.9),
        (likely(m=0.3, M=0.2, I=0.2, mm=0.1, Model=0.1), 0.6),
    ],
)
def test_two_token_preference_adds_up_the_tokens_of_an_answer(top: list[tuple[str, float]], share: float) -> None:
    assert two_token_preference(top, "m", "M", 5) == pytest.approx(share)
    assert two_token_preference(top, "M", "m", 5) == pytest.approx(1 - share)


@pytest.mark.parametrize(
    ("top", "problem"),
    [
        (likely(I=0.97, Sorry=0.02, m=0.003), "^answers less likely than other tokens$"),
        (likely(m=0.3, M=0.19, I=0.4), "^answers less likely than other tokens$"),
        (likely(m=0.9), "^fewer tokens than requested, and only one answer among them$"),
        (likely(_m=0.5, m=0.4, The=0.1), "^fewer tokens than requested, and only one answer among them$"),
        ([], "^no log-probabilities of an answer$"),
    ],
)
def test_two_token_preference_when_the_tokens_do_not_tell_is_not_guessed(
    top: list[tuple[str, float]], problem: str
) -> None:
    for names in (("m", "M"), ("M", "m")):
        with pytest.raises(UnreadableError, match=problem):
            two_token_preference(top, *names, 5)
