"""Scores of partial responses in a reward-maximizing preference model, anchored in the ways of the paper's appendix C.

Shaping leaves the optimal policy and the regret alone, but not a reward; an anchor is a convention that picks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from theory.regularized import Problem, regret
from theory.tree import BoolArray, FloatArray, IntArray, TokenTree


@dataclass(frozen=True, eq=False)
class Group:
    """G segments (responses, or beginnings of them) for each of P prompts, at most T tokens long."""

    tree: TokenTree
    edges: IntArray
    """(P, G, T), −1 after a segment's end."""

    @property
    def mask(self) -> BoolArray:
        """True at tokens, (P, G, T)."""
        return np.asarray(self.edges >= 0)

    def gather(self, values: FloatArray) -> FloatArray:
        """Values of the edges along each segment, (P, G, T), zero after its end; values: (E,)."""
        return np.where(self.mask, values[self.edges], 0.0)


def sample_group(rng: np.random.Generator, tree: TokenTree, policy: FloatArray, size: int, *, partial: bool) -> Group:
    """`size` independent responses of `policy` to every prompt; partial: each cut after a random one of its tokens."""
    responses = tree.responses
    chances = np.exp(responses.log_prob(policy))
    rows = np.empty((tree.prompts, size), dtype=np.int64)
    for prompt in range(tree.prompts):
        mine = np.flatnonzero(responses.prompt == prompt)
        rows[prompt] = rng.choice(mine, size, p=chances[mine] / chances[mine].sum())
    edges = responses.edges[rows]
    if partial:
        kept = np.ceil(rng.random(rows.shape) * responses.lengths[rows])
        edges = np.where(np.arange(edges.shape[2]) < kept[..., None], edges, -1)
    return Group(tree, edges)


def discounted(steps: FloatArray, discount: float) -> FloatArray:
    """Σ_t discount^t of the rewards along each segment, (P, G); steps: (P, G, T), zero after a segment's end."""
    return np.asarray((steps * discount ** np.arange(steps.shape[2])).sum(axis=2))


def leave_one_out(values: FloatArray, mask: BoolArray) -> FloatArray:
    """Each value minus the mean of the other values of its row, zero off the mask; (P, n). One value alone is kept."""
    count = mask.sum(axis=1, keepdims=True)
    others = (np.where(mask, values, 0.0).sum(axis=1, keepdims=True) - values) / np.maximum(count - 1, 1)
    return np.where(mask, values - np.where(count > 1, others, 0.0), 0.0)


def standardize(values: FloatArray, mask: BoolArray) -> FloatArray:
    """Each value minus the mean of its row, divided by the row's standard deviation; zero off the mask; (P, n).

    A row of equal values becomes zeros.
    """
    count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    mean = np.where(mask, values, 0.0).sum(axis=1, keepdims=True) / count
    centered = np.where(mask, values - mean, 0.0)
    deviation = np.sqrt((centered**2).sum(axis=1, keepdims=True) / count)
    return np.asarray(np.divide(centered, deviation, out=np.zeros_like(centered), where=deviation > 1e-12))


def abstention(tree: TokenTree, reward: FloatArray, *, telescoped: bool, discount: float) -> FloatArray:
    """Rewards (E,) measured against "I don't know", the first token of every context (`random_tree(abstain=True)`).

    Subtracted, the reward of abstaining becomes 0 in every context. Telescoped, it becomes 0 by shaping: what is
    subtracted in a context is given back before entering it, so the result is the one member of the reward's
    equivalence class in which abstaining is worth 0 everywhere.
    """
    idle = reward[tree.first]
    anchored = reward - idle[tree.source]
    return np.asarray(anchored + discount * tree.at_child(idle)) if telescoped else anchored


def _returns(group: Group, reward: FloatArray, discount: float) -> FloatArray:
    return discounted(group.gather(reward), discount)


def _over_returns(
    anchor: Callable[[FloatArray, BoolArray], FloatArray],
) -> Callable[[Group, FloatArray, float], FloatArray]:
    def score(group: Group, reward: FloatArray, discount: float) -> FloatArray:
        values = _returns(group, reward, discount)
        return anchor(values, np.ones(values.shape, dtype=np.bool_))

    return score


def _over_steps(
    anchor: Callable[[FloatArray, BoolArray], FloatArray],
) -> Callable[[Group, FloatArray, float], FloatArray]:
    def score(group: Group, reward: FloatArray, discount: float) -> FloatArray:
        prompts = len(group.edges)
        steps = anchor(group.gather(reward).reshape(prompts, -1), group.mask.reshape(prompts, -1))
        return discounted(steps.reshape(group.edges.shape), discount)

    return score


def _over_abstention(telescoped: bool) -> Callable[[Group, FloatArray, float], FloatArray]:
    def score(group: Group, reward: FloatArray, discount: float) -> FloatArray:
        anchored = abstention(group.tree, reward, telescoped=telescoped, discount=discount)
        return _returns(group, anchored, discount)

    return score


REWARD_SCORES: Mapping[str, Callable[[Group, FloatArray, float], FloatArray]] = MappingProxyType(
    {
        "return": _returns,
        "RLOO of returns": _over_returns(leave_one_out),
        "GRPO of returns": _over_returns(standardize),
        "RLOO of steps": _over_steps(leave_one_out),
        "GRPO of steps": _over_steps(standardize),
        "abstention subtracted": _over_abstention(False),
        "abstention telescoped": _over_abstention(True),
    }
)
"""score(group, reward (E,), discount) -> (P, G). Statistics are taken over a prompt's group, of returns or of steps."""


def regret_scores(group: Group, problem: Problem, behavior: FloatArray) -> FloatArray:
    """Negative regret of each segment, summed over its tokens (the paper's footnote in §4.2), (P, G)."""
    return discounted(group.gather(-regret(problem, behavior)), 1.0)
