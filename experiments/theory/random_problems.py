"""Random trees, policies and problems."""

from __future__ import annotations

from typing import Literal

import numpy as np

from theory.regularized import Problem, normalize
from theory.tree import END, BoolArray, FloatArray, TokenTree


def random_tree(
    rng: np.random.Generator,
    *,
    prompts: int = 100,
    depth: int = 5,
    branching: int = 4,
    stop: float = 0.3,
    abstain: bool = False,
) -> TokenTree:
    """Trees with 1 … `branching` tokens a context (1: a forced token) and responses of 1 … `depth` tokens.

    Each token above the last level ends the response with probability `stop`. abstain: every context has one more
    token, its first, that ends the response: "I don't know".
    """
    sources, children, first, count = [], [], 0, prompts
    for level in range(1, depth + 1):
        tokens = rng.integers(1, branching + 1, count) + abstain
        sources.append(np.repeat(np.arange(first, first + count), tokens))
        goes_on = (rng.random(len(sources[-1])) >= stop) & (level < depth)
        if abstain:
            goes_on[np.cumsum(tokens) - tokens] = False
        child = np.full(len(goes_on), END)
        child[goes_on] = first + count + np.arange(goes_on.sum())
        children.append(child)
        first, count = first + count, int(goes_on.sum())
        if not count:
            break
    return TokenTree(np.concatenate(sources), np.concatenate(children))


def full_tree(*, prompts: int = 1, depth: int, branching: int) -> TokenTree:
    """Trees in which every context has `branching` tokens and every response `depth`."""
    contexts = [prompts * branching**level for level in range(depth)]
    inner = sum(contexts)
    ends = np.full(contexts[-1] * branching, END)
    return TokenTree(np.repeat(np.arange(inner), branching), np.concatenate([np.arange(prompts, inner), ends]))


def random_policy(rng: np.random.Generator, tree: TokenTree, spread: float = 1.0) -> FloatArray:
    """A policy, (E,) nats, from normal logits of standard deviation `spread`."""
    return normalize(tree, spread * rng.standard_normal(tree.edges))


def random_problem(
    rng: np.random.Generator,
    tree: TokenTree,
    *,
    rewards: Literal["dense", "verifier"] = "dense",
    beta: float | None = None,
    discount: float | None = None,
) -> Problem:
    """A problem on `tree` with a random reference.

    dense: a standard normal reward on every edge; verifier: 1 for an accepted response (one in two), 0 elsewhere.
    beta: None draws it log-uniformly from 0.1 … 3; discount: None draws it uniformly from 0 … 1.
    """
    if rewards == "dense":
        reward = rng.standard_normal(tree.edges)
    else:
        reward = ((tree.child == END) & (rng.random(tree.edges) < 0.5)).astype(np.float64)
    return Problem(
        tree=tree,
        reward=reward,
        reference=random_policy(rng, tree),
        beta=float(np.exp(rng.uniform(np.log(0.1), np.log(3.0)))) if beta is None else beta,
        discount=float(rng.random()) if discount is None else discount,
    )


def deterministic_policy(rng: np.random.Generator, tree: TokenTree) -> FloatArray:
    """A policy that writes one random token in every context: 0 there, −inf elsewhere, (E,) nats."""
    chosen: BoolArray = np.zeros(tree.edges, dtype=np.bool_)
    counts = np.diff(tree.first, append=tree.edges)
    chosen[tree.first + (rng.random(tree.contexts) * counts).astype(np.int64)] = True
    return np.where(chosen, 0.0, -np.inf)
