"""Modifiers of any objective: weights of long tails, importance weights, and the behavior policy as the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import OBJECTIVES, Logps, build

MakeBatch = Callable[..., dict[str, Tensor]]
BETA = 0.1
PAIRS = torch.tensor([[0, 1], [1, 2]])
"""Of responses of 4, 2 and 1 tokens: the second is the shorter one of one pair, and the longer one of the other."""

LENGTHS = [
    name
    for name in OBJECTIVES
    if "rejected" in build(name).needs and name not in ("kto", "simpo", "orpo", "repo_listwise")
]
"""Methods that may compare lengths."""


def _logps() -> Logps:
    ratios = [[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.0, 0.0], [0.25, 0.0, 0.0, 0.0]]
    reference = torch.full((3, 4), -5.0, dtype=torch.float64)
    behavior = torch.tensor([[-4.0, -3.0, -2.0, -2.0], [-6.0, -4.0, 0, 0], [-4.0, 0, 0, 0]], dtype=torch.float64)
    policy = (reference + torch.tensor(ratios, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    return Logps(policy, mask=mask, reference=reference, behavior=behavior)


def _loss(margin: float) -> float:
    return math.log1p(math.exp(-BETA * margin))


def test_ld_alpha_when_a_response_is_in_two_pairs_then_each_pair_has_its_own_tail() -> None:
    output = build("dpo", beta=BETA, ld_alpha=0.5)(_logps(), PAIRS)
    # In the first pair two tokens are shared, in the second one; the tails count half.
    first, second = (1 + 2 + 0.5 * (3 + 4), -1 + 0.5), (-1 + 0.5 * 0.5, 0.25)
    expected = [_loss(first[0] - first[1]), _loss(second[0] - second[1])]
    assert output.pair_losses.tolist() == pytest.approx(expected)
    rewards = output.pair_rewards(PAIRS)
    assert rewards is not None
    assert rewards.flatten().tolist() == pytest.approx([BETA * value for value in (*first, *second)])
    # Without tails that count, tokens beyond the shorter response have no gradient.
    logps = _logps()
    loss = build("dpo", ld_alpha=0.0)(logps, PAIRS[:1]).loss
    (gradient,) = torch.autograd.grad(loss, logps.policy)
    assert (gradient[0, :2] != 0).all() and (gradient[0, 2:] == 0).all()


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name in LENGTHS])
def test_ld_alpha_of_zero_when_lengths_are_equal_then_nothing_changes_for_any_objective(
    name: str, make_batch: MakeBatch
) -> None:
    logps = Logps(**make_batch([3, 3, 3]))
    expected, found = (build(name, ld_alpha=alpha)(logps, PAIRS) for alpha in (1.0, 0.0))
    torch.testing.assert_close(found.pair_losses, expected.pair_losses, rtol=1e-12, atol=0)
    assert found.pair_rewards(PAIRS) is not None
    torch.testing.assert_close(found.pair_rewards(PAIRS), expected.pair_rewards(PAIRS), rtol=1e-12, atol=0)


SOFT = [
    name
    for name in OBJECTIVES
    if "rejected" in build(name).needs and build(name).zero_point is None and "soft_labels" not in build(name).refuses
]


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("more", [{}, {"importance": "mean"}, {"ld_alpha": 0.5}])
def test_soft_labels_when_pairs_have_probabilities_then_loss_and_gradient_are_the_mix_of_both_directions(
    name: str, more: dict[str, Any], make_batch: MakeBatch
) -> None:
    if "ld_alpha" in more and name not in LENGTHS:
        pytest.skip("divides by the length of a response")
    batch, share = make_batch([4, 2, 1]), torch.tensor([0.8, 0.3], dtype=torch.float64)
    policy = batch.pop("policy").detach().requires_grad_()
    logps = Logps(policy, **batch)
    soft = build(name, soft_labels=True, **more)(logps, PAIRS, share)
    one, other = (build(name, **more)(logps, pairs) for pairs in (PAIRS, PAIRS.flip(1)))
    mix = share * one.pair_losses + (1 - share) * other.pair_losses
    torch.testing.assert_close(soft.pair_losses, mix, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss, policy, retain_graph=True)[0] for loss in (soft.loss, mix.mean())]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    rewards = soft.pair_rewards(PAIRS), one.pair_rewards(PAIRS)
    assert rewards == (None, None) or torch.equal(*rewards)  # those of the pair as it is
    certain = build(name, soft_labels=True, **more)(logps, PAIRS, torch.ones(2)).pair_losses
    assert torch.equal(certain, one.pair_losses)
    # Probabilities alone change nothing.
    assert torch.equal(build(name, **more)(logps, PAIRS, share).pair_losses, one.pair_losses)


def test_soft_labels_of_dpo_when_all_are_equal_then_they_are_conservative_smoothing() -> None:
    logps = _logps()
    soft = build("dpo", beta=BETA, soft_labels=True)(logps, PAIRS, torch.tensor([0.9, 0.9], dtype=torch.float64))
    smooth = build("dpo", beta=BETA, label_smoothing=0.1, smoothing="conservative")(logps, PAIRS)
    torch.testing.assert_close(soft.pair_losses, smooth.pair_losses, rtol=1e-12, atol=0)
    # By hand, from margins of 10.5 and −0.75 nats.
    margins = (10.5, -0.75)
    by_hand = [0.9 * _loss(margin) + 0.1 * _loss(-margin) for margin in margins]
    assert soft.pair_losses.tolist() == pytest.approx(by_hand, rel=1e-12)
    slopes = [BETA * (1 / (1 + math.exp(-BETA * margin)) - 0.9) for margin in margins]
    (gradient,) = torch.autograd.grad(soft.pair_losses.sum(), logps.policy)
    by_hand = [slopes[0], -slopes[0] + slopes[1], -slopes[1]]
    assert gradient[:, 0].tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sft", {"soft_labels": True}, "soft_labels: sft reads no rejected response"),
        ("kto", {"soft_labels": True}, "soft_labels: kto has losses of single responses"),
        ("repo_unpaired", {"soft_labels": True}, "soft_labels: repo_unpaired has losses of single responses"),
        ("repo_listwise", {"soft_labels": True}, "soft_labels: repo_listwise has losses of lists"),
        (
            "weighted_sum",
            {"terms": [{"objective": "dpo", "soft_labels": True}]},
            "terms.0.soft_labels: it is for all terms",
        ),
    ],
)
def test_soft_labels_when_no_pair_can_be_flipped_then_they_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, **settings)


@pytest.mark.parametrize("given", [None, torch.tensor([0.5]), torch.tensor([0.5, 1.1]), torch.tensor([0.5, math.nan])])
def test_soft_labels_when_probabilities_are_missing_or_none_then_it_is_an_error(given: Tensor | None) -> None:
    with pytest.raises(DataError, match="dpo: soft_labels needs a probability from 0 to 1 for each of 2 pairs"):
        build("dpo", soft_labels=True)(_logps(), PAIRS, given)


@pytest.mark.parametrize(
    ("kind", "clip", "weights"),
    [
        # π − μ of the responses: 1 token each of 0, 0, 0 and 1; 0 and −0.5; −0.75.
        ("sum", 1.0, [1.0, math.exp(-0.5), math.exp(-0.75)]),
        ("sum", 2.0, [2.0, math.exp(-0.5), math.exp(-0.75)]),
        ("sum", 9.0, [math.e, math.exp(-0.5), math.exp(-0.75)]),
        ("mean", 1.0, [1.0, math.exp(-0.25), math.exp(-0.75)]),
        ("mean", 9.0, [math.exp(0.25), math.exp(-0.25), math.exp(-0.75)]),
    ],
)
def test_importance_when_ratios_are_known_then_losses_have_their_weights_and_weights_have_no_gradient(
    kind: str, clip: float, weights: list[float]
) -> None:
    logps = _logps()
    plain = build("dpo", beta=BETA)(logps, PAIRS)
    weighted = build("dpo", beta=BETA, importance=kind, importance_clip=clip)(logps, PAIRS)
    products = torch.tensor([weights[0] * weights[1], weights[1] * weights[2]], dtype=torch.float64)
    torch.testing.assert_close(weighted.pair_losses, plain.pair_losses * products)
    (expected,) = torch.autograd.grad((plain.pair_losses * products).mean(), logps.policy)
    (gradient,) = torch.autograd.grad(weighted.loss, logps.policy)
    torch.testing.assert_close(gradient, expected)
    # Sides with losses of their own, and a method without a rejected side, have the weights of one response.
    sides = build("kto", importance=kind, importance_clip=clip)(replace(logps, z_ref=0.2), PAIRS).pair_losses
    unweighted = build("kto")(replace(logps, z_ref=0.2), PAIRS).pair_losses
    assert (sides / unweighted).flatten().tolist() == pytest.approx([weights[row] for row in (0, 1, 1, 2)])
    chosen = build("sft", importance=kind, importance_clip=clip)(logps, PAIRS).pair_losses
    assert (chosen / build("sft")(logps, PAIRS).pair_losses).tolist() == pytest.approx(weights[:2])


def test_importance_when_the_ratio_overflows_then_the_weight_is_the_largest_allowed() -> None:
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    behavior = torch.full((2, 3), -1000.0)
    logps = Logps(policy, mask=torch.ones(2, 3), reference=behavior, behavior=behavior)
    loss = build("dpo", importance="sum", importance_clip=1.5)(logps, PAIRS[:1]).loss
    assert loss.item() == pytest.approx(1.5**2 * math.log(2))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if "reference" in build(name).needs])
def test_behavior_as_the_reference_when_chosen_then_no_reference_is_required(name: str, make_batch: MakeBatch) -> None:
    if {"reference_kl", "z_ref"} & build(name).needs:
        with pytest.raises(ConfigError, match=f"reference: {name} needs the reference model itself"):
            build(name, reference="behavior")
        return
    objective = build(name, reference="behavior")
    assert "reference" not in objective.required and "behavior" in objective.required
    batch = make_batch([4, 2, 3])
    del batch["reference"]
    found = objective(Logps(**batch), PAIRS)
    expected = build(name)(Logps(**batch, reference=batch["behavior"]), PAIRS)
    torch.testing.assert_close(found.pair_losses, expected.pair_losses, rtol=0, atol=0)
    del batch["behavior"]
    with pytest.raises(DataError, match=f"{name} needs `behavior`: .*leave out importance and reference=behavior"):
        objective(Logps(**batch), PAIRS)


@pytest.mark.parametrize(
    ("name", "given", "problems"),
    [
        (
            "sft",
            {"reference": "behavior", "ld_alpha": 0.5},
            ("reference: sft has no reference", "ld_alpha: sft reads no"),
        ),
        ("repo", {"reference": "behavior", "reference_weight": 0.0}, ("reference: repo has no reference",)),
        (
            "kto",
            {"reference": "behavior", "ld_alpha": 0.5, "reference_point": "paired"},
            ("reference: kto needs the reference model itself for its zero point", "ld_alpha: the zero point of kto"),
        ),
        ("simpo", {"ld_alpha": 0.5}, ("ld_alpha: simpo divides by the length of a response and has no reference",)),
        ("orpo", {"ld_alpha": 0.0}, ("ld_alpha: orpo divides by the length of a response and has no reference",)),
        (
            "dpo",
            {"reference": "policy", "ld_alpha": 1.5, "importance": "max", "importance_clip": 0},
            ("reference:", "ld_alpha:", "importance:", "importance_clip:"),
        ),
        (
            "dpo",
            {"importance_clip": 2.0, "smoothing": "conservative"},
            (
                "importance_clip: has no effect without importance; set importance too",
                "smoothing: has no effect without label_smoothing; set label_smoothing too",
            ),
        ),
    ],
)
def test_modifiers_when_a_method_cannot_have_them_then_all_problems_are_reported(
    name: str, given: dict[str, Any], problems: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, **given)
    assert len(caught.value.problems) == len(problems)
    for problem in problems:
        assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems
