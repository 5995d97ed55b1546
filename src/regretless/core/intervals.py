"""Estimates with their uncertainty: shares, means over seeds or clusters, and paired differences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

LEVEL = 0.95
PERCENT = 100.0


class Interval(NamedTuple):
    """A 95 % confidence interval; NaN at both ends if it cannot be estimated."""

    low: float
    high: float


UNKNOWN = Interval(math.nan, math.nan)


def within(interval: Interval, values: Sequence[float], low: float, high: float) -> Interval:
    """An interval of the mean of `values`, cut at the ends of their scale, which goes from `low` to `high`.

    It is unknown if all values are equal: they do not show how they vary, and an interval without width would claim
    certainty.
    """
    if not values or max(values) - min(values) <= ROUNDING:
        return UNKNOWN
    return Interval(min(max(interval.low, low), high), min(max(interval.high, low), high))


class SeedSummary(NamedTuple):
    """Mean over seeds, sample standard deviation and t-interval of the mean; NaN for the last two with one seed."""

    n: int
    mean: float
    sd: float
    interval: Interval


class PairedDifference(NamedTuple):
    """Difference of two models on the same `n` problems, questions or seeds, with a two-sided p-value."""

    n: int
    mean: float
    interval: Interval
    p_value: float
    """Probability, if the two do not differ, of a difference at least as large; NaN if it cannot be estimated."""


def in_percent(results: Iterable[tuple[str, str, float]]) -> set[tuple[str, str]]:
    """Tasks and metrics whose results (task, metric, value) are all between 0 and 1: these are written in percent."""
    fits: dict[tuple[str, str], bool] = {}
    for task, metric, value in results:
        fits[task, metric] = fits.get((task, metric), True) and 0 <= value <= 1
    return {key for key, share in fits.items() if share}


def wilson(successes: int, n: int) -> Interval:
    """Wilson score interval of a share; also valid near 0 and 1, where mean ± 1.96 standard errors is not.

    Raises ValueError for counts that are not a share.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return UNKNOWN
    interval = stats.binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return Interval(float(interval.low), float(interval.high))


def over_seeds(values: Sequence[float]) -> SeedSummary:
    """Summary of one value per seed (paper, appendix on multi-seed evaluation). Raises ValueError without any value."""
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
    """Difference of the share of correct answers, `second` minus `first`, paired by problem.

    The interval is Newcombe's hybrid score interval for paired shares (Statistics in Medicine 17, 1998, method 10): the
    two Wilson intervals, joined through the correlation of the models' successes. Only problems on which the two differ
    contribute, so it is tighter than that of independent shares. If they never differ, its width is not 0, unlike that
    of mean ± t standard errors. The p-value is that of the exact McNemar test: the probability by chance of so uneven a
    split of the problems on which the two differ. Raises ValueError for unequal lengths.
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


def difference_over_seeds(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Mean over seeds of `second` minus `first`, paired by seed: t-interval and paired t-test.

    Interval and p-value are NaN with one seed, and where all differences are equal: then nothing is known of how they
    vary, and only equal values throughout have the p-value 1. Raises ValueError for unequal lengths or no seed.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    spread = over_seeds(differences)
    # Differences of equal percentages may differ in the last bit, which a t-test would take for a tiny spread.
    if spread.n < 2 or spread.sd <= ROUNDING * max(map(abs, (*first, *second))):
        is_equal = spread.n > 1 and not any(abs(value) > ROUNDING for value in differences)
        return PairedDifference(spread.n, spread.mean, UNKNOWN, 1.0 if is_equal else math.nan)
    return PairedDifference(spread.n, spread.mean, spread.interval, float(stats.ttest_1samp(differences, 0.0).pvalue))


ROUNDING = 1e-12
"""Relative size of differences that come from rounding alone."""


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for all of these comparisons, in their order (Holm, Scand. J. Statist. 6, 1979).

    The share of families with any false finding stays below the level at which the adjusted values are read, whatever
    the comparisons have in common. Raises ValueError for values that are no probabilities.
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError(f"expected probabilities, got {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    """Correlation of two models' successes, with the continuity correction of Newcombe's method 10."""
    margins = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    excess = float(both * neither - gained * lost)
    if excess > 0:
        excess = max(excess - (both + gained + lost + neither) / 2, 0.0)
    return excess / math.sqrt(margins) if margins else 0.0


def _reach(first: float, second: float, correlation: float) -> float:
    return math.sqrt(max(first**2 - 2 * correlation * first * second + second**2, 0.0))


Array = npt.NDArray[np.float64]
Sums = Mapping[Any, tuple[float, float]]
"""For each cluster (a question, a prompt): the weighted sum of its values, and the sum of their weights."""


class Estimate(NamedTuple):
    """An estimate from `n` clusters; NaN if it cannot be computed."""

    value: float
    n: int
    standard_error: float
    interval: Interval

    def shown(self, **more: Any) -> dict[str, Any]:
        """As JSON values, `null` for what is unknown; `more` is added."""
        low, high = self.interval
        numbers = {"value": self.value, "standard_error": self.standard_error, "low": low, "high": high}
        return {**{key: none_if_nan(value) for key, value in numbers.items()}, "n": self.n, **more}

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the t-test that the true value is 0; NaN if it cannot be computed."""
        if self.n < 2 or not self.standard_error > 0:
            return math.nan
        return float(2 * stats.t.sf(abs(self.value) / self.standard_error, self.n - 1))


