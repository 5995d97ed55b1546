"""Values by hand, and what is refused. Against exact trees: tests/experiments/theory/test_regret_meets_theory.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regretless.core.regret_values import (
    Counts,
    Posterior,
    best_value,
    best_value_of_returns,
    estimated_best_value,
    rate_interval,
    split,
    waste_error,
    writer_value,
)


@pytest.mark.parametrize("alpha", [1.0, 0.1, 0.01, 0.001])
def test_best_value_when_returns_are_0_or_1_then_it_is_that_of_their_share(alpha: float) -> None:
    rates = np.array([0.0, 0.25, 1.0])
    found = best_value(rates, alpha)
    # log(1 + ¼ (e^{1/α} − 1)) without overflow: at α = 0.001, e^{1000}.
    middle = alpha * (math.log(0.25) + 1 / alpha + math.log1p(3 * math.exp(-1 / alpha)))
    assert found.tolist() == pytest.approx([0, middle, 1], abs=1e-12)
    returns = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert [best_value_of_returns(row, alpha) for row in returns] == pytest.approx(found.tolist(), abs=1e-12)


def test_best_value_when_returns_are_graded_then_it_is_the_log_of_their_mean_exponential() -> None:
    assert best_value_of_returns([0.2, 0.8], 0.5) == pytest.approx(0.5 * math.log((math.exp(0.4) + math.exp(1.6)) / 2))


def test_split_by_hand_then_local_and_future_add_up_and_telescope() -> None:
    best, writer = [0.6, 0.7, 0.9, 1.0], [0.4, 0.45, 0.8, 1.0]
    found = split(best, writer)
    assert found.local.tolist() == pytest.approx([-0.1, -0.2, -0.1])
    assert found.future.tolist() == pytest.approx([0.25, 0.1, 0])
    assert found.regret.tolist() == pytest.approx([0.15, -0.1, -0.1])
    assert found.waste == pytest.approx(0.35)
    assert found.regret.sum() == pytest.approx(best[0] - 1.0 + found.waste)
    assert writer_value(0.5, 2.0, 0.1) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: best_value(0.5, 0.0), "alpha > 0, got 0"),
        (lambda: best_value_of_returns([1.0], math.nan), "alpha > 0, got nan"),
        (lambda: writer_value(0.5, 1.0, -1.0), "alpha > 0, got -1"),
        (lambda: best_value([0.5, 1.5], 1.0), r"from 0 to 1, got 0\.5 to 1\.5"),
        (lambda: best_value(math.nan, 1.0), "from 0 to 1, got nan"),
        (lambda: best_value_of_returns([], 1.0), "one return or more, got none"),
        (lambda: split([0.5, 1.0], [0.5, 0.0]), "the return as the last of both"),
        (lambda: split([1.0], [1.0]), "two contexts or more"),
        (lambda: Counts(5, 4), "got 5 of 4"),
        (lambda: Counts(0, 0), "got 0 of 0"),
    ],
)
def test_values_when_asked_for_what_is_not_defined_then_refused(call: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()  # type: ignore[operator]


def test_intervals_after_none_or_all_of_k_then_one_end_is_open() -> None:
    none, all_, some = Counts(0, 16), Counts(16, 16), Counts(4, 16)
    assert rate_interval(none) == pytest.approx((0.0, 0.1432), abs=1e-4)
    assert rate_interval(all_) == pytest.approx((0.8568, 1.0), abs=1e-4)
    assert rate_interval(some) == pytest.approx((0.0908, 0.4907), abs=1e-4)
    best = Posterior(none, np.random.default_rng(0)).best(0.1).interval()
    assert best.low == 0, "no lower bound: the draws' own lower end would be the prior's"
    assert best.high == pytest.approx(float(best_value(0.1432, 0.1)), abs=1e-3)
    # Of a difference: what is open below one quantity is open above the other.
    difference = (
        Posterior(some, np.random.default_rng(1)).best(0.1).minus(Posterior(none, np.random.default_rng(2)).best(0.1))
    )
    assert difference.interval().high == pytest.approx(float(best_value(0.4907, 0.1)), abs=1e-3)


def test_posterior_when_one_set_serves_both_values_then_their_difference_varies_less_than_with_two() -> None:
    counts = Counts(8, 16)
    shared, other = (Posterior(counts, np.random.default_rng(seed)) for seed in (0, 1))
    together, apart = (np.ptp(shared.best(1.0).minus(writer.writer(1.0)).interval()) for writer in (shared, other))
    assert (together < 0.1, apart > 0.4) == (True, True), "V*(p) − p is nearly flat in p"


@pytest.mark.parametrize("right", [0, 16])
@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_error_of_the_waste_after_none_or_all_of_k_then_it_is_not_zero(right: int, alpha: float) -> None:
    one, other = (Posterior(Counts(right, 16), np.random.default_rng(seed)) for seed in (0, 1))
    assert 0.001 < waste_error(one, one, alpha) < waste_error(one, other, alpha)


def test_posterior_when_the_divergence_is_uncertain_then_v_mu_has_its_t_interval() -> None:
    # 1e6 continuations: the rate is as good as certain.
    counts = Counts(500_000, 1_000_000, 2.0, 0.1)
    found = Posterior(counts, np.random.default_rng(0)).writer(1.0).interval()
    assert found == pytest.approx((0.5 - 2 - 0.196, 0.5 - 2 + 0.196), abs=2e-3)
    few = Posterior(Counts(2, 4, 2.0, 0.1), np.random.default_rng(0))
    assert np.quantile(few.divergences, 0.975) == pytest.approx(2 + 0.1 * 3.1824, abs=2e-3), (
        "t with 3 degrees of freedom"
    )


@pytest.mark.parametrize(
    ("alpha", "rate", "bias", "sd"),
    [
        *[(1.0, 0.05, -0.004, 0.08), (1.0, 0.12, -0.007, 0.11), (1.0, 0.25, -0.008, 0.13)],
        *[(0.1, 0.05, -0.046, 0.11), (0.1, 0.12, -0.034, 0.10), (0.1, 0.25, -0.015, 0.06)],
    ],
)
def test_estimate_of_v_star_at_16_continuations_then_its_bias_is_small_at_every_alpha(
    alpha: float, rate: float, bias: float, sd: float
) -> None:
    weights = np.array([math.comb(16, x) * rate**x * (1 - rate) ** (16 - x) for x in range(17)])
    errors = np.array([estimated_best_value(Counts(x, 16), alpha) for x in range(17)]) - best_value(rate, alpha)
    mean = weights @ errors
    assert (mean, math.sqrt(weights @ errors**2 - mean**2)) == (
        pytest.approx(bias, abs=6e-4),
        pytest.approx(sd, abs=6e-3),
    )
