"""The rules that select which two responses to a prompt form a pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, pairwise, product
from random import Random
from statistics import NormalDist, fmean, pstdev
from typing import NamedTuple

from regretless.core.plugins import Registry
from regretless.data.columns import OF_TOKENS, Response, Verdict
from regretless.data.steps import first_steps

Chosen = list[tuple[Response, Response]]
"""Pairs as (chosen, rejected)."""
CLOSE, UNCONFIRMED, UNEQUAL, SMALL_MARGIN = "close", "unconfirmed", "unequal_units", "small_margin"
EQUAL = 1e-9
"""Scores that differ by no more are equal: means of the same numbers may differ by rounding."""


class Limits(NamedTuple):
    """Settings of rules that pair by estimates."""

    smallest_gap: float
    """Least difference of two estimates, in standard errors."""
    allow_unequal: bool
    """Whether responses with different numbers of units may be compared."""
    label_temperature: float
    """Difference of two estimates, in their unit, at which a preference has the odds e : 1; 0: any is certain."""


@dataclass(frozen=True, kw_only=True)
class Unit(Response):
    """One unit of a response, behind a context: the response up to the unit's end, of which the first tokens are the
    context and those behind the end how its writer went on."""

    prefix_tokens: int
    """Tokens of the context; 0 for the first unit."""
    cut_at: int | None
    """Tokens at the unit's end; None for the last unit."""
    q_halves: tuple[float, float]
    """Q^μ from each half of the continuations."""
    q_error: float
    """Posterior standard deviation of Q^μ from all of them."""


@dataclass(frozen=True, kw_only=True)
class Step(Response):
    """A response up to the end of one of its steps, which is a beginning: nobody says that a response ends there."""


@dataclass(frozen=True)
class Rule:
    """Which responses can be paired, and which pairs the responses of a prompt form."""

    unusable: Callable[[Response], str | None]
    """Why a response cannot be paired, or None."""
    select: Callable[[Sequence[Response], int, int, Random], Chosen | str]
    """Pairs from the usable, distinct responses to one prompt, or the reason why there are none.

    Arguments: the responses, in an order that does not depend on the file's order; the most correct and the most wrong
    responses to use; the prompt's own random generator.
    """
    compare: Callable[[Sequence[Response]], Sequence[Response]] = list
    """All responses to one prompt, with scores that come from comparing them, before equal texts are merged."""
    doubt: Callable[[Response, Response, Limits], str | None] | None = None
    """Why a selected pair (chosen, rejected) is dropped after all, or None: for scores that are estimates. `CLOSE`: a
    gap below `smallest_gap` standard errors; `UNCONFIRMED`: data that selection has not seen say the opposite;
    `UNEQUAL`: numbers of units that are not compared. Of the pairs that are left, a prompt keeps as many at random as
    `correct_vs_wrong` makes."""
    probability: Callable[[Response, Response, Limits], float] | None = None
    """`Pair.preference_probability` of a pair (chosen, rejected)."""


def _undecided(response: Response) -> str | None:
    return None if response.verdict in (Verdict.CORRECT, Verdict.WRONG) else "verdict_unknown"


def _undecided_or_unlabeled(response: Response) -> str | None:
    return _undecided(response) or (None if response.logps else "without_logps")


def _unscored(response: Response) -> str | None:
    return "without_score" if response.score is None else None


def _unjudged(response: Response) -> str | None:
    if response.score is not None:
        return None
    return "without_score" if response.verdict is None else _undecided(response)


def _sides(responses: Sequence[Response]) -> tuple[list[Response], list[Response]]:
    return (
        [response for response in responses if response.verdict is Verdict.CORRECT],
        [response for response in responses if response.verdict is Verdict.WRONG],
    )


def _combine(correct: Sequence[Response], wrong: Sequence[Response]) -> Chosen | str:
    if not correct or not wrong:
        return "only_correct" if correct else "only_wrong"
    return list(product(correct, wrong))


def correct_vs_wrong(responses: Sequence[Response], most_correct: int, most_wrong: int, random: Random) -> Chosen | str:
    """Up to that many correct and wrong responses at random, all combinations (paper, appendix on data)."""
    correct, wrong = _sides(responses)
    return _combine(
        random.sample(correct, min(most_correct, len(correct))), random.sample(wrong, min(most_wrong, len(wrong)))
    )


def most_likely(responses: Sequence[Response], most_correct: int, most_wrong: int, _random: Random) -> Chosen | str:
    """The likeliest correct and wrong responses, all combinations (the authors' released code).

    Likelihood is the mean log-probability per token under the behavior policy, which does not favor short responses.
    """
    correct, wrong = _sides(responses)
    return _combine(_likeliest(correct)[:most_correct], _likeliest(wrong)[:most_wrong])


