"""Exact KL-regularized decision processes on token trees: the paper's theory as numbers that can be checked.

Needs numpy only. What was checked, and what came of it, is in docs/theory.md.

>>> tree = random_tree(rng)
>>> problem = random_problem(rng, tree)
>>> best = solve(problem)
>>> gap = best.q - evaluate(problem, behavior).q    # Theorem 5.4: β · sequential_kl(tree, behavior, best.policy, γ)
"""

from __future__ import annotations

from theory.random_problems import (
    deterministic_policy,
    full_tree,
    random_policy,
    random_problem,
    random_tree,
)
from theory.regularized import (
    Optimum,
    Problem,
    Values,
    behavior_operator,
    evaluate,
    expectation,
    improve,
    kl,
    log_ratio,
    normalize,
    regret,
    reward_of,
    sequential_kl,
    shape,
    solve,
)
from theory.tree import END, Responses, TokenTree

__all__ = [
    "END",
    "Optimum",
    "Problem",
    "Responses",
    "TokenTree",
    "Values",
    "behavior_operator",
    "deterministic_policy",
    "evaluate",
    "expectation",
    "full_tree",
    "improve",
    "kl",
    "log_ratio",
    "normalize",
    "random_policy",
    "random_problem",
    "random_tree",
    "regret",
    "reward_of",
    "sequential_kl",
    "shape",
    "solve",
]
