"""Unpaired RePO: the released class written out, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.objectives import Logps, build

PAIRS = torch.tensor([[0, 1], [2, 1]])
LENGTHS = [7, 1, 4]


def _released(policy: Tensor, reference: Tensor, behavior: Tensor) -> float:
    """Mean over tokens of the local term minus the mean divergence from that token on."""
    length = len(policy)
    total = 0.0
    for t in range(length):
        ahead = [(behavior[s] - policy[s]).item() for s in range(t, length)]
        total += (policy[t] - reference[t]).item() - sum(ahead) / len(ahead)
    return total / length


@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_unpaired_repo_is_the_released_class_written_out(
    sft_weight: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch(LENGTHS)
    output = build("repo_unpaired", beta=0.7, sft_weight=sft_weight)(Logps(**batch), PAIRS)
    rows = [[batch[name][row, :n] for name in ("policy", "reference", "behavior")] for row, n in enumerate(LENGTHS)]
    scores = [0.7 * _released(*values) for values in rows]
    expected = [
        [1 + math.log1p(math.exp(-scores[better])), 1 + math.log1p(math.exp(scores[worse]))]
        for better, worse in PAIRS.tolist()
    ]
    nll = [-float(batch["policy"][better, : LENGTHS[better]].mean()) for better, _ in PAIRS.tolist()]
    for number, losses in enumerate(expected):
        wanted = [loss + sft_weight * nll[number] for loss in losses]
        assert output.pair_losses[number].tolist() == pytest.approx(wanted, rel=1e-12)
    mean = sum(map(sum, expected)) / 4 + sft_weight * sum(nll) / 2
    assert output.loss.item() == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"formulation": "paper"}, {"granularity": "step", "discount": 0.9}])
def test_unpaired_repo_gradients_are_those_of_finite_differences(
    options: dict[str, Any], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch(LENGTHS, padding=0.0)
    batch["steps"] = torch.arange(7).expand(3, 7) // 2
    objective = build("repo_unpaired", **options)

    def loss(policy: Tensor) -> Tensor:
        return objective(Logps(**{**batch, "policy": policy}), PAIRS).loss

    assert torch.autograd.gradcheck(loss, (batch["policy"],))


def test_unpaired_repo_is_repo_with_an_abstention_of_score_zero_between_chosen_and_rejected(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    batch = make_batch([7, 3, 4])
    for name in ("reference", "behavior"):  # π = r = m: the score of the row is 0
        batch[name][1] = batch["policy"][1].detach()
    logps = Logps(**batch)
    paired = build("repo", beta=0.1)(logps, torch.tensor([[0, 1], [1, 2]])).pair_losses
    alone = build("repo_unpaired", formulation="paper")(logps, torch.tensor([[0, 2]])).pair_losses
    assert alone.tolist() == [pytest.approx(paired.tolist(), rel=1e-12)]