def _likeliest(responses: Sequence[Response]) -> list[Response]:
    return sorted(responses, key=lambda response: -fmean(response.logps or ()))


def best_vs_random(responses: Sequence[Response], _correct: int, _wrong: int, random: Random) -> Chosen | str:
    """The best-scored response (ties at random) against a random one with a lower score (paper, appendix)."""
    scored = [(response, response.score) for response in responses if response.score is not None]
    if len(scored) < 2:
        return "single_response"
    highest = max(score for _, score in scored)
    best = [response for response, score in scored if math.isclose(score, highest, rel_tol=EQUAL)]
    lower = [response for response, score in scored if not math.isclose(score, highest, rel_tol=EQUAL)]
    return [(random.choice(best), random.choice(lower))] if lower else "equal_scores"


def _quality(response: Response) -> float | None:
    """The score; without one, 1 for a correct response, 0 for a wrong one, and None if its verdict is unknown."""
    if response.score is not None or _undecided(response):
        return response.score
    return float(response.verdict is Verdict.CORRECT)


def _above_writer(responses: Sequence[Response]) -> list[Response]:
    """Scored by quality minus its mean over all responses of the same writer to the prompt: an advantage.

    It is no regret: for a response of one quality it prefers the weaker writer, and regret the abler one, which wastes
    less of what the response has reached (docs/theory.md).
    """
    means = _means(responses, lambda response: response.model or "")
    return [
        response if (quality := _quality(response)) is None else replace(response, score=quality - mean)
        for response, mean in zip(responses, means, strict=True)
    ]


def _rloo(responses: Sequence[Response]) -> Sequence[Response]:
    """Scored by quality minus the mean of the other responses to the prompt (arXiv:2606.09124, appendix C)."""
    return _normalized(responses, lambda own, all_of_them: own - (sum(all_of_them) - own) / (len(all_of_them) - 1))


def _grpo(responses: Sequence[Response]) -> Sequence[Response]:
    """Scored by quality minus the mean of all responses to the prompt, divided by their standard deviation (as above).

    The deviation is that of the responses themselves, not an estimate for more of them.
    """
    return _normalized(responses, lambda own, all_of_them: (own - fmean(all_of_them)) / pstdev(all_of_them))


def _normalized(responses: Sequence[Response], score: Callable[[float, Sequence[float]], float]) -> Sequence[Response]:
    """Responses scored by their quality among those of all; unchanged where all have one quality, or there is one."""
    qualities = [quality for response in responses if (quality := _quality(response)) is not None]
    if len(set(qualities)) < 2:
        return responses
    return [
        response if (quality := _quality(response)) is None else replace(response, score=score(quality, qualities))
        for response in responses
    ]


def _value_of_start(responses: Sequence[Response]) -> list[Response]:
    """Scored by the mean quality of all responses that begin with the same line: what this start usually leads to."""
    means = _means(responses, lambda response: response.response.partition("\n")[0])
    return [
        response if _quality(response) is None else replace(response, score=mean)
        for response, mean in zip(responses, means, strict=True)
    ]


def _means(responses: Sequence[Response], key: Callable[[Response], str]) -> list[float]:
    """For each response, the mean quality of those that have its key; 0 where none has a quality."""
    of_key: dict[str, list[float]] = {}
    for response in responses:
        if (quality := _quality(response)) is not None:
            of_key.setdefault(key(response), []).append(quality)
    return [fmean(of_key.get(key(response), [0.0])) for response in responses]


def higher_score(responses: Sequence[Response], most_correct: int, most_wrong: int, random: Random) -> Chosen | str:
    """Random responses, as many as there may be correct and wrong ones; each against every one with a lower score.

    At most as many pairs as `correct_vs_wrong` makes.
    """
    if len(responses) < 2:
        return "single_response"
    drawn = random.sample(list(responses), min(most_correct + most_wrong, len(responses)))
    ranked = sorted(drawn, key=lambda response: -(response.score or 0.0))
    pairs = [
        (better, worse)
        for better, worse in combinations(ranked, 2)
        if (better.score or 0.0) - (worse.score or 0.0) > EQUAL
    ]
    return random.sample(pairs, min(most_correct * most_wrong, len(pairs))) if pairs else "equal_scores"


def _unmeasured(response: Response) -> str | None:
    measured = (response.regret_error, response.regret_halves, response.unit_ends)
    return "without_regret" if any(value is None for value in measured) else None


def _without_unit_values(response: Response) -> str | None:
    ends, characters, error = response.unit_ends, response.unit_characters, response.unit_q_error
    halves = response.unit_q_halves
    if not ends or not characters or not halves or not error or not response.token_ids:
        return "without_regret"
    lengths = {len(ends), len(characters), len(error), *map(len, halves)}
    return None if len(lengths) == 1 and ends[-1] == len(response.token_ids) else "units_do_not_fit_its_tokens"


