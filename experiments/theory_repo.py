"""The loss as implemented against the theory: what RePO's score estimates, and which judge it recovers π* from.

    python experiments/theory_repo.py

Random trees, every response enumerated. First, the expected score of `regretless.objectives` against the exact negative
regret. Then infinitely many preferences over pairs of the behavior policy's responses, from a judge who follows
either the return or the regret of the responses (no discount, β = 1): the policy that minimizes each loss on them, and
how much of V* − V, which the reference has to gain in mean over the prompts, that policy leaves. Every loss has the
same choice of its own β (½, 1 or 2), and the best of the three counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from theory import (
    Problem,
    deterministic_policy,
    evaluate,
    random_policy,
    random_problem,
    random_tree,
    regret,
    reward_of,
    solve,
)
from theory.tree import FloatArray
from theory_common import BLUE, GRAY, ORANGE, figure_path, magnitude, save_figure, start_figure, table
from torch import Tensor
from torch.nn.functional import logsigmoid

from regretless.objectives import Logps, build
from regretless.objectives.base import margins

PROMPTS, STEPS = 10, 1500
BETAS = (0.5, 1.0, 2.0)
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "repo": ("repo", {}),
    "repo, discount=1": ("repo", {"discount": 1.0}),
    "repo_det": ("repo_det", {}),
    "repo, released": ("repo", {"formulation": "released"}),
}
EXACT = "exact regret"


class Data:
    """All responses of a forest, their pairs within each prompt, and the scores of both losses and judges."""

    def __init__(self, problem: Problem, behavior: FloatArray) -> None:
        self.problem, self.behavior = problem, behavior
        responses = problem.tree.responses
        self.edges, self.mask = (torch.from_numpy(each) for each in (responses.edges, responses.mask))
        self.reference, self.written = (
            torch.from_numpy(responses.gather(policy)) for policy in (problem.reference, behavior)
        )
        self.continues = torch.from_numpy(np.exp(responses.future(responses.gather(behavior))))
        same = responses.prompt[:, None] == responses.prompt[None, :]
        self.pairs = torch.from_numpy(np.argwhere(same & ~np.eye(len(same), dtype=np.bool_)))
        chance = torch.from_numpy(np.exp(responses.log_prob(behavior)))
        self.chance = chance[self.pairs].prod(dim=1)
        self.judges = {
            "return": torch.from_numpy(responses.gather(problem.reward).sum(axis=1)),
            "regret": torch.from_numpy(-responses.gather(regret(problem, behavior)).sum(axis=1)),
        }

    def policy(self, logits: Tensor) -> Tensor:
        """Log-policy (E,) of logits (E,), with gradient."""
        source = torch.from_numpy(self.problem.tree.source)
        total = torch.zeros(self.problem.tree.contexts, dtype=torch.float64).index_add(0, source, logits.exp())
        return logits - total.log()[source]

    def logps(self, policy: Tensor) -> Logps:
        """Token log-probabilities of all responses."""
        return Logps(policy[self.edges], mask=self.mask, reference=self.reference, behavior=self.written)

    def exact_scores(self, policy: Tensor, beta: float) -> Tensor:
        """Negative regret of every response, (R,): β Σ_t (log π/π_ref − KL̄), KL̄ averaged over all continuations."""
        along = policy[self.edges] * self.mask
        ratio = along - self.written
        future = ratio.flip(1).cumsum(1).flip(1) - ratio
        mean = torch.zeros(len(policy), dtype=torch.float64).index_add(
            0, self.edges[self.mask], (self.continues * future)[self.mask]
        )
        return beta * ((along - self.reference) + mean[self.edges] * self.mask).sum(dim=1)

    def weights(self, judge: str) -> Tensor:
        """Probability of drawing a pair and preferring its first response, (pairs,), over all prompts alike."""
        first, second = self.judges[judge][self.pairs].unbind(dim=1)
        return self.chance * torch.sigmoid(first - second)

    def loss(self, name: str, beta: float) -> Callable[[Tensor], Tensor]:
        """Loss of every pair (pairs,) as a function of the log-policy (E,)."""
        if name == EXACT:
            return lambda policy: -logsigmoid(margins(self.exact_scores(policy, beta), self.pairs))
        objective, options = OBJECTIVES[name]
        built = build(objective, beta=beta, **options)
        return lambda policy: built(self.logps(policy), self.pairs).pair_losses

    def left(self, policy: Tensor) -> float:
        """Mean over prompts of V* − V of a policy, as a share of the reference's."""
        best = solve(self.problem).v
        values = (best - evaluate(self.problem, each).v for each in (policy.numpy(), self.problem.reference))
        ours, theirs = (float(value[: self.problem.tree.prompts].mean()) for value in values)
        return ours / theirs


