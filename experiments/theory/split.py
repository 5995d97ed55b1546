"""Regret of a response as its outcome and what its writer may waste: the sum of both parts, without discount."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from theory.regularized import Problem, evaluate, log_ratio, regret, sequential_kl, solve
from theory.tree import FloatArray


class Split(NamedTuple):
    """One entry for every response, (R,), in units of reward: regret = start − outcome + waste."""

    regret: FloatArray
    """Σ_t Reg(s_t, o_t), by the definition Reg = V* − Q^μ."""
    start: FloatArray
    """V* of the prompt."""
    outcome: FloatArray
    """Sum of the rewards."""
    waste: FloatArray
    """G = Σ_{t≥1} V*(s_t) − V^μ(s_t) over the contexts behind the prompt, which is never negative."""


def split(problem: Problem, behavior: FloatArray) -> Split:
    """Both parts of every response's regret under its writer; raises ValueError for a discount below 1."""
    if problem.discount != 1:
        raise ValueError(f"split: expected discount 1, got {problem.discount}: below it the sum does not telescope")
    tree, responses = problem.tree, problem.tree.responses
    best, value = solve(problem), evaluate(problem, behavior)
    behind = tree.at_child(best.v - value.v)
    total = {
        name: responses.gather(values).sum(axis=1)
        for name, values in {"regret": regret(problem, behavior), "outcome": problem.reward, "waste": behind}.items()
    }
    return Split(total["regret"], best.v[responses.prompt], total["outcome"], total["waste"])


def one_sample_waste(problem: Problem, behavior: FloatArray) -> FloatArray:
    """RePO's estimate of G at π = π* from the response itself, (R,): β Σ_t Σ_{l>0} log μ/π* of the tokens ahead."""
    ratio = log_ratio(behavior, solve(problem).policy)
    responses = problem.tree.responses
    return problem.beta * np.asarray(responses.future(responses.gather(ratio)).sum(axis=1))


def split_errors(problem: Problem, behavior: FloatArray) -> dict[str, FloatArray]:
    """Both sides' difference in every equality of the split: an array over edges or responses each."""
    tree, beta, reference = problem.tree, problem.beta, problem.reference
    best, value, parts = solve(problem), evaluate(problem, behavior), split(problem, behavior)
    by_choice = best.v[tree.source] - problem.reward - tree.at_child(best.v)
    by_writer = tree.at_child(best.v - value.v)
    later = sequential_kl(tree, behavior, best.policy, 1.0)
    behind = tree.responses.gather(tree.at_child(best.v)).sum(axis=1)
    contexts_behind = tree.responses.lengths - 1
    return {
        "Reg = [V*(s) − r − V*(s')] + [V*(s') − V^μ(s')]": regret(problem, behavior) - by_choice - by_writer,
        "the first bracket is −β log π*/π_ref": by_choice + beta * log_ratio(best.policy, reference),
        "the second bracket is β KL̄(μ ‖ π*)": by_writer - beta * later,
        "Σ Reg = V*(s_0) − R + G": parts.regret - (parts.start - parts.outcome + parts.waste),
        "G ≥ 0": np.minimum(parts.waste, 0),
        "μ = π_ref, reward at the end: one-sample G = Σ_{t≥1} [V*(s_t) − R]": one_sample_waste(problem, reference)
        - (behind - contexts_behind * parts.outcome),
    }