def _value(response: Response, half: int) -> float:
    """What is estimated of a response, or of a unit, by half of the continuations; higher is better."""
    if isinstance(response, Unit):
        return response.q_halves[half]
    assert response.regret_halves is not None  # _unmeasured
    return -response.regret_halves[half]


def siblings(first: Response, second: Response) -> tuple[Unit, Unit] | None:
    """The units with which two responses part, behind the context that they share; None if there are none with a text.

    Their contexts have the same V*, so that the difference of their regrets is that of their Q^μ.
    """
    both = [(response.token_ids or [], response.unit_ends or []) for response in (first, second)]
    (ids, ends), (other_ids, other_ends) = both
    for number, (end, other_end) in enumerate(zip(ends, other_ends, strict=False)):
        if ids[:end] == other_ids[:other_end]:
            continue
        # Where the units end at different places, one may be the beginning of the other one.
        if ids[: min(end, other_end)] == other_ids[: min(end, other_end)]:
            return None
        units = _unit(first, number), _unit(second, number)
        # A response that begins with white space alone is none to readers.
        return units if all(unit.response.strip() for unit in units) else None
    return None


def _unit(response: Response, number: int) -> Unit:
    ends, characters = response.unit_ends or [], response.unit_characters or []
    halves, errors = response.unit_q_halves or [], response.unit_q_error or []
    is_last = number == len(ends) - 1
    whole = {item.name: getattr(response, item.name) for item in fields(Response)}
    changes = {
        "response_id": f"{response.response_id}:{number + 1}",
        "response": response.response if is_last else response.response[: characters[number]],
    }
    return Unit(
        **{**whole, **changes},
        prefix_tokens=ends[number - 1] if number else 0,
        cut_at=None if is_last else ends[number],
        q_halves=(halves[0][number], halves[1][number]),
        q_error=errors[number],
    )


def sibling_regret(responses: Sequence[Response], most_correct: int, most_wrong: int, random: Random) -> Chosen | str:
    """Units behind one context, of random responses, as many as there may be correct and wrong ones: the one with less
    regret against the one with more.

    The order is that of every second continuation; the others confirm it (`doubt_of_regret`).
    """
    if len(responses) < 2:
        return "single_response"
    drawn = random.sample(list(responses), min(most_correct + most_wrong, len(responses)))
    units = [pair for both in combinations(drawn, 2) if (pair := siblings(*both)) is not None]
    return _ordered(units) if units else "no_siblings"


def response_regret(responses: Sequence[Response], most_correct: int, most_wrong: int, random: Random) -> Chosen | str:
    """Random responses, as many as there may be correct and wrong ones; each against every one with more regret.

    The order is that of every second continuation; the others confirm it (`doubt_of_regret`).
    """
    if len(responses) < 2:
        return "single_response"
    drawn = random.sample(list(responses), min(most_correct + most_wrong, len(responses)))
    return _ordered(list(combinations(drawn, 2)))


def _without_step_labels(response: Response) -> str | None:
    return None if response.step_ends and response.step_labels else "without_step_labels"


def _steps_of(response: Response) -> list[tuple[str, str]]:
    """Each step with the context before it, as texts; white space behind either belongs to the next step."""
    ends = [0, *(response.step_ends or ())]
    beginnings = [response.response[:end].rstrip() for end in ends]
    return list(pairwise(beginnings))


def _agreed_labels(responses: Sequence[Response]) -> list[Response]:
    """Responses without the labels of steps that have another one elsewhere, behind the same context."""
    labels: dict[str, set[int | None]] = {}
    for response in responses:
        for (_, step), label in zip(_steps_of(response), response.step_labels or (), strict=False):
            labels.setdefault(step, set()).add(label)
    agreed = {step: next(iter(of_step - {None})) for step, of_step in labels.items() if len(of_step - {None}) == 1}
    return [
        response
        if response.step_labels is None
        else replace(response, step_labels=[agreed.get(step) for _, step in _steps_of(response)])
        for response in responses
    ]


def step_labels(responses: Sequence[Response], most_correct: int, most_wrong: int, random: Random) -> Chosen | str:
    """Steps behind one context, each good one against each bad one, up to that many of each at random."""
    contexts: dict[str, dict[int, dict[str, tuple[Response, int]]]] = {}
    for response in responses:
        for number, ((context, step), label) in enumerate(
            zip(_steps_of(response), response.step_labels or (), strict=True)
        ):
            if label:
                contexts.setdefault(context, {1: {}, -1: {}})[label].setdefault(step, (response, number))
    pairs: Chosen = []
    for of_context in contexts.values():
        good, bad = (
            random.sample(list(of_context[label].values()), min(most, len(of_context[label])))
            for label, most in ((1, most_correct), (-1, most_wrong))
        )
        pairs += product((_step(*one) for one in good), [_step(*one) for one in bad])
    return pairs or "no_siblings"


