"""Numbers with their uncertainty: shares, means over seeds, and paired differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from scipy import stats

LEVEL = 0.95


class Interval(NamedTuple):
    """A 95 % confidence interval; NaN at both ends when there is nothing to tell it from."""

    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan)


class SeedSummary(NamedTuple):
    """Mean over seeds, sample standard deviation and t-interval of the mean; NaN for the last two with one seed."""

    n: int
    mean: float
    sd: float
    interval: Interval


class PairedDifference(NamedTuple):
    """Difference of two shares on the same problems."""

    n: int
    mean: float
    interval: Interval
    p_value: float
    """Exact McNemar test: how likely so uneven a split of the problems on which the two differ is by chance."""


def wilson(successes: int, n: int) -> Interval:
    """Wilson score interval of a share; sound near 0 and 1 too, where mean ± 1.96 standard errors is not.

    Raises ValueError for counts that are no share.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return UNKNOWN
    found = stats.binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return Interval(float(found.low), float(found.high))


def over_seeds(values: Sequence[float]) -> SeedSummary:
    """Summary of one value a seed (paper, appendix on multi-seed evaluation). Raises ValueError without any value."""
    if not values:
        raise ValueError("expected at least one value")
    sd = stdev(values) if len(values) > 1 else math.nan
    return SeedSummary(len(values), mean(values), sd, t_interval(mean(values), sd, len(values)))


def t_interval(center: float, sd: float, n: int) -> Interval:
    """Interval of the mean of `n` normal values with this mean and sample standard deviation."""
    if n < 2 or math.isnan(sd):
        return UNKNOWN
    reach = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * sd / math.sqrt(n)
    return Interval(center - reach, center + reach)


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> PairedDifference:
    """How much more often `second` is right than `first`, problem by problem.

    The interval is Newcombe's hybrid score interval for paired shares (Statistics in Medicine 17, 1998, method 10): the
    two Wilson intervals, joined through the correlation of the models' successes. Only the problems on which the two
    differ speak, so it is tighter than that of independent shares, and where they never differ it is not of width 0,
    as mean ± t standard errors would be. Raises ValueError for unequal lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"expected the same problems on both sides, got {len(first)} and {len(second)}")
    n = len(first)
    if n == 0:
        return PairedDifference(0, math.nan, UNKNOWN, math.nan)
    counts = Counter(zip(map(bool, first), map(bool, second), strict=True))
    both, gained, lost, neither = (counts[key] for key in ((True, True), (False, True), (True, False), (False, False)))
    before, after = (both + lost) / n, (both + gained) / n
    old, new = wilson(both + lost, n), wilson(both + gained, n)
    correlation = _correlation(both, gained, lost, neither)
    below = _reach(after - new.low, old.high - before, correlation)
    above = _reach(new.high - after, before - old.low, correlation)
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return PairedDifference(n, after - before, Interval(after - before - below, after - before + above), p_value)


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    """Correlation of two models' successes, with the continuity correction of Newcombe's method 10."""
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess = float(both * neither - gained * lost)
    if excess > 0:
        excess = max(excess - (both + gained + lost + neither) / 2, 0.0)
    return excess / math.sqrt(margins) if margins else 0.0


def _reach(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(one**2 - 2 * correlation * one * other + other**2, 0.0))
