"""Methods other than RePO: hand values, gradients, and the variants that are options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import OBJECTIVES, Logps, Output, build

# Two responses of two and four tokens; summed log-ratios +1 and −2, token means +1/2 and −1/2.
PAIRS = torch.tensor([[0, 1]])
BETA = 0.1
MARGIN = BETA * 3


def _logps(**more: Any) -> Logps:
    policy = torch.tensor([[-1.0, -1.0, 0.0, 0.0], [-2.0, -1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-2.0, -1.0, 0.0, 0.0], [-1.0, -1.0, -0.5, -0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    return Logps(policy, mask=mask, reference=reference, **more)


def _log1pexp(value: float) -> float:
    return math.log1p(math.exp(value))


def test_dpo_with_label_smoothing_then_its_mean_over_flipped_pairs_is_the_loss_of_the_true_ones() -> None:
    share, flipped = 0.2, PAIRS.flip(1)
    objective, plain = build("dpo", beta=BETA, label_smoothing=share), build("dpo", beta=BETA)
    by_hand = ((1 - share) * _log1pexp(-MARGIN) - share * _log1pexp(MARGIN)) / (1 - 2 * share)
    assert objective(_logps(), PAIRS).loss.item() == pytest.approx(by_hand)
    expected = (1 - share) * objective(_logps(), PAIRS).loss + share * objective(_logps(), flipped).loss
    assert expected.item() == pytest.approx(plain(_logps(), PAIRS).loss.item())
    for wrong in (0.5, -0.1, True):
        with pytest.raises(ConfigError, match="label_smoothing"):
            build("dpo", label_smoothing=wrong)


def test_dpo_by_hand_gives_the_log_sigmoid_of_the_margin_and_rewards() -> None:
    output = build("dpo", beta=BETA)(_logps(), PAIRS)
    assert output.loss.item() == pytest.approx(_log1pexp(-MARGIN))
    assert output.scores is None
    assert output.rewards is not None
    assert output.rewards.tolist() == pytest.approx([BETA * 1, BETA * -2])
    assert not output.rewards.requires_grad


@pytest.mark.parametrize(
    ("name", "settings", "loss", "rewards"),
    [
        # Sums of the log-probabilities are −2 and −5, their means −1 and −1.25.
        ("simpo", {"beta": 2.0, "gamma": 0.4}, _log1pexp(-(2 * 0.25 - 0.4)), [-2.0, -2.5]),
        ("cpo", {"beta": 0.2, "sft_weight": 0.3}, _log1pexp(-0.2 * 3) + 0.3 * 1.0, [-0.4, -1.0]),
        (
            "orpo",
            {"beta": 0.2},
            1.0 + 0.2 * _log1pexp(math.log(math.e - 1) - math.log(math.exp(1.25) - 1)),
            [-0.2, -0.25],
        ),
        ("hinge", {"beta": 0.2}, 1 - 0.2 * 3, [0.2, -0.4]),
        ("hinge", {"beta": 0.5}, 0.0, [0.5, -1.0]),
        ("apo", {"beta": 0.2}, 1 / (1 + math.exp(0.2)) + 1 / (1 + math.exp(0.4)), [0.2, -0.4]),
        (
            "apo",
            {"beta": 0.2, "variant": "down"},
            1 / (1 + math.exp(-0.2)) + 1 / (1 + math.exp(0.6)),
            [0.2, -0.4],
        ),
        ("dpop", {"beta": 0.2, "penalty": 4.0}, _log1pexp(-0.2 * 3), [0.2, -0.4]),
        ("dpo", {"beta": 0.2, "reduction": "mean"}, _log1pexp(-0.2 * 1), [0.1, -0.1]),
        (
            "dpo",
            {"beta": 0.2, "label_smoothing": 0.1, "smoothing": "conservative"},
            0.9 * _log1pexp(-0.6) + 0.1 * _log1pexp(0.6),
            [0.2, -0.4],
        ),
    ],
)
def test_objective_by_hand_gives_loss_and_rewards(
    name: str, settings: dict[str, Any], loss: float, rewards: list[float]
) -> None:
    output = build(name, **settings)(_logps(), PAIRS)
    assert output.loss.item() == pytest.approx(loss)
    assert output.rewards is not None
    assert output.rewards.tolist() == pytest.approx(rewards)


def test_dpop_when_the_chosen_response_has_lost_probability_then_each_lost_nat_costs_and_pulls() -> None:
    logps, flipped = _logps(), PAIRS.flip(1)
    output = build("dpop", beta=0.2, penalty=4.0)(logps, flipped)
    # The chosen one has lost two nats.
    argument = 0.2 * (-2 - 1 - 4 * 2)
    assert output.loss.item() == pytest.approx(_log1pexp(-argument))
    (gradient,) = torch.autograd.grad(output.loss, logps.policy)
    slope = 0.2 / (1 + math.exp(argument))
    assert gradient[1].tolist() == pytest.approx([-slope * (1 + 4)] * 4)
    assert gradient[0, :2].tolist() == pytest.approx([slope] * 2)


def test_orpo_when_a_response_is_certain_then_loss_and_gradient_are_finite() -> None:
    policy = torch.tensor([[0.0, 0.0], [-1.0, -2.0]], requires_grad=True)
    for pairs in (PAIRS, PAIRS.flip(1)):
        loss = build("orpo")(Logps(policy, mask=torch.ones(2, 2)), pairs).loss
        (gradient,) = torch.autograd.grad(loss, policy)
        assert loss.isfinite() and gradient.isfinite().all()


def test_dpo_at_zero_margin_costs_log_two() -> None:
    logps = Logps(torch.tensor([[-1.0], [-3.0]]), mask=torch.ones(2, 1), reference=torch.tensor([[-1.0], [-3.0]]))
    assert build("dpo")(logps, PAIRS).loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(("reduction", "difference"), [("sum", 3.0), ("mean", 1.0)])
def test_ipo_in_both_reductions_squares_the_distance_to_its_target(reduction: str, difference: float) -> None:
    output = build("ipo", beta=BETA, reduction=reduction)(_logps(), PAIRS)
    assert output.loss.item() == pytest.approx((difference - 1 / (2 * BETA)) ** 2)
    assert output.rewards is not None
    assert float(output.rewards[0] - output.rewards[1]) == pytest.approx(BETA * difference)


@pytest.mark.parametrize(
    ("settings", "term"),
    [
        # The chosen response costs 2 nats over its two tokens, 1 on average.
        ({}, 0.2 * 1.0),
        ({"reduction": "sum"}, 0.005 * BETA * 2.0),
        ({"eta": 0.3}, 0.3 * 1.0),
        ({"eta": 0.3, "reduction": "sum"}, 0.3 * BETA * 2.0),
        ({"eta": 0.0}, 0.0),
    ],
)
def test_rpo_in_both_reductions_adds_its_likelihood_term_with_the_weight_that_belongs_to_it(
    settings: dict[str, Any], term: float
) -> None:
    logps = _logps()
    dpo, rpo = build("dpo", beta=BETA)(logps, PAIRS), build("rpo", beta=BETA, **settings)(logps, PAIRS)
    assert (rpo.loss - dpo.loss).item() == pytest.approx(term)
    assert rpo.rewards is not None
    assert dpo.rewards is not None
    assert rpo.rewards.tolist() == dpo.rewards.tolist()


def test_kto_with_a_given_reference_point_is_the_mean_over_both_sides_of_every_pair() -> None:
    objective = build("kto", beta=BETA, desirable_weight=2.0, undesirable_weight=3.0)
    pairs = torch.tensor([[0, 1], [1, 0]])
    output = objective(_logps(z_ref=0.5), pairs)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    expected = [
        *(2 * (1 - sigmoid(BETA * (1 - 0.5))), 3 * (1 - sigmoid(BETA * (0.5 + 2)))),
        *(2 * (1 - sigmoid(BETA * (-2 - 0.5))), 3 * (1 - sigmoid(BETA * (0.5 - 1)))),
    ]
    assert output.pair_losses.shape == (2, 2)
    assert output.pair_losses.flatten().tolist() == pytest.approx(expected)
    assert output.loss.item() == pytest.approx(sum(expected) / 4)


def test_kto_reference_point_below_zero_counts_as_zero_and_carries_no_gradient() -> None:
    objective = build("kto", beta=BETA)
    z_ref = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    negative = objective(_logps(z_ref=-4.0), PAIRS)
    assert negative.pair_losses.tolist() == objective(_logps(z_ref=0.0), PAIRS).pair_losses.tolist()
    objective(_logps(z_ref=z_ref), PAIRS).loss.backward()
    assert z_ref.grad is None


def test_kto_paired_takes_the_mean_log_ratio_over_both_sides_of_the_pairs() -> None:
    # Pairs (1, 0) thrice over and (0, 0): entries of row 0 (ratio 1): 5, of row 1 (ratio −2): 3.
    pairs = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 0]])
    paired = build("kto", beta=BETA, reference_point="paired")
    logps = _logps(reference_kl=torch.zeros(2, 4))
    z = max(0.0, (5 * 1 + 3 * -2) / 8)
    expected = build("kto", beta=BETA)(replace(logps, z_ref=z), pairs).loss.item()
    assert paired(logps, pairs).loss.item() == pytest.approx(expected)
    upward = torch.tensor([[0, 0], [0, 1]])
    with_point = _logps(z_ref=(3 * 1 - 2) / 4)
    given = build("kto", beta=BETA)(with_point, upward)
    estimated = paired(logps, upward)
    assert estimated.loss.item() == pytest.approx(given.loss.item())
    (expected_gradient,) = torch.autograd.grad(given.loss, with_point.policy)
    torch.testing.assert_close(torch.autograd.grad(estimated.loss, logps.policy)[0], expected_gradient)
    assert paired(replace(logps, z_ref=2.0), upward).loss.item() != pytest.approx(estimated.loss.item())


def test_kto_mismatched_without_a_reference_point_says_what_to_do() -> None:
    objective = build("kto")
    assert "z_ref" in objective.needs
    assert "z_ref" not in build("kto", reference_point="paired").needs
    with pytest.raises(DataError, match=r"kto needs `z_ref`: .*reference_point=paired"):
        objective(_logps(), PAIRS)
    with pytest.raises(ValueError, match="expected z_ref as one number"):
        objective(_logps(z_ref=torch.zeros(2)), PAIRS)


@pytest.mark.parametrize(("variant", "weight"), [("tdpo2", 0.5), ("tdpo1", 1.0)])
def test_tdpo_variants_differ_in_weight_and_in_the_gradient_of_the_chosen_divergence(
    variant: str, weight: float
) -> None:
    # K⁺ = 0.4, K⁻ = 1.0; what lies on the padding of the first row must not count.
    reference_kl = torch.tensor([[0.3, 0.1, 9.0, 9.0], [0.2, 0.2, 0.3, 0.3]], dtype=torch.float64, requires_grad=True)
    output = build("tdpo", beta=BETA, alpha=0.5, variant=variant)(_logps(reference_kl=reference_kl), PAIRS)
    margin = BETA * (3 - weight * (1.0 - 0.4))
    assert output.loss.item() == pytest.approx(_log1pexp(-margin))
    assert output.rewards is not None
    assert float(output.rewards[0] - output.rewards[1]) == pytest.approx(margin)
    (gradient,) = torch.autograd.grad(output.loss, reference_kl)
    slope = BETA * weight / (1 + math.exp(margin))
    assert gradient[1].tolist() == pytest.approx([slope] * 4)
    chosen = 0.0 if variant == "tdpo2" else -slope
    assert gradient[0].tolist() == pytest.approx([chosen, chosen, 0.0, 0.0])


@pytest.mark.parametrize(("reduction", "loss"), [("mean", (1.0 + 1.25) / 2), ("sum", (2.0 + 5.0) / 2)])
def test_sft_is_the_likelihood_of_the_chosen_alone(reduction: str, loss: float) -> None:
    objective = build("sft", reduction=reduction)
    assert objective.needs == frozenset()
    policy, mask = _logps().policy, _logps().mask
    for pairs in ([[0], [1]], [[0, 1], [1, 0]], [[0, -1], [1, -1]]):
        output: Output = objective(Logps(policy, mask=mask), torch.tensor(pairs))
        assert output.loss.item() == pytest.approx(loss)
        assert output.rewards is None


def test_rewards_of_every_preference_method_are_detached_and_one_a_response(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    batch = make_batch([3, 2])
    for name in tuple(name for name in OBJECTIVES if name != "sft" and not build(name).token_numbers):
        rewards = build(name)(Logps(**batch, z_ref=0.0), PAIRS).rewards
        assert rewards is not None
        assert rewards.shape == (2,)
        assert rewards.isfinite().all()
        assert not rewards.requires_grad