def none_if_nan(value: float) -> float | None:
    """The number, or None for NaN."""
    return None if math.isnan(value) else value


NOTHING = Estimate(math.nan, 0, math.nan, UNKNOWN)


def ratio(sums: Sums, scale: float = 1.0) -> Estimate:
    """Weighted mean over all values, times `scale`, with the standard error of a ratio of sums over clusters.

    Values of one cluster (judgments of a question, tokens of the responses to a prompt) depend on each other: with n
    clusters of sums y and weights x, and the mean R, the error is √(n/(n−1) Σ (y − R x)²) / Σ x. With one value of
    weight 1 in each cluster it is the usual one, sd / √n. The interval is the t-interval with n − 1 degrees of freedom.
    """
    return _from_residuals(len(sums), _mean(sums), _residuals(sums, list(sums)), scale) if sums else NOTHING


def difference(first: Sums, second: Sums, scale: float = 1.0) -> Estimate:
    """Difference of the weighted means, `second` minus `first`, on the clusters that both have.

    Paired by cluster: the difficulty of a question, which both share, does not count as uncertainty.
    """
    common = [key for key in first if key in second]
    if not common:
        return NOTHING
    first, second = ({key: sums[key] for key in common} for sums in (first, second))
    residuals = _residuals(second, common) - _residuals(first, common)
    return _from_residuals(len(common), _mean(second) - _mean(first), residuals, scale)


def _mean(sums: Sums) -> float:
    return sum(total for total, _ in sums.values()) / sum(weight for _, weight in sums.values())


def _residuals(sums: Sums, keys: list[str]) -> Array:
    """Influence of each cluster on the mean, to first order."""
    totals, weights = np.array([sums[key] for key in keys], dtype=float).T
    return np.asarray((totals - _mean(sums) * weights) / weights.sum())


def _from_residuals(n: int, value: float, residuals: Array, scale: float) -> Estimate:
    error = math.sqrt(n / (n - 1) * float(residuals @ residuals)) if n > 1 else math.nan
    low, high = t_interval(value, error * math.sqrt(n), n)
    return Estimate(scale * value, n, scale * error, Interval(scale * low, scale * high))


def resamples(n: int, rounds: int, seed: int) -> Array:
    """Counts of each of `n` clusters in samples of `n` with replacement; shape (rounds, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=rounds).astype(float)


def from_samples(value: float, n: int, samples: Array) -> Estimate:
    """An estimate with the standard deviation and the central 95 % of its resampled values.

    Both are unknown if there are none, or all are equal: they do not show how the estimate varies.
    """
    if n < 2 or not samples.size or np.ptp(samples) <= ROUNDING:
        return Estimate(value, n, math.nan, UNKNOWN)
    low, high = np.percentile(samples, [2.5, 97.5])
    return Estimate(value, n, float(np.std(samples, ddof=1)), Interval(float(low), float(high)))


def mean_by_prompt(
    totals: Sequence[float], counts: Sequence[float], prompts: Sequence[Hashable]
) -> dict[str, float | int | None]:
    """Σ totals / Σ counts as JSON, with its standard error and 95 % t-interval over prompts (see `ratio`).

    totals, counts: of one response or pair each, such as the sum over its tokens and their number. The uncertainty is
    None if there are fewer than two prompts. Raises ValueError for sequences of different lengths.
    """
    sums: dict[Hashable, tuple[float, float]] = {}
    for total, count, prompt in zip(totals, counts, prompts, strict=True):
        y, x = sums.get(prompt, (0.0, 0.0))
        sums[prompt] = (y + float(total), x + float(count))
    weight = sum(x for _, x in sums.values())
    estimate = ratio(sums) if weight else NOTHING
    return {**estimate.shown(), "n": int(weight), "prompts": len(sums)}


def share_by_prompt(hits: Sequence[bool], prompts: Sequence[Hashable]) -> dict[str, float | int | None]:
    """`mean_by_prompt` of a share, with an interval that stays within 0 and 1.

    The Wilson interval of as many independent values as have the share's standard error over prompts, with the t
    quantile (Dean and Pagano, Journal of Survey Statistics and Methodology 3, 2015). The same in all prompts: of as
    many values as prompts. Raises ValueError for sequences of different lengths.
    """
    estimate = mean_by_prompt([float(hit) for hit in hits], [1.0] * len(hits), prompts)
    share, error, n = estimate["value"], estimate["standard_error"], estimate["prompts"]
    if share is None or error is None or n is None:
        return estimate
    independent = share * (1 - share) / error**2 if error else n
    squared = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) ** 2 / independent
    middle = (share + squared / 2) / (1 + squared)
    reach = math.sqrt(squared * share * (1 - share) + squared**2 / 4) / (1 + squared)
    return estimate | {"low": max(0.0, middle - reach), "high": min(1.0, middle + reach)}