def _step(response: Response, number: int) -> Response:
    """A response up to the end of a step; its tokens are kept if it ends there."""
    ends = response.step_ends or []
    is_last = number == len(ends) - 1
    if is_last and response.finish_reason is not None:
        return response
    text = response.response[: ends[number]].rstrip()
    whole = {item.name: getattr(response, item.name) for item in fields(Response)}
    tokens = {} if is_last else dict.fromkeys((*OF_TOKENS, "sampled_logps"))
    changes = {
        "response_id": f"{response.response_id}:{number + 1}",
        "response": text,
        "score": None,
        "finish_reason": None,
    }
    steps = first_steps([*ends[:number], len(text)], response.step_labels, len(text))
    return Step(**{**whole, **tokens, **changes, **steps})


def _ordered(both: Sequence[tuple[Response, Response]]) -> Chosen | str:
    """Pairs, the better one first; or why there are none."""
    ordered = [sorted(pair, key=lambda response: -_value(response, 0)) for pair in both]
    apart = [(better, worse) for better, worse in ordered if _value(better, 0) - _value(worse, 0) > EQUAL]
    return apart or "equal_regret"


def doubt_of_regret(chosen: Response, rejected: Response, limits: Limits) -> str | None:
    """Whether half of the continuations separate two responses or units, and the other half agrees.

    The regret of whole responses grows with their number of units.
    """
    are_whole = not isinstance(chosen, Unit)
    if are_whole and not limits.allow_unequal and len(chosen.unit_ends or ()) != len(rejected.unit_ends or ()):
        return UNEQUAL
    # Half of the continuations: twice the variance.
    error = math.sqrt(2) * _error(chosen, rejected)
    selecting, confirming = (_value(chosen, half) - _value(rejected, half) for half in (0, 1))
    if selecting < limits.smallest_gap * error:
        return CLOSE
    return None if confirming > 0 else UNCONFIRMED


def probability_by_regret(chosen: Response, rejected: Response, limits: Limits) -> float:
    """E[σ(gap / τ)] over a normal posterior of the gap of two regrets, from all continuations; P(gap > 0) at τ = 0."""
    mean = fmean(_value(chosen, half) - _value(rejected, half) for half in (0, 1))
    gap = NormalDist(mean, max(_error(chosen, rejected), EQUAL))
    if not (temperature := limits.label_temperature):
        return 1 - gap.cdf(0)
    return fmean(_sigmoid(value / temperature) for value in gap.quantiles(200))


def probability_by_score(chosen: Response, rejected: Response, limits: Limits) -> float:
    """σ(gap / τ) of two scores; 1 at τ = 0."""
    gap = (chosen.score or 0.0) - (rejected.score or 0.0)
    return _sigmoid(gap / limits.label_temperature) if limits.label_temperature else 1.0


def _sigmoid(value: float) -> float:
    return (1 + math.tanh(value / 2)) / 2  # without overflow


def _error(*both: Response) -> float:
    """Posterior standard deviation of the difference of two regrets, or of the Q^μ of two units."""
    return math.hypot(*(one.q_error if isinstance(one, Unit) else one.regret_error or 0.0 for one in both))


RULES: Registry[Rule] = Registry(
    "rules",
    {
        "correct_vs_wrong": Rule(_undecided, correct_vs_wrong),
        "most_likely": Rule(_undecided_or_unlabeled, most_likely),
        "best_vs_random": Rule(_unscored, best_vs_random),
        "above_writer": Rule(_unjudged, higher_score, _above_writer),
        "best_start": Rule(_unjudged, higher_score, _value_of_start),
        "rloo": Rule(_unjudged, higher_score, _rloo, probability=probability_by_score),
        "grpo": Rule(_unjudged, higher_score, _grpo, probability=probability_by_score),
        "regret": Rule(_without_unit_values, sibling_regret, doubt=doubt_of_regret, probability=probability_by_regret),
        "response_regret": Rule(_unmeasured, response_regret, doubt=doubt_of_regret, probability=probability_by_regret),
        "step_labels": Rule(_without_step_labels, step_labels, _agreed_labels),
    },
    lambda _, part: None if isinstance(part, Rule) else f"expected a Rule, got {part!r}",
    {
        "least_regret": "the rule of this name is now above_writer: its score, quality minus the writer's mean, is an "
        "advantage, and orders writers the other way round from regret; above_writer makes the same pairs"
    },
)
"""Allowed values of `pair.rule`."""
