"""Does a preference model's loss change when the reward is shaped? Regret against anchored rewards (appendix C).

    python experiments/theory_anchors.py

Random trees in which every context offers "I don't know"; 8 responses of a random behavior policy to each of 1000
prompts, no discount. The reward is shaped by a random potential, which changes neither the optimal policy nor any
preference that follows regret. The loss is −log σ of the difference of two scores; the less regretted is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from theory import (
    Problem,
    kl,
    normalize,
    random_policy,
    random_problem,
    random_tree,
    sequential_kl,
    shape,
    solve,
)
from theory.anchoring import REWARD_SCORES, Group, abstention, regret_scores, sample_group
from theory.tree import FloatArray
from theory_common import BLUE, ORANGE, figure_path, save_figure, share, start_figure, table

PROMPTS, SIZE = 1000, 8
ROUNDING = 1e-9


def pairs(scores: FloatArray, across: bool) -> FloatArray:
    """Differences of scores between neighbors of a group, or (across) between the same places of two prompts."""
    return (scores - np.roll(scores, 1, axis=0 if across else 1)).ravel()


def comparisons(rng: np.random.Generator, problem: Problem, behavior: FloatArray) -> Iterator[tuple[str, Group, bool]]:
    """What is compared: complete or partial responses to one prompt, complete responses to two."""
    whole = sample_group(rng, problem.tree, behavior, SIZE, partial=False)
    yield "complete, one prompt", whole, False
    yield "complete, two prompts", whole, True
    yield "partial, one prompt", sample_group(rng, problem.tree, behavior, SIZE, partial=True), False


def changes(
    group: Group, problem: Problem, shaped: Problem, behavior: FloatArray, across: bool
) -> Iterator[tuple[str, float, float]]:
    """Name of each score, mean absolute change of the pair loss, share of pairs whose order turns."""
    exact = regret_scores(group, problem, behavior)
    prefers = np.sign(pairs(exact, across))
    decided = prefers != 0

    def measure(before: FloatArray, after: FloatArray) -> tuple[float, float]:
        margins = [prefers * pairs(scores, across) for scores in (before, after)]
        losses = [np.logaddexp(0, -margin)[decided] for margin in margins]
        turned = (np.abs(margins[0]) > ROUNDING) & (margins[0] * margins[1] < 0)
        return float(np.abs(losses[1] - losses[0]).mean()), float(turned[decided].mean())

    yield "regret", *measure(exact, regret_scores(group, shaped, behavior))
    for name, score in REWARD_SCORES.items():
        yield name, *measure(*(score(group, each.reward, each.discount) for each in (problem, shaped)))


def optimal_after(problem: Problem, behavior: FloatArray) -> Iterator[tuple[str, float]]:
    """Each anchor applied to the reward, and how far the optimal policy moves: KL of responses, mean over prompts.

    Means and deviations are those of the behavior policy's responses or steps, prompt by prompt.
    """
    tree, reward = problem.tree, problem.reward
    best, responses = solve(problem).policy, tree.responses
    chance = np.exp(responses.log_prob(behavior))

    def statistics(values: FloatArray, weights: FloatArray, prompt: FloatArray) -> tuple[FloatArray, FloatArray]:
        def mean(of: FloatArray) -> FloatArray:
            total = np.bincount(prompt, weights=weights, minlength=tree.prompts)
            return np.bincount(prompt, weights=weights * of, minlength=tree.prompts) / total

        center = mean(values)
        spread = np.sqrt(mean((values - center[prompt]) ** 2))
        # A prompt with one response only has no spread, and nothing to choose.
        return center, np.where(spread > ROUNDING, spread, 1.0)

    mine = tree.prompt[tree.source]
    ends = tree.child < 0
    total = responses.gather(reward).sum(axis=1)
    center, spread = (each[mine] for each in statistics(total, chance, responses.prompt))
    reached = np.bincount(responses.edges[responses.mask], np.repeat(chance, responses.lengths), minlength=tree.edges)
    step_center, step_spread = (each[mine] for each in statistics(reward, reached, mine))
    anchored: dict[str, FloatArray] = {
        "RLOO of returns": reward - np.where(ends, center, 0.0),
        "GRPO of returns": (reward - np.where(ends, center, 0.0)) / spread,
        "RLOO of steps": reward - step_center,
        "GRPO of steps": (reward - step_center) / step_spread,
        "abstention subtracted": abstention(tree, reward, telescoped=False, discount=problem.discount),
        "abstention telescoped": abstention(tree, reward, telescoped=True, discount=problem.discount),
    }
    for name, other in anchored.items():
        moved = solve(replace(problem, reward=other)).policy
        first = kl(tree, best, moved)[: tree.prompts]
        later = np.add.reduceat(np.exp(best) * sequential_kl(tree, best, moved, 1.0), tree.first)[: tree.prompts]
        yield name, float((first + later).mean())


def draw(path: Path, turned: dict[str, list[float]], names: list[str]) -> None:
    figure, (axes,) = start_figure(height=3.0)
    place = np.arange(len(turned))
    for number, (name, color) in enumerate(zip(names, ("#56b4e9", BLUE, ORANGE), strict=True)):
        values = [100 * values[number] for values in turned.values()]
        axes.barh(place + 0.26 * (number - 1), values, 0.24, color=color, label=name)
    axes.set_yticks(place, list(turned))
    axes.invert_yaxis()
    axes.set_xlabel("pairs whose order turns when the reward is shaped, %")
    axes.set_xlim(0, 35)
    axes.legend(loc="center right")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-anchors.svg")
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=PROMPTS, depth=6, branching=3, stop=0.15, abstain=True)
    problem = random_problem(rng, tree, beta=1.0, discount=1.0)
    shaped = replace(problem, reward=shape(tree, problem.reward, rng.standard_normal(tree.contexts), 1.0))
    # Abstaining is made rare, or most responses would be that one token.
    behavior = normalize(tree, random_policy(rng, tree) - 2.0 * np.isin(np.arange(tree.edges), tree.first))
    cells: dict[str, list[tuple[float, float]]] = {}
    names = []
    for comparison, group, across in comparisons(rng, problem, behavior):
        names.append(comparison)
        for name, change, turned in changes(group, problem, shaped, behavior, across):
            cells.setdefault(name, []).append((change, turned))
    rows = [
        [name, *(f"{change if change > ROUNDING else 0:.3f} ({share(turned, 1)})" for change, turned in found)]
        for name, found in cells.items()
    ]
    print(table(["score: change of the loss (order turns)", *names], rows), "\n")
    moved = [
        [name, f"{distance if distance > ROUNDING else 0:.3f}"] for name, distance in optimal_after(problem, behavior)
    ]
    print(table(["anchored reward", "KL(π* ‖ π* after), nats a response"], moved))
    if path:
        draw(path, {name: [turned for _, turned in found] for name, found in cells.items()}, names)


if __name__ == "__main__":
    main()
