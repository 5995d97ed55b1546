"""Two writers of very different skill on the same prompts: which labels and which judge does each loss need?

    python experiments/theory_writers.py

Random trees, every response enumerated, infinitely many preferences between responses of an able writer (optimal at
3 β) and a random one, each drawn half the time. Judges: the return; the exact regret of the response under the policy
that wrote it; a judge that reads only the first token, and scores what it leads to on average, whoever continues; and
the return minus the mean return of the response's writer, an advantage (`pair.rule=above_writer`).
RePO's behavior log-probabilities are known, unknown (RePO_det), or swapped between the two writers. The numbers are
what the policy that minimizes each loss leaves of V* − V, which the reference has to gain; the best of three β counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from theory import Problem, evaluate, random_policy, random_problem, random_tree, regret, solve
from theory.tree import FloatArray
from theory_common import BLUE, GRAY, ORANGE, PURPLE, figure_path, save_figure, start_figure, table
from theory_repo import BETAS, Data, minimize
from torch import Tensor
from torch.nn.functional import logsigmoid

from regretless.objectives import Logps, build
from regretless.objectives.base import margins

PROMPTS = 20
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("dpo", {}),
    "DPO, λ = 0.5": ("repo", {"discount": 0.0, "rejected_weight": 0.5}),
    "RePO, labels known": ("repo", {}),
    "RePO, labels known, discount = 1": ("repo", {"discount": 1.0}),
    "RePO, labels swapped": ("repo", {}),
    "RePO_det (labels unknown)": ("repo_det", {}),
}
"""Without its weights (`discount` 0) RePO is DPO, with λ as an option."""
EXACT, EXACT_SWAPPED = "exact regret, labels known", "exact regret, labels swapped"


class Writers:
    """The responses of two writers as separate items, their pairs within each prompt, and the judges' scores."""

    def __init__(self, problem: Problem, able: FloatArray, random: FloatArray) -> None:
        self.problem = problem
        self.data = [Data(problem, policy) for policy in (able, random)]
        responses = problem.tree.responses
        prompt = np.tile(responses.prompt, 2)
        same = prompt[:, None] == prompt[None, :]
        self.pairs = torch.from_numpy(np.argwhere(same & ~np.eye(len(prompt), dtype=np.bool_)))
        chance = np.concatenate([np.exp(responses.log_prob(policy)) / 2 for policy in (able, random)])
        self.chance = torch.from_numpy(chance)[self.pairs].prod(dim=1)
        returns = responses.gather(problem.reward).sum(axis=1)
        first = responses.edges[:, 0]
        starts = [evaluate(problem, policy).q[first] for policy in (able, random)]
        share = [np.exp(policy)[first] for policy in (able, random)]
        start = (share[0] * starts[0] + share[1] * starts[1]) / (share[0] + share[1])
        means = [
            np.bincount(responses.prompt, weights=np.exp(responses.log_prob(policy)) * returns)[responses.prompt]
            for policy in (able, random)
        ]
        regrets = [-responses.gather(regret(problem, policy)).sum(axis=1) for policy in (able, random)]
        self.judges = {
            "return": torch.from_numpy(np.tile(returns, 2)),
            "regret of the writer": torch.from_numpy(np.concatenate(regrets)),
            "first token": torch.from_numpy(np.tile(start, 2)),
            "above the writer": torch.from_numpy(np.concatenate([returns - mean for mean in means])),
        }

    def weights(self, judge: str) -> Tensor:
        """Probability of drawing a pair and preferring its first response, (pairs,), over all prompts alike."""
        one, other = self.judges[judge][self.pairs].unbind(dim=1)
        return self.chance * torch.sigmoid(one - other)

    def loss(self, name: str, beta: float) -> Callable[[Tensor], Tensor]:
        """Loss of every pair (pairs,) as a function of the log-policy (E,)."""
        labelled = self.data[::-1] if "swapped" in name else self.data
        if name in (EXACT, EXACT_SWAPPED):

            def exact(policy: Tensor) -> Tensor:
                scores = torch.cat([data.exact_scores(policy, beta) for data in labelled])
                return -logsigmoid(margins(scores, self.pairs))

            return exact
        objective, options = LOSSES[name]
        built = build(objective, beta=beta, **options)
        mask, reference, written = (
            torch.cat([getattr(data, field) for data in labelled]) for field in ("mask", "reference", "written")
        )

        def sampled(policy: Tensor) -> Tensor:
            tokens = torch.cat([policy[data.edges] for data in labelled])
            return built(Logps(tokens, mask=mask, reference=reference, behavior=written), self.pairs).pair_losses

        return sampled


def draw(path: Path, left: dict[str, dict[str, float]]) -> None:
    figure, (chart,) = start_figure(height=3.4)
    place = np.arange(len(left))
    colors = (ORANGE, BLUE, GRAY, PURPLE)
    for number, (judge, color) in enumerate(zip(next(iter(left.values())), colors, strict=True)):
        chart.barh(place + 0.2 * (number - 1.5), [row[judge] for row in left.values()], 0.18, color=color, label=judge)
    chart.set_yticks(place, list(left))
    chart.invert_yaxis()
    chart.axvline(1, color=GRAY, linewidth=0.8, linestyle="--")
    chart.set_xlabel("(V* − V) / (V* − V_ref)")
    figure.legend(*chart.get_legend_handles_labels(), title="judge", loc="outside upper center", ncols=4)
    save_figure(figure, path)


def main() -> None:
    path = figure_path(__doc__, "theory-writers.svg")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    problem = random_problem(rng, random_tree(rng, prompts=PROMPTS, depth=4, branching=3), beta=1.0, discount=1.0)
    able = solve(replace(problem, beta=3 * problem.beta)).policy
    writers = Writers(problem, able, random_policy(rng, problem.tree))
    left: dict[str, dict[str, float]] = {}
    for judge in writers.judges:
        weights = writers.weights(judge)
        for name in (*LOSSES, EXACT, EXACT_SWAPPED):
            found = (minimize(writers.data[0], writers.loss(name, beta), weights) for beta in BETAS)
            left.setdefault(name, {})[judge] = min(writers.data[0].left(policy) for policy in found)
    rows = [[name, *(f"{100 * value:.0f} %" for value in row.values())] for name, row in left.items()]
    print(table(["loss", *writers.judges], rows))
    if path:
        draw(path, left)


if __name__ == "__main__":
    main()
