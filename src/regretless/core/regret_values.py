"""Regret from success rates: values of contexts, the regret of units in two parts, and what counts say about them.

A response of T units goes through the contexts s_0 (the prompt) … s_T (its end). With the return R in [0, 1] at the end
and no discount, Reg_t = V*(s_t) − Q^μ(s_t, o_t), where Q^μ(s_t, o_t) = V^μ(s_{t+1}); V*(s_T) = V^μ(s_T) = R. `alpha`
is the paper's α, which the package's objectives call β (arXiv:2606.09124, §4.2 and Lemma 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from regretless.core.intervals import LEVEL, Interval

Array = npt.NDArray[np.float64]
DRAWS = 4096
"""Draws of a posterior: its quantiles, in a random order, so that means and ends of intervals hardly vary."""
GRID = (np.arange(DRAWS) + 0.5) / DRAWS
OUTER = np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])
"""Probabilities of the draws' quantiles, and of the ends of an interval."""
PLUG_IN_FROM = 1.0
"""From this α on, V* of the observed share is hardly biased, and V*'s posterior mean would be, upward."""


def best_value(rate: npt.ArrayLike, alpha: float) -> Array:
    """V* = α log(1 + p (e^{1/α} − 1)), of the reference's success rate p: the optimal value where returns are 0 or 1.

    Any shape. Raises ValueError for α ≤ 0, or rates outside [0, 1].
    """
    _check(alpha)
    p = np.asarray(rate, dtype=np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"expected success rates from 0 to 1, got {p.min()} to {p.max()}")
    with np.errstate(divide="ignore"):  # log 0 = −inf is right on both sides
        return np.asarray(alpha * np.logaddexp(np.log1p(-p), np.log(p) + 1 / alpha))


def best_value_of_returns(returns: npt.ArrayLike, alpha: float) -> float:
    """V* = α log mean e^{R/α} over the returns (K,) of the reference's continuations, which may be graded.

    It is biased low, by about α Var(e^{R/α}) / (2 K mean(e^{R/α})²): at a small α by everything that K continuations
    miss of the best returns. Raises ValueError for α ≤ 0, or no returns.
    """
    _check(alpha)
    values = np.asarray(returns, dtype=np.float64)
    if not values.size:
        raise ValueError("expected one return or more, got none")
    return float(alpha * (special.logsumexp(values / alpha) - np.log(values.size)))


def writer_value(rate: npt.ArrayLike, divergence: npt.ArrayLike, alpha: float) -> Array:
    """V^μ = p_μ − α · KL-to-go: mean return of the writer's continuations, and their KL(μ ‖ π_ref) in nats. Any shape.

    Raises ValueError for α ≤ 0.
    """
    _check(alpha)
    return np.asarray(np.asarray(rate, dtype=np.float64) - alpha * np.asarray(divergence, dtype=np.float64))


class Regret(NamedTuple):
    """The regret of T units and its two parts, (T,) each, in units of return: regret = local + future."""

    regret: Array
    """V*(s_t) − V^μ(s_{t+1})."""
    local: Array
    """V*(s_t) − V*(s_{t+1}) = −α log π*/π_ref(o_t | s_t): DPO's term at its optimum."""
    future: Array
    """V*(s_{t+1}) − V^μ(s_{t+1}) = α · KL-to-go(μ ‖ π*): what the writer is expected to waste. 0 for the last unit."""

    @property
    def waste(self) -> float:
        """G = Σ_{t=1}^{T−1} V*(s_t) − V^μ(s_t): what regret adds to the outcome; Σ Reg = V*(s_0) − R + G."""
        return float(self.future.sum())


def split(best: npt.ArrayLike, writer: npt.ArrayLike) -> Regret:
    """The regret of each unit of a response, from V* and V^μ (T + 1,) of the contexts before, between and behind them.

    The last entry of both is the return R. Raises ValueError if it is not the same, or there is no unit.
    """
    v, w = np.asarray(best, dtype=np.float64), np.asarray(writer, dtype=np.float64)
    if v.shape != w.shape or v.ndim != 1 or len(v) < 2 or v[-1] != w[-1]:
        raise ValueError(
            f"expected V* and V^μ of two contexts or more, with the return as the last of both, got {v} and {w}"
        )
    local, future = v[:-1] - v[1:], v[1:] - w[1:]
    return Regret(local + future, local, future)


