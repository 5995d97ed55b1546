"""Figure 3 of the paper as a decision process: two decisions and what else could have come of them (§4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from theory.regularized import Problem, log_ratio, regret, solve
from theory.tree import END, FloatArray, TokenTree

DECISIONS = ("A", "B")
REALIZED = (2, 4)
"""Edge of the outcome that came about, after A and after B; the edge behind each is the one that did not."""


def two_decisions(*, beta: float = 1.0) -> Problem:
    """A then 3, or −5 in another course of things; B then 2, or 1.5. The reference takes every course equally.

    The outcome of a decision is the next token: as in a text, chance lies in the policy that goes on, not in the world.
    """
    tree = TokenTree(np.array([0, 0, 1, 1, 2, 2]), np.array([1, 2, END, END, END, END]))
    reward = np.array([0.0, 0.0, 3.0, -5.0, 2.0, 1.5])
    return Problem(tree=tree, reward=reward, reference=np.full(6, np.log(0.5)), beta=beta)


def course_of_things(counterfactual: float, after_b: float | None = None) -> FloatArray:
    """The behavior policy that leaves the realized course with probability `counterfactual`; (6,) nats.

    after_b: that probability after decision B, if it is another one than after A.
    """
    with np.errstate(divide="ignore"):
        outcomes = [
            np.log([1 - each, each]) for each in (counterfactual, counterfactual if after_b is None else after_b)
        ]
    return np.concatenate([np.full(2, np.log(0.5)), *outcomes])


class Judgment(NamedTuple):
    """A score for decision A and one for decision B; the higher is preferred."""

    a: float
    b: float

    @property
    def preferred(self) -> str:
        """The decision with the higher score."""
        return DECISIONS[int(self.b > self.a)]


def by_reward(problem: Problem) -> Judgment:
    """The reward that came about."""
    return Judgment(*(float(problem.reward[edge]) for edge in REALIZED))


def by_regret(problem: Problem, behavior: FloatArray) -> Judgment:
    """Negative regret of the decision under the behavior policy, in units of reward."""
    return Judgment(*(-regret(problem, behavior)[:2]).tolist())


def by_one_sample(problem: Problem, behavior: FloatArray, outcomes: Sequence[int] = REALIZED) -> Judgment:
    """RePO's estimate of the same from one outcome (an edge) of each: β (log π*/π_ref + log π*/μ of the outcome).

    Its mean over the outcomes, drawn by the behavior policy, is `by_regret`; decision and outcome are one token each.
    """
    best = solve(problem).policy
    local = (best - problem.reference)[:2]
    later = -log_ratio(behavior, best)[list(outcomes)]
    return Judgment(*(problem.beta * (local + later)).tolist())
