"""The masking lemma (6.1) on random token trees: how often it fails as printed, and under the corrected condition.

The second table has the lemma with the estimator that the paper displays in place of the exact regret, on both sides,
and the cases from undiscounted problems alone: the estimator does not discount.

    python experiments/theory_masking.py

A case is an accepted response and a context along it. With a verifier, reward is 1 at the end of accepted responses and
0 elsewhere; with dense rewards, the responses count as accepted whose last token π* likes more than π_ref does, which
the printed proof takes for granted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from theory import Problem, random_policy, random_problem, random_tree, solve
from theory.masking import MaskingCases, masking_cases
from theory.tree import BoolArray, FloatArray, IntArray
from theory_common import BLUE, GRAY, ORANGE, figure_path, save_figure, share, start_figure, table

FORESTS, PROMPTS = 20, 100
SHOWN = 100
"""Cases of each kind in the figure."""
WORLDS: dict[Literal["dense", "verifier"], str] = {"verifier": "verifier", "dense": "dense rewards"}


def behaviors(rng: np.random.Generator, problem: Problem) -> dict[str, FloatArray]:
    """Behavior policies from the reference to beyond the optimal one."""
    return {
        "the reference": problem.reference,
        "optimal at 10 β": solve(replace(problem, beta=10 * problem.beta)).policy,
        "random": random_policy(rng, problem.tree),
        "optimal": solve(problem).policy,
        "optimal at β / 10": solve(replace(problem, beta=problem.beta / 10)).policy,
    }


def accepted(problem: Problem, world: str) -> BoolArray:
    """Edges that end an accepted response, (E,)."""
    good = problem.reward == 1 if world == "verifier" else solve(problem).policy >= problem.reference
    return np.asarray(good & (problem.tree.child < 0))


def collect(rng: np.random.Generator) -> Iterator[tuple[str, str, MaskingCases, float]]:
    """World, behavior, cases and discount of random problems; half of them are not discounted."""
    for world, name in WORLDS.items():
        for number in range(FORESTS):
            tree = random_tree(rng, prompts=PROMPTS)
            problem = random_problem(rng, tree, rewards=world, discount=1.0 if number % 2 else None)
            for behavior, policy in behaviors(rng, problem).items():
                yield name, behavior, masking_cases(problem, policy, accepted(problem, world)), problem.discount


def counts(cases: MaskingCases) -> tuple[int, ...]:
    """Cases with ε ≥ 0, how many of them fail, cases under the corrected condition, how many of them fail."""
    assumed, corrected, fails = cases.assumed, cases.corrected, cases.fails
    return tuple(int(found.sum()) for found in (assumed, assumed & fails, corrected, corrected & fails))


def estimated_counts(cases: MaskingCases) -> tuple[int, ...]:
    """Cases with ε ≥ 0, and how many of them fail by exact regret and by the printed estimator."""
    fails = (cases.assumed, cases.assumed & cases.fails, cases.assumed & cases.fails_estimated)
    return tuple(int(found.sum()) for found in fails)


def with_sum(totals: dict[str, list[tuple[int, ...]]]) -> dict[str, IntArray]:
    """The sum of each entry's counts, and of all entries."""
    sums = {name: np.sum(each, axis=0) for name, each in totals.items()}
    return {**sums, "all": np.sum(list(sums.values()), axis=0)}


def draw(path: Path, found: list[MaskingCases], rng: np.random.Generator) -> None:
    figure, (axes,) = start_figure(width=5.2, height=3.0)
    everything = MaskingCases(*(np.concatenate(values) for values in zip(*found, strict=True)))
    kinds = (
        (everything.assumed & ~everything.fails, BLUE, "o", "ε ≥ 0, the lemma holds"),
        (everything.assumed & everything.fails, ORANGE, "x", "ε ≥ 0, the lemma fails"),
    )
    for which, color, marker, label in kinds:
        rows = rng.choice(np.flatnonzero(which), SHOWN, replace=False)
        x = everything.later[rows] - everything.epsilon[rows]
        axes.plot(x, (everything.cut - everything.complete)[rows], marker, color=color, markersize=3, label=label)
    for line in (axes.axvline, axes.axhline):
        line(0, color=GRAY, linewidth=0.8)
    axes.set(xlim=(-3, 3), ylim=(-2, 3))
    axes.set_xlabel("E_μ[KL̄(μ ‖ π*)] − ε (nats); corrected condition: right of 0")
    axes.set_ylabel("Reg cut − Reg complete (reward)")
    axes.legend(loc="upper left")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-masking.svg")
    rng = np.random.default_rng(0)
    totals: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    estimated: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    found = []
    for world, behavior, cases, discount in collect(rng):
        totals[f"{world}, {behavior}"].append(counts(cases))
        if discount == 1:
            estimated[f"{world}, {behavior}"].append(estimated_counts(cases))
        found.append(cases)
    rows = [
        [name, a, f"{b} ({share(b, a)})", c, f"{d} ({share(d, c)})"] for name, (a, b, c, d) in with_sum(totals).items()
    ]
    print(table(["world, behavior policy", "ε ≥ 0", "lemma fails", "E_μ[KL̄] ≥ ε", "lemma fails"], rows), "\n")
    rows = [
        [name, a, f"{b} ({share(b, a)})", f"{c} ({share(c, a)})"] for name, (a, b, c) in with_sum(estimated).items()
    ]
    print(table(["undiscounted", "ε ≥ 0", "fails by exact regret", "fails by the printed estimator"], rows))
    if path:
        draw(path, found, rng)


if __name__ == "__main__":
    main()
