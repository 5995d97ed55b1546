"""Listwise RePO: by the formula written out, and as RePO where each list has one rejected response."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError
from regretless.objectives import Logps, build

LENGTHS = [7, 1, 4, 5]
LISTS = torch.tensor([[0, 1, 3], [2, 1, -1]])


@pytest.mark.parametrize(("options", "weight"), [({}, 1.0), ({"rejected_weight": 0}, 0.0), ({"sft_weight": 0.5}, 1.0)])
def test_listwise_repo_is_the_softmax_over_the_chosen_and_all_worse_responses(
    options: dict[str, Any], weight: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch(LENGTHS)
    output = build("repo_listwise", beta=0.3, **options)(Logps(**batch), LISTS)
    scores = build("repo", beta=0.3)(Logps(**batch), LISTS[:, :2]).scores
    assert scores is not None
    for number, (better, *worse) in enumerate([[0, 1, 3], [2, 1]]):
        chosen, others = math.exp(scores[better]), sum(math.exp(weight * scores[row]) for row in worse)
        expected = -math.log(chosen / (chosen + others))
        expected -= options.get("sft_weight", 0) * float(batch["policy"][better, : LENGTHS[better]].mean())
        assert output.pair_losses[number].item() == pytest.approx(expected, rel=1e-12)
    assert output.loss.item() == pytest.approx(output.pair_losses.mean().item())


@pytest.mark.parametrize("options", [{}, {"formulation": "released", "sft_weight": 0.1}, {"discount": 0.9}])
def test_listwise_repo_of_one_against_one_is_repo(
    options: dict[str, Any], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch(LENGTHS)
    found = [build(name, **options)(Logps(**batch), LISTS[:, :2]) for name in ("repo_listwise", "repo")]
    losses = [output.pair_losses.tolist() for output in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    gradients = [torch.autograd.grad(output.loss, batch["policy"])[0] for output in found]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{}, {"formulation": "released"}])
def test_listwise_repo_gradients_are_those_of_finite_differences(
    options: dict[str, Any], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch(LENGTHS, padding=0.0)

    def losses(policy: Tensor) -> Tensor:
        return build("repo_listwise", **options)(Logps(**{**batch, "policy": policy}), LISTS).pair_losses

    assert torch.autograd.gradcheck(losses, (batch["policy"],))


@pytest.mark.parametrize("lists", [[[0, -1]], [[-1, 0, 1]], [[0, 1, -2]], [[0, 1, 4]]])
def test_lists_that_name_no_row_where_one_has_to_be_are_refused(
    lists: list[list[int]], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    with pytest.raises(ValueError, match=r"repo_listwise: pairs name rows .*, but Logps has rows 0…3"):
        build("repo_listwise")(Logps(**make_batch(LENGTHS)), torch.tensor(lists))


def test_more_rows_than_two_where_a_method_compares_pairs_are_refused(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    with pytest.raises(ValueError, match=r"repo: expected pairs of shape \(P ≥ 1, 2\), got \(2, 3\)"):
        build("repo")(Logps(**make_batch(LENGTHS)), LISTS)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("repo_listwise", {"ld_alpha": 0.5}, "ld_alpha: repo_listwise compares a response with several"),
        ("repo_listwise", {"importance": "mean"}, "importance: repo_listwise has one loss for several"),
        (
            "weighted_sum",
            {"terms": [{"objective": "repo_listwise"}]},
            "terms.0.objective: repo_listwise comp",
        ),
    ],
)
def test_listwise_repo_with_what_is_of_pairs_is_refused(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(name, **options)
