"""What is measured of a round, on numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from regretless.data.columns import Response, Verdict
from regretless.rounds.measure import of_responses, of_training, reason_to_stop
from regretless.rounds.round_settings import RoundsConfig, StopConfig, seed_of
from regretless.rounds.writer import kl


def response(prompt: str, verdict: Verdict, logps: list[float], sampled: list[float] | None = None) -> Response:
    ids = list(range(len(logps)))
    return Response(
        prompt_id=prompt, response_id=f"{prompt}-{verdict}", prompt=prompt, response="x", token_ids=ids, logps=logps,
        logps_kind="raw", sampled_logps=sampled, verdict=verdict, finish_reason="length" if len(ids) > 2 else "stop",
    )  # fmt: skip


ROWS = [
    response("a", Verdict.CORRECT, [-1.0, -1.0], [-0.5, -0.5]),
    response("a", Verdict.WRONG, [-2.0], [-1.0]),
    response("b", Verdict.WRONG, [-1.0, -1.0, -1.0]),
    response("b", Verdict.UNKNOWN, [-4.0]),
]


def test_measures_of_responses_when_computed_then_they_are_those_worked_out_by_hand() -> None:
    measures = of_responses(ROWS)
    # Entropy: of the drawn distribution where it is recorded: (1 + 1 + 3 + 4) nats of 7 tokens.
    expected = {"pass_at_1": 1 / 4, "both_verdicts": 1 / 2, "tokens": 7 / 4, "entropy": 9 / 7}
    assert {name: measures[name]["value"] for name in expected} == pytest.approx(expected)
    assert (measures["responses"], measures["prompts"], measures["cut"]) == (4, 2, 1 / 4)
    assert measures["both_verdicts"]["n"] == 2 and "score" not in measures


def test_divergence_and_weights_when_two_models_scored_the_responses_then_they_are_those_worked_out_by_hand() -> None:
    # log μ of the drawn distribution: -1, -1, -3, -4.
    assert kl(ROWS, [-2.0, -1.0, -5.0, -4.0])["value"] == pytest.approx(3 / 4)
    assert kl(ROWS, None)["value"] == 0
    # Weights 1, 1, 1, 3: (1 + 1 + 1 + 3)² / (1 + 1 + 1 + 9) / 4 = 3 / 4.
    moved = of_training(ROWS, [-1.0, -1.0, -3.0, -4.0 + math.log(3)])
    assert moved["effective_share"] == pytest.approx(3 / 4)
    assert moved["kl_of_round"]["value"] == pytest.approx(-math.log(3) / 4)
    far = of_training(ROWS, [-1.0, -1.0, -3.0, 2000.0])
    assert far["effective_share"] == pytest.approx(1 / 4), "no overflow"


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({}, None),
        ({"kl": 2.0, "length": 2.0}, None),
        ({"kl": 1.9}, "the KL divergence of round 2's writer to the start is 2 nats, above 1.9"),
        ({"length": 1.4}, "responses of round 2 have 15 tokens, above 1.4 times the first round's 10"),
    ],
)
def test_rounds_when_a_bound_is_exceeded_then_they_end_with_the_reason(
    stop: dict[str, float], said: str | None
) -> None:
    measures = [
        {"kl_to_start": {"value": divergence}, "tokens": {"value": tokens}}
        for divergence, tokens in ((0.0, 10.0), (2.0, 15.0))
    ]
    assert reason_to_stop(StopConfig(**stop), measures[:1]) is None
    assert reason_to_stop(StopConfig(**stop), measures) == said


def interval(value: float, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


@pytest.mark.parametrize(
    ("old", "new", "low"),
    [
        # The gain minus the root of the squares of 0.03 and 0.04.
        (interval(0.4, 0.3, 0.44), interval(0.46, 0.43, 0.6), None),
        (interval(0.4, 0.3, 0.44), interval(0.44, 0.41, 0.6), "-0.01)"),
        (interval(0.4, 0.3, 0.44), interval(0.3, 0.27, 0.4), "-0.15)"),
        (interval(0.4, None, None), interval(0.9, 0.8, 1.0), "-inf)"),
    ],
    ids=["gain", "may be none", "loss", "one prompt"],
)
@pytest.mark.parametrize("name", ["pass_at_1", "score"])
def test_rounds_when_the_gain_may_be_none_then_they_end(
    name: str, old: dict[str, Any], new: dict[str, Any], low: str | None
) -> None:
    rest = {"kl_to_start": {"value": 0.0}, "tokens": {"value": 10.0}}
    measures = [{**rest, name: old}, {**rest, name: new}]
    assert reason_to_stop(StopConfig(gain=True), measures[:1]) is None
    assert reason_to_stop(StopConfig(), measures) is None and not StopConfig().is_set
    said = reason_to_stop(StopConfig(gain=True), measures)
    assert said is None if low is None else str(said).endswith(f"(95 % interval from {low}"), said


def test_stop_without_a_gain_when_prompts_were_trained_on_then_it_is_refused() -> None:
    RoundsConfig(count=2, prompts=5, stop=StopConfig(gain=True))
    with pytest.raises(ValueError, match=r"stop\.gain: with prompts=all"):
        RoundsConfig(count=2, prompts="all", stop=StopConfig(gain=True))


def test_seeds_when_rounds_differ_then_so_do_they_and_the_first_is_the_recipes() -> None:
    seeds = [seed_of(seed, number) for seed in (0, 1) for number in range(1, 9)]
    assert seeds[0] == 0 and seeds[8] == 1 and len(set(seeds)) == 16 and max(seeds) < 2**32
