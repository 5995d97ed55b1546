"""KL-regularized decision processes on token trees, solved exactly (arXiv:2606.09124, §3, §5 and appendix A).

The paper's inverse temperature α is `beta` here, as everywhere in this package, and its shaping function β(·) is a
`potential`. Policies are log-probabilities of edges, (E,) nats; −inf stands for a token that is never written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from theory.tree import FloatArray, Level, TokenTree


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Rewards and a reference policy on a tree: maximize E Σ_t discount^t (reward − beta · KL(policy ‖ reference)).

    Raises ValueError for wrong shapes, beta ≤ 0, a discount outside [0, 1], a reward that is not finite, or a reference
    that does not sum to one.
    """

    tree: TokenTree
    reward: FloatArray
    """Reward of each edge, (E,)."""
    reference: FloatArray
    """Reference policy, (E,) nats."""
    beta: float = 1.0
    """Inverse temperature, the paper's α."""
    discount: float = 1.0
    """γ."""

    def __post_init__(self) -> None:
        check_policy(self.tree, self.reference, "Problem.reference")
        if self.reward.shape != (self.tree.edges,) or not np.isfinite(self.reward).all():
            raise ValueError(f"Problem.reward: expected {self.tree.edges} finite numbers, got {self.reward.shape}")
        if not (0 < self.beta < math.inf and 0 <= self.discount <= 1):
            raise ValueError(f"Problem: expected beta > 0 and discount in [0, 1], got {self.beta}, {self.discount}")


class Values(NamedTuple):
    """Q of every edge, (E,), and V of every context, (N,), in units of reward."""

    q: FloatArray
    v: FloatArray


class Optimum(NamedTuple):
    """Q*, V* and the optimal policy, (E,) nats."""

    q: FloatArray
    v: FloatArray
    policy: FloatArray


def check_policy(tree: TokenTree, policy: FloatArray, name: str) -> None:
    """Raises ValueError unless `policy` has a log-probability for every edge and sums to one in every context."""
    if policy.shape != (tree.edges,) or not (policy < math.inf).all():
        raise ValueError(f"{name}: expected a log-probability for each of {tree.edges} edges, got {policy.shape}")
    error = np.abs(tree.whole.sum(np.exp(policy)) - 1).max()
    if not error < 1e-9:
        raise ValueError(f"{name}: expected probabilities that sum to 1 in every context; one is off by {error:.3g}")


def normalize(tree: TokenTree, logits: FloatArray) -> FloatArray:
    """The policy (E,) in nats with probabilities proportional to exp(logits); logits: (E,)."""
    return logits - tree.whole.logsumexp(logits)[tree.source]


def weigh(policy: FloatArray, values: FloatArray) -> FloatArray:
    """Probability times value, edge by edge: 0 where the policy never goes, whatever the value there."""
    with np.errstate(invalid="ignore"):
        return np.where(policy > -math.inf, np.exp(policy) * values, 0.0)


def log_ratio(policy: FloatArray, other: FloatArray) -> FloatArray:
    """log policy − log other, (E,) nats; 0 where the first never goes, inf where only the second never does."""
    with np.errstate(invalid="ignore"):
        return np.where(policy > -math.inf, policy - other, 0.0)


def expectation(tree: TokenTree, policy: FloatArray, values: FloatArray) -> FloatArray:
    """Mean over the next token, (N,); values: (E,)."""
    return tree.whole.sum(weigh(policy, values))


def kl(tree: TokenTree, policy: FloatArray, other: FloatArray) -> FloatArray:
    """KL(policy ‖ other) over the next token, (N,) nats."""
    return expectation(tree, policy, log_ratio(policy, other))


def solve(problem: Problem) -> Optimum:
    """Q*, V* and the optimal policy (Lemma 5.1): V* = β log E_ref exp(Q*/β), π* = π_ref exp((Q* − V*)/β)."""
    tree, reference, beta = problem.tree, problem.reference, problem.beta

    def soft_maximum(level: Level, q: FloatArray) -> FloatArray:
        return beta * level.logsumexp(reference[level.edges] + q / beta)

    q, v = tree.backup(problem.reward, problem.discount, soft_maximum)
    return Optimum(q, v, reference + (q - v[tree.source]) / beta)


def evaluate(problem: Problem, policy: FloatArray) -> Values:
    """Q and V of any policy (Lemma 5.1): V = E_policy[Q] − β KL(policy ‖ π_ref), Q = reward + γ V(child)."""
    penalty = problem.beta * log_ratio(policy, problem.reference)

    def mean(level: Level, q: FloatArray) -> FloatArray:
        return level.sum(weigh(policy[level.edges], q - penalty[level.edges]))

    return Values(*problem.tree.backup(problem.reward, problem.discount, mean))


def improve(problem: Problem, policy: FloatArray) -> FloatArray:
    """One step of policy improvement (appendix A): the policy ∝ π_ref exp(Q^policy / β), (E,) nats."""
    return normalize(problem.tree, problem.reference + evaluate(problem, policy).q / problem.beta)


def sequential_kl(tree: TokenTree, behavior: FloatArray, policy: FloatArray, discount: float) -> FloatArray:
    """E_behavior Σ_{l>0} γ^l KL(behavior ‖ policy) over the contexts after each edge, (E,) nats (Theorem 5.4)."""
    ratio = log_ratio(behavior, policy)

    def ahead(level: Level, later: FloatArray) -> FloatArray:
        return level.sum(weigh(behavior[level.edges], ratio[level.edges] + later))

    return tree.backup(np.zeros(tree.edges), discount, ahead)[0]


def regret(problem: Problem, behavior: FloatArray) -> FloatArray:
    """Reg = V* − Q^behavior of each edge, (E,), by its definition (§4.2); the score in the preference model is −Reg."""
    return solve(problem).v[problem.tree.source] - evaluate(problem, behavior).q


def behavior_operator(problem: Problem, behavior: FloatArray, q: FloatArray) -> FloatArray:
    """The Bellman operator T^behavior of appendix A applied to q, (E,); its only fixed point is Q^behavior."""
    tree = problem.tree
    best = solve(problem)
    extra = kl(tree, behavior, problem.reference) - kl(tree, best.policy, problem.reference)
    gap = problem.beta * extra + expectation(tree, best.policy, best.q) - expectation(tree, behavior, q)
    return best.q - problem.discount * tree.at_child(gap)


def shape(tree: TokenTree, reward: FloatArray, potential: FloatArray, discount: float, end: float = 0.0) -> FloatArray:
    """reward + potential(context) − γ potential(child), (E,): shaping (Lemma 5.3). potential: (N,).

    `end` is the potential after the last token. Values count nothing there, so the lemma holds only for 0.
    """
    return reward + potential[tree.source] - discount * np.where(tree.child < 0, end, tree.at_child(potential))


def reward_of(
    tree: TokenTree, policy: FloatArray, reference: FloatArray, potential: FloatArray, *, beta: float, discount: float
) -> FloatArray:
    """The reward, (E,), for which `policy` is optimal and `potential` (N,) is V* (Lemma 5.3).

    Both policies must write every token now and then.
    """
    return shape(tree, beta * (policy - reference), potential, discount)
