"""Bias and noise of the sequential KL estimated from sampled continuations, against its exact value.

    python experiments/theory_estimator.py

Policies over 3 tokens, responses of 9, no discount; the trained policy's logits are the behavior policy's plus normal
noise of standard deviation 0.7. Means and variances are exact (all 19,683 responses are enumerated), as reached
by the behavior policy, and averaged over the contexts with the same number of tokens ahead.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from theory import full_tree, normalize, random_policy, random_problem, random_tree, sequential_kl, solve
from theory.estimators import ESTIMATORS, Estimator, Moments, estimates, moments, rms_error
from theory.tree import FloatArray, TokenTree
from theory_common import BLUE, GREEN, ORANGE, PURPLE, figure_path, save_figure, start_figure, table

DEPTH, BRANCHING, NOISE = 9, 3, 0.7
ROLLOUTS = (1, 4, 16, 64, 256)
AHEAD = (1, 2, 4, 8)
COLORS = dict(zip(ESTIMATORS, (ORANGE, BLUE, GREEN, PURPLE), strict=True))


def reach(tree: TokenTree, policy: FloatArray) -> FloatArray:
    """Probability that the policy writes each edge, (E,)."""
    reached = np.exp(policy)
    for level in tree.levels[1:]:
        reached[level.edges] *= reached[tree.parent[tree.source[level.edges]]]
    return reached


def errors(tree: TokenTree, found: Moments, exact: FloatArray, weights: FloatArray) -> dict[str, FloatArray]:
    """Exact value, bias, standard deviation and error of K continuations, averaged over edges: one value for AHEAD."""
    ahead = len(tree.levels) - 1 - tree.level[tree.source]

    def average(values: FloatArray) -> FloatArray:
        return np.array([np.average(values[ahead == n], weights=weights[ahead == n]) for n in AHEAD])

    return {
        "exact": average(exact),
        "bias": average(found.mean - exact),
        "sd": average(np.sqrt(found.variance)),
        **{f"K={k}": average(rms_error(found, exact, k)) for k in ROLLOUTS},
    }


def selected(rng: np.random.Generator) -> str:
    """What one continuation says when it is chosen by its verdict, as those of preference pairs are."""
    tree = random_tree(rng, prompts=2000)
    problem = random_problem(rng, tree, rewards="verifier", beta=1.0, discount=1.0)
    responses, policy = tree.responses, solve(problem).policy
    rows = []
    for name, behavior in (("the reference", problem.reference), ("random", random_policy(rng, tree))):
        value = estimates(tree, behavior, policy, "sum")[:, 0]
        exact = sequential_kl(tree, behavior, policy, 1.0)[responses.edges[:, 0]]
        weight = np.exp(responses.log_prob(behavior)) * (responses.lengths > 1)
        good = problem.reward[tree.ends] == 1
        numbers = [np.average(exact, weights=weight)]
        numbers += [np.average(value, weights=weight * which) for which in (np.ones_like(good), good, ~good)]
        negative = np.average(value < -1e-12, weights=weight * good)
        rows.append([name, *(f"{number:+.3f}" for number in numbers), f"{100 * negative:.1f} %"])
    header = ["behavior policy μ", "exact KL̄", "all", "accepted", "rejected", "accepted below 0"]
    return table(header, rows)


def draw(path: Path, found: dict[Estimator, dict[str, FloatArray]]) -> None:
    figure, (left, right) = start_figure(2, height=2.9)
    for name, numbers in found.items():
        mean = numbers["exact"] + numbers["bias"]
        if name in ("sum", "window mean"):
            left.plot(AHEAD, mean, color=COLORS[name], label=name)
            left.fill_between(AHEAD, mean - numbers["sd"], mean + numbers["sd"], color=COLORS[name], alpha=0.15)
        right.plot(
            ROLLOUTS, [numbers[f"K={k}"][-1] for k in ROLLOUTS], "o-", markersize=3, color=COLORS[name], label=name
        )
    left.plot(AHEAD, found["sum"]["exact"], "k:", label="exact")
    left.set_xticks(AHEAD)
    left.set_xlabel("tokens ahead, T − t")
    left.set_ylabel("estimate ± sd (nats)")
    left.legend(loc="upper left")
    right.set(xscale="log", yscale="log")
    right.set_xlabel("continuations K, 8 tokens ahead")
    right.set_ylabel("root mean square error (nats)")
    right.legend(loc="lower left")
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-estimator.svg")
    rng = np.random.default_rng(0)
    tree = full_tree(depth=DEPTH, branching=BRANCHING)
    behavior = random_policy(rng, tree)
    policy = normalize(tree, behavior + NOISE * rng.standard_normal(tree.edges))
    exact, weights = sequential_kl(tree, behavior, policy, 1.0), reach(tree, behavior)
    found: dict[Estimator, dict[str, FloatArray]] = {}
    rows = []
    for name in ESTIMATORS:
        numbers = errors(tree, moments(tree, behavior, estimates(tree, behavior, policy, name)), exact, weights)
        found[name] = numbers
        for place, ahead in enumerate(AHEAD):
            shown = ("exact", "bias", "sd", "K=1", "K=16", "K=256")
            # + 0.0 after rounding: a bias of −1e−17 should not print as −0.
            rows.append([f"{name}, {ahead} ahead", *(f"{round(numbers[key][place], 3) + 0.0:.3f}" for key in shown)])
    print(table(["estimator, tokens ahead", "exact", "bias", "sd", "error K=1", "K=16", "K=256"], rows), "\n")
    print(selected(rng))
    if path:
        draw(path, found)


if __name__ == "__main__":
    main()
