"""The regret of a response split into its outcome and what its writer may waste, and four consequences.

    python experiments/theory_split.py

Random trees whose verifier accepts every second response, without discount, every response enumerated. Writers: which
of two copies of one response has the higher score, the weak writer's or the able one's, by negative regret and by what
`pair.rule=above_writer` computes. Luck: how RePO's one-sample estimate of G ranks responses of equal length. Units: how
often the shorter of two accepted responses has less regret.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from theory import Problem, full_tree, random_policy, random_problem, random_tree, solve
from theory.split import one_sample_waste, split, split_errors
from theory.tree import FloatArray
from theory_common import BLUE, GRAY, ORANGE, figure_path, magnitude, save_figure, share, start_figure, table

from regretless.objectives import Logps, build
from regretless.objectives.weights import repo_weights

FORESTS, PROMPTS = 30, 20
BETAS = (1.0, 0.1, 0.01)
EQUAL = 1e-12
SHOWN = 400
"""Responses in the figure."""
WRITERS: dict[str, Callable[[Problem], FloatArray]] = {
    "π*": lambda problem: solve(problem).policy,
    "optimal at 3 β": lambda problem: solve(replace(problem, beta=3 * problem.beta)).policy,
    "optimal at β / 10": lambda problem: solve(replace(problem, beta=problem.beta / 10)).policy,
}
"""The able writers; the weak one is a random policy."""


def weighted_score_error(problem: Problem) -> FloatArray:
    """RePO's score when the reference wrote, minus DPO's with position weights: β Σ (1 + w_s)(π_s − r_s), (R,)."""
    responses = problem.tree.responses
    mask = torch.from_numpy(responses.mask)
    policy, reference = (
        torch.from_numpy(responses.gather(values)) for values in (solve(problem).policy, problem.reference)
    )
    objective = build("repo", beta=problem.beta, discount=1.0)
    pairs = torch.tensor([[0, 1]])  # only the scores are read, which every response has
    output = objective(Logps(policy, mask=mask, reference=reference, behavior=reference), pairs)
    weights = 1 + repo_weights(mask.sum(dim=1), mask.shape[1], discount=1.0)
    assert output.scores is not None
    return np.asarray(output.scores - problem.beta * (weights * (policy - reference)).sum(dim=1))


def ranks(values: FloatArray) -> FloatArray:
    """Ranks of values, those of equal ones averaged."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def rank_correlation(one: FloatArray, other: FloatArray) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def copies(problem: Problem, able: FloatArray, weak: FloatArray) -> FloatArray:
    """Score of the weak writer's copy minus the able one's, (2, R): by negative regret, and above the writer."""
    responses = problem.tree.responses
    means = []
    for policy in (able, weak):
        right = np.exp(responses.log_prob(policy)) * split(problem, policy).outcome
        means.append(np.bincount(responses.prompt, weights=right)[responses.prompt])
    return np.stack([split(problem, able).regret - split(problem, weak).regret, means[0] - means[1]])


def writer_rows(problems: list[Problem], weak: list[FloatArray]) -> list[list[object]]:
    """For every able writer, how many copies of the weak one score higher, lower and equally, by both scores."""
    rows: list[list[object]] = []
    for name, writer in WRITERS.items():
        gaps = np.concatenate(
            [copies(problem, writer(problem), policy) for problem, policy in zip(problems, weak, strict=True)], axis=1
        )
        counts = [int(found.sum()) for gap in gaps for found in (gap > EQUAL, gap < -EQUAL, np.abs(gap) <= EQUAL)]
        rows.append([name, *counts])
    return rows


def luck(rng: np.random.Generator) -> tuple[list[list[object]], tuple[FloatArray, FloatArray]]:
    """Rank correlation of G and its one-sample estimate among right and among wrong responses, for every β.

    And both for the right responses at the middle β. The reference writes and all responses have six tokens.
    """
    problem = random_problem(
        rng, full_tree(prompts=40, depth=6, branching=3), rewards="verifier", beta=1.0, discount=1.0
    )
    right = split(problem, problem.reference).outcome == 1
    rows: list[list[object]] = []
    shown = None
    for beta in BETAS:
        posed = replace(problem, beta=beta)
        waste, estimate = split(posed, posed.reference).waste, one_sample_waste(posed, posed.reference)
        rows.append(
            [f"{beta:g}", *(f"{rank_correlation(estimate[kind], waste[kind]):+.2f}" for kind in (right, ~right))]
        )
        if beta == BETAS[1]:
            shown = waste[right], estimate[right]
    assert shown is not None
    return rows, shown


def unit_rows(problems: list[Problem]) -> list[list[object]]:
    """Pairs of accepted responses to a prompt with unequal lengths, and in how many the shorter has less regret."""
    rows: list[list[object]] = []
    for beta in BETAS:
        pairs = shorter = 0
        for problem in problems:
            posed = replace(problem, beta=beta)
            responses, parts = posed.tree.responses, split(posed, posed.reference)
            right = np.flatnonzero(parts.outcome == 1)
            lengths, prompt, regrets = (values[right] for values in (responses.lengths, responses.prompt, parts.regret))
            less = (lengths[:, None] < lengths) & (prompt[:, None] == prompt)
            pairs += int(less.sum())
            shorter += int((less & (regrets[:, None] < regrets - EQUAL)).sum())
        rows.append([f"{beta:g}", pairs, f"{shorter} ({share(shorter, pairs)})"])
    return rows


def draw(path: Path, waste: FloatArray, estimate: FloatArray, rng: np.random.Generator) -> None:
    figure, (axes,) = start_figure(width=4.6, height=3.2)
    rows = rng.choice(len(waste), SHOWN, replace=False)
    axes.plot(waste[rows], estimate[rows], "o", color=ORANGE, markersize=2.5, label="right responses")
    top = float(waste[rows].max())
    axes.plot([0, top], [0, top], color=BLUE, linewidth=1, label="a perfect estimate")
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set_xlabel("G, exact (reward)")
    axes.set_ylabel("G, from the response itself (reward)")
    axes.legend(loc="center right")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-split.svg")
    rng = np.random.default_rng(0)
    problems = [
        random_problem(rng, random_tree(rng, prompts=PROMPTS), rewards="verifier", discount=1.0) for _ in range(FORESTS)
    ]
    writers = [random_policy(rng, problem.tree) for problem in problems]
    errors: dict[str, list[FloatArray]] = defaultdict(list)
    for problem, writer in zip(problems, writers, strict=True):
        for name, values in split_errors(problem, writer).items():
            errors[name].append(np.abs(values))
        errors["μ = π_ref: RePO's score is β Σ (1 + w_s)(π_s − r_s)"].append(np.abs(weighted_score_error(problem)))
    rows: list[list[object]] = [
        [name, sum(map(len, found)), magnitude(max(float(np.concatenate(found).max()), 1e-13))]
        for name, found in errors.items()
    ]
    print(table(["statement", "checks", "largest error"], rows), "\n")
    judged = ("−regret: weak higher", "lower", "equal", "above the writer: weak higher", "lower", "equal")
    print(table(["able writer", *judged], writer_rows(problems, writers)), "\n")
    rows, shown = luck(rng)
    print(table(["β", "among right responses", "among wrong responses"], rows), "\n")
    print(table(["β", "pairs of right responses", "the shorter has less regret"], unit_rows(problems)))
    if path:
        draw(path, *shown, rng)


if __name__ == "__main__":
    main()
