"""Intervals against published and textbook values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from regretless.core.intervals import (
    Array,
    PairedDifference,
    difference,
    difference_over_seeds,
    from_samples,
    holm,
    over_seeds,
    paired_difference,
    t_interval,
    wilson,
)


def test_t_interval_when_given_the_papers_gsm8k_row_then_it_is_the_papers() -> None:
    low, high = t_interval(76.09, 0.88, 5)
    assert (round(low, 2), round(high, 2)) == (75.00, 77.18)


def test_over_seeds_when_there_is_one_value_then_its_spread_is_unknown_not_zero() -> None:
    found = over_seeds([0.5])
    assert found.mean == 0.5
    assert math.isnan(found.sd)
    assert all(math.isnan(bound) for bound in found.interval)
    two = over_seeds([0.4, 0.6])
    assert two.sd == pytest.approx(0.1414214)
    assert two.interval.high == pytest.approx(0.5 + 12.7062 * 0.1, rel=1e-4)


def test_wilson_when_all_or_none_are_right_then_the_interval_stays_inside_zero_and_one() -> None:
    # Textbook: n = 10, all right, z = 1.96: lower bound n / (n + z²).
    assert wilson(10, 10) == pytest.approx((10 / (10 + 1.959964**2), 1.0))
    assert wilson(0, 10) == pytest.approx((0.0, 1 - 10 / (10 + 1.959964**2)))
    assert all(math.isnan(bound) for bound in wilson(0, 0))
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def of_counts(both: int, gained: int, lost: int, neither: int) -> PairedDifference:
    first = [True] * both + [False] * gained + [True] * lost + [False] * neither
    second = [True] * (both + gained) + [False] * (lost + neither)
    return paired_difference(first, second)


def test_paired_difference_when_given_newcombes_example_then_the_interval_is_his() -> None:
    # Newcombe 1998: 36 solved by both, 12 and 2 by one, method 10.
    found = of_counts(both=36, gained=12, lost=2, neither=0)
    assert found.mean == pytest.approx(0.2)
    assert (round(found.interval.low, 4), round(found.interval.high, 4)) == (0.0569, 0.3404)
    assert found.p_value == pytest.approx(2 * sum(math.comb(14, k) for k in range(3)) / 2**14)
    with pytest.raises(ValueError, match="50 and 1"):
        paired_difference([True] * 50, [True])


def test_paired_difference_when_models_never_differ_then_the_interval_is_not_a_point() -> None:
    found = of_counts(both=30, gained=0, lost=0, neither=10)
    assert (found.mean, found.p_value) == (0.0, 1.0)
    assert -0.1 < found.interval.low < 0.0 < found.interval.high < 0.1
    assert math.isnan(of_counts(0, 0, 0, 0).interval.low)


@pytest.mark.parametrize(("n", "shares"), [(40, (0.3, 0.2, 0.1, 0.4)), (272, (0.10, 0.05, 0.02, 0.83))])
def test_paired_difference_when_drawn_often_then_nineteen_of_twenty_intervals_hold_the_truth(
    n: int, shares: tuple[float, ...]
) -> None:
    draws = np.random.default_rng(0).multinomial(n, shares, size=400)
    intervals = [of_counts(*draw).interval for draw in draws]
    covered = sum(low <= shares[1] - shares[2] <= high for low, high in intervals) / len(intervals)
    assert 0.92 <= covered <= 0.99


def test_holm_when_given_textbook_p_values_then_they_are_adjusted_step_by_step() -> None:
    # By hand: 4 x 0.005, 3 x 0.01, 2 x 0.03, and 1 x 0.04, which may not be below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # R: p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.05), "holm")
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([]) == []
    with pytest.raises(ValueError, match="expected probabilities"):
        holm([0.1, math.nan])


def test_holm_when_nothing_differs_then_one_family_in_twenty_has_a_finding() -> None:
    draws = np.random.default_rng(0).uniform(size=(2000, 10))
    assert np.mean([min(holm(list(family))) < 0.05 for family in draws]) == pytest.approx(0.05, abs=0.012)


def test_difference_over_seeds_when_given_seeds_then_it_is_the_paired_t_test() -> None:
    first, second = [0.52, 0.49, 0.55, 0.50], [0.55, 0.55, 0.56, 0.51]
    found, expected = difference_over_seeds(first, second), stats.ttest_rel(second, first)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert tuple(found.interval) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    with pytest.raises(ValueError, match="shorter"):
        difference_over_seeds([0.1, 0.2], [0.1])


def test_difference_over_seeds_when_it_does_not_vary_then_its_uncertainty_is_unknown() -> None:
    # 0.3 - 0.2 and 0.8 - 0.7 differ in the last bit: a t-test would find p = 1e-15.
    found = difference_over_seeds([0.2, 0.7], [0.3, 0.8])
    assert found.mean == pytest.approx(0.1)
    assert math.isnan(found.p_value) and math.isnan(found.interval.low)
    assert math.isnan(difference_over_seeds([0.2], [0.3]).p_value)
    assert difference_over_seeds([0.2, 0.7], [0.2, 0.7]).p_value == 1.0


def test_p_value_of_an_estimate_when_values_are_paired_then_it_is_that_of_the_t_test() -> None:
    first, second = [2.0, 5.0, 6.0, 3.0], [4.0, 6.0, 6.0, 7.0]
    sums = [{str(key): (value, 1.0) for key, value in enumerate(values)} for values in (first, second)]
    assert difference(*sums).p_value == pytest.approx(stats.ttest_rel(second, first).pvalue)
    assert math.isnan(difference({"a": (1.0, 1.0)}, {"a": (2.0, 1.0)}).p_value)


@pytest.mark.parametrize("samples", [np.full(100, 50.0), np.array([])])
def test_estimate_from_samples_when_none_differ_then_its_uncertainty_is_unknown(samples: Array) -> None:
    found = from_samples(50.0, 20, samples)
    assert (found.value, found.n) == (50.0, 20)
    assert all(math.isnan(number) for number in (found.standard_error, *found.interval))
    varied = from_samples(50.0, 20, np.array([49.0, 51.0]))
    assert (varied.standard_error, varied.interval) == (pytest.approx(math.sqrt(2)), pytest.approx((49.05, 50.95)))
