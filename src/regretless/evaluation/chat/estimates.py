"""Means of judgments with their uncertainty, where judgments of one question are not independent of each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regretless.core.estimates import UNKNOWN, Interval, t_interval

Array = npt.NDArray[np.float64]
Sums = Mapping[str, tuple[float, float]]
"""Of each question, by its id: the weighted sum of its judgments, and the sum of the weights."""


class Estimate(NamedTuple):
    """A number from `n` questions; NaN where it cannot be told."""

    value: float
    n: int
    standard_error: float
    interval: Interval

    def shown(self, **more: Any) -> dict[str, Any]:
        """As JSON, `null` for what is not known; `more` is added."""
        low, high = self.interval
        numbers = {"value": self.value, "standard_error": self.standard_error, "low": low, "high": high}
        return {**{key: known(value) for key, value in numbers.items()}, "n": self.n, **more}


def known(value: float) -> float | None:
    """The number, or None for NaN."""
    return None if math.isnan(value) else value


NOTHING = Estimate(math.nan, 0, math.nan, UNKNOWN)


def ratio(sums: Sums, scale: float = 1.0) -> Estimate:
    """Weighted mean over all judgments, times `scale`.

    The standard error takes the question as the unit, because judgments of one question depend on each other. With one
    judgment of weight 1 a question it is the usual one, sd / √n; the interval is the t-interval.
    """
    return _from_residuals(len(sums), _mean(sums), _residuals(sums, list(sums)), scale) if sums else NOTHING


def difference(first: Sums, second: Sums, scale: float = 1.0) -> Estimate:
    """How much higher the weighted mean of `second` is than that of `first`, on the questions that both have.

    Paired by question: what makes a question easy for both does not count as uncertainty.
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
    """What each question moves the mean by, to first order."""
    totals, weights = np.array([sums[key] for key in keys], dtype=float).T
    return np.asarray((totals - _mean(sums) * weights) / weights.sum())


def _from_residuals(n: int, value: float, residuals: Array, scale: float) -> Estimate:
    error = math.sqrt(n / (n - 1) * float(residuals @ residuals)) if n > 1 else math.nan
    low, high = t_interval(value, error * math.sqrt(n), n)
    return Estimate(scale * value, n, scale * error, Interval(scale * low, scale * high))


def resamples(n: int, rounds: int, seed: int) -> Array:
    """How often each of `n` questions is drawn when `n` are drawn with replacement; shape (rounds, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=rounds).astype(float)


def from_samples(value: float, n: int, samples: Array) -> Estimate:
    """A number with the standard deviation and the central 95 % of its resampled values."""
    if n < 2:
        return Estimate(value, n, math.nan, UNKNOWN)
    low, high = np.percentile(samples, [2.5, 97.5])
    return Estimate(value, n, float(np.std(samples, ddof=1)), Interval(float(low), float(high)))