@dataclass(frozen=True)
class Counts:
    """What a policy's continuations of one context came to. Raises ValueError for counts that are none."""

    right: int
    """Continuations with return 1."""
    n: int
    """Continuations with a known return."""
    divergence: float = 0.0
    """Mean over continuations of their KL(policy ‖ reference), nats; 0 for the reference itself."""
    divergence_error: float = 0.0
    """Standard error of that mean; NaN for fewer than two continuations."""

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.n or not self.n:
            raise ValueError(f"expected 0 <= right <= n and n >= 1, got {self.right} of {self.n}")

    @property
    def rate(self) -> float:
        """Share of right continuations."""
        return self.right / self.n


def rate_interval(counts: Counts) -> Interval:
    """95 % interval of a success rate by Beta(½, ½); after 0 of K (K of K) only its upper (lower) end is a finding."""
    low, high = special.betaincinv(counts.right + 0.5, counts.n - counts.right + 0.5, OUTER)
    return Interval(0.0 if counts.right == 0 else float(low), 1.0 if counts.right == counts.n else float(high))


def estimated_best_value(counts: Counts, alpha: float) -> float:
    """V* from the reference's counts: of the observed share for α ≥ 1, below it the posterior mean under Beta(½, ½).

    At a small α, V* of the share is biased low where few continuations are right: 0 of K gives V* = 0.
    """
    if alpha >= PLUG_IN_FROM:
        return float(best_value(counts.rate, alpha))
    return float(best_value(_rates(counts.right, counts.n), alpha).mean())


class Ends(NamedTuple):
    """Draws of a quantity's posterior, (DRAWS,), once for the lower and once for the upper end of its interval.

    They differ where counts bound the quantity on one side only.
    """

    low: Array
    high: Array

    def minus(self, other: Ends) -> Ends:
        """Draws of the difference."""
        return Ends(self.low - other.high, self.high - other.low)

    def interval(self) -> Interval:
        """The central 95 %."""
        return Interval(float(np.quantile(self.low, OUTER[0])), float(np.quantile(self.high, OUTER[1])))


class Posterior:
    """Draws of the values that one policy's counts in one context allow. Equal draws serve V* and V^μ."""

    def __init__(self, counts: Counts, rng: np.random.Generator) -> None:
        self.counts = counts
        self.rates = rng.permutation(_rates(counts.right, counts.n))
        """Success rates, (DRAWS,). They vary after 0 of K, too: a standard error of 0 would be certainty."""
        self.divergences = np.full(DRAWS, counts.divergence)
        """KL-to-go in nats, (DRAWS,)."""
        if counts.divergence_error != 0:
            steps = rng.permutation(stats.t.ppf(GRID, counts.n - 1))
            self.divergences = counts.divergence + counts.divergence_error * steps

    @property
    def bounded_rates(self) -> Ends:
        """Success rates for the ends of an interval, which after 0 of K and K of K is open on one side."""
        zero, one = self.counts.right == 0, self.counts.right == self.counts.n
        return Ends(np.zeros(DRAWS) if zero else self.rates, np.ones(DRAWS) if one else self.rates)

    def best(self, alpha: float) -> Ends:
        """V*, of the reference's counts."""
        return Ends(*(best_value(rates, alpha) for rates in self.bounded_rates))

    def writer_values(self, alpha: float) -> Array:
        """V^μ, of the writer's counts, (DRAWS,)."""
        return writer_value(self.rates, self.divergences, alpha)

    def writer(self, alpha: float) -> Ends:
        """V^μ, of the writer's counts."""
        return Ends(*(writer_value(rates, self.divergences, alpha) for rates in self.bounded_rates))


def waste_error(reference: Posterior, writer: Posterior, alpha: float) -> float:
    """Posterior standard deviation of V* − V^μ in one context; one posterior may serve both policies."""
    gaps = best_value(reference.rates, alpha) - writer.writer_values(alpha)
    return float(gaps.std())


def _check(alpha: float) -> None:
    if not 0 < alpha < np.inf:
        raise ValueError(f"expected alpha > 0, got {alpha}")


@cache
def _rates(right: int, n: int) -> Array:
    """Quantiles of the posterior Beta(½ + right, ½ + wrong) of a success rate, (DRAWS,)."""
    return np.asarray(special.betaincinv(right + 0.5, n - right + 0.5, GRID))
