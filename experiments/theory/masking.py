"""The masking lemma (arXiv:2606.09124, Lemma 6.1): is a complete accepted response less regretted than a cut one?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from theory.estimators import estimates
from theory.regularized import Problem, expectation, kl, log_ratio, regret, sequential_kl, solve
from theory.tree import BoolArray, FloatArray

ROUNDING = 1e-12
"""What two sides that are equal may differ by: a forced token makes ε, and often both sides, exactly 0."""


class MaskingCases(NamedTuple):
    """One entry for every accepted response and every context q_<t along it, in units of nats or of reward."""

    epsilon: FloatArray
    """ε = KL(μ ‖ π_ref) − KL(μ ‖ π*) in q_<t, nats; the lemma assumes ε ≥ 0."""
    later: FloatArray
    """E_μ of the sequential KL(μ ‖ π*) from q_<t on, nats; the corrected condition is later ≥ ε."""
    complete: FloatArray
    """Reg of the accepted last token."""
    cut: FloatArray
    """E_μ Reg(q_<t, ·), what cutting the response at q_<t leaves."""
    cut_estimated: FloatArray
    """The same mean of the estimator that §6 displays, over all continuations by μ; `complete` is its own estimate."""

    @property
    def assumed(self) -> BoolArray:
        """Whether the printed lemma's assumption holds."""
        return np.asarray(self.epsilon >= -ROUNDING)

    @property
    def corrected(self) -> BoolArray:
        """Whether the corrected condition holds."""
        return np.asarray(self.later >= self.epsilon - ROUNDING)

    @property
    def fails(self) -> BoolArray:
        """Whether the lemma's conclusion, complete ≤ cut, is violated."""
        return np.asarray(self.complete > self.cut + ROUNDING)

    @property
    def fails_estimated(self) -> BoolArray:
        """Whether the conclusion is violated with the printed estimator on both sides, as the lemma is printed."""
        return np.asarray(self.complete > self.cut_estimated + ROUNDING)


def masking_cases(problem: Problem, behavior: FloatArray, accepted: BoolArray) -> MaskingCases:
    """Both sides of the lemma and of its conditions, all by their definitions. accepted: (E,), true at ends only."""
    tree = problem.tree
    best = solve(problem)
    epsilon = kl(tree, behavior, problem.reference) - kl(tree, behavior, best.policy)
    later = expectation(tree, behavior, sequential_kl(tree, behavior, best.policy, problem.discount))
    each = regret(problem, behavior)
    cut = expectation(tree, behavior, each)
    window = tree.responses.mean_given_edge(behavior, estimates(tree, behavior, best.policy, "window mean"))
    estimated = problem.beta * (window - log_ratio(best.policy, problem.reference))
    cut_estimated = expectation(tree, behavior, estimated)
    rows = accepted[tree.ends]
    edges, mask = tree.responses.edges[rows], tree.responses.mask[rows]
    context = tree.source[edges]
    complete = each[tree.ends[rows]].repeat(mask.sum(axis=1))
    at = context[mask]
    return MaskingCases(epsilon[at], later[at], complete, cut[at], cut_estimated[at])