def minimize(data: Data, loss: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """The log-policy (E,) that minimizes the weighted loss, from the reference on."""
    logits = torch.from_numpy(data.problem.reference.copy()).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits],
        max_iter=STEPS,
        history_size=50,
        tolerance_grad=1e-5,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (weights * loss(data.policy(logits))).sum()
        value.backward()
        return value

    optimizer.step(closure)
    return data.policy(logits).detach()


def behaviors(rng: np.random.Generator, problem: Problem) -> Iterator[tuple[str, FloatArray]]:
    """Who wrote the responses."""
    yield "random", random_policy(rng, problem.tree)
    yield "reference", problem.reference
    yield "optimal at 3 β", solve(replace(problem, beta=3 * problem.beta)).policy


def expectations(rng: np.random.Generator) -> list[list[str]]:
    """RePO's mean score of a response under its writer, and the exact negative regret, over 1000 prompts.

    The trained policy is made optimal by choice of the reward, with a random potential, so every policy is covered.
    """
    tree = random_tree(rng, prompts=1000)
    rows = []
    for name, behavior, discount, options in (
        ("repo", random_policy(rng, tree), 0.9, {"discount": 0.9}),
        ("repo", random_policy(rng, tree), 1.0, {"discount": 1.0}),
        ("repo", random_policy(rng, tree), 1.0, {}),
        ("repo", random_policy(rng, tree), 1.0, {"formulation": "released"}),
        ("repo_det", random_policy(rng, tree), 1.0, {"discount": 1.0}),
        ("repo_det", deterministic_policy(rng, tree), 1.0, {"discount": 1.0}),
    ):
        policy, reference = random_policy(rng, tree), random_policy(rng, tree)
        reward = reward_of(tree, policy, reference, rng.standard_normal(tree.contexts), beta=1.0, discount=discount)
        problem = Problem(tree=tree, reward=reward, reference=reference, discount=discount)
        responses = tree.responses
        chance = np.exp(responses.log_prob(behavior))
        written = chance > 0
        exact = -responses.gather(regret(problem, behavior)).sum(axis=1)
        gathered = [torch.from_numpy(responses.gather(each)[written]) for each in (policy, reference, behavior)]
        logps = Logps(
            gathered[0], mask=torch.from_numpy(responses.mask[written]), reference=gathered[1], behavior=gathered[2]
        )
        scores = build(name, **options)(logps, torch.tensor([[0, 1]])).scores
        assert scores is not None
        means = [
            np.bincount(responses.prompt[written], weights=(chance[written] * each))
            for each in (scores.numpy(), exact[written])
        ]
        gap = float(np.abs(means[0] - means[1]).max())
        label = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
        who = "deterministic" if np.isin(chance, (0, 1)).all() else "random"
        shown = magnitude(1e-13) if gap < 1e-12 else f"{gap:.2f}"
        rows.append([label, who, f"{discount:g}", f"{means[1].mean():.3f}", f"{means[0].mean():.3f}", shown])
    return rows


def draw(path: Path, left: dict[str, dict[str, float]], writers: list[str]) -> None:
    figure, axes = start_figure(2, height=3.0)
    names = [*OBJECTIVES, EXACT]
    place = np.arange(len(names))
    for judge, chart in zip(("return", "regret"), axes, strict=True):
        for number, (writer, color) in enumerate(zip(writers, (ORANGE, GRAY, BLUE), strict=True)):
            values = [left[name][f"{judge}, {writer}"] for name in names]
            chart.barh(place + 0.26 * (number - 1), values, 0.24, color=color, label=writer)
        chart.set_yticks(place, names if judge == "return" else [""] * len(names))
        chart.invert_yaxis()
        chart.axvline(1, color=GRAY, linewidth=0.8, linestyle="--")
        chart.set_xlabel(f"(V* − V) / (V* − V_ref), judge: {judge}")
    figure.legend(
        *axes[0].get_legend_handles_labels(), title="responses written by", loc="outside upper center", ncols=3
    )
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-repo.svg")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    header = ["objective", "behavior policy", "γ", "exact −regret", "mean score", "largest gap"]
    print(table(header, expectations(rng)), "\n")
    problem = random_problem(rng, random_tree(rng, prompts=PROMPTS, depth=4, branching=3), beta=1.0, discount=1.0)
    left: dict[str, dict[str, float]] = {}
    writers = []
    for writer, behavior in behaviors(rng, problem):
        data = Data(problem, behavior)
        writers.append(writer)
        for judge in data.judges:
            weights = data.weights(judge)
            for name in (*OBJECTIVES, EXACT):
                best = min(data.left(minimize(data, data.loss(name, beta), weights)) for beta in BETAS)
                left.setdefault(name, {})[f"{judge}, {writer}"] = best
    columns = [f"{judge}, {writer}" for judge in ("return", "regret") for writer in writers]
    rows = [[name, *(f"{100 * left[name][column]:.0f} %" for column in columns)] for name in left]
    print(table(["loss", *columns], rows))
    if path:
        draw(path, left, writers)


if __name__ == "__main__":
    main()
