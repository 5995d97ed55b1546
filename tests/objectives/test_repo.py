"""RePO and RePO_det: what their options mean, by hand values and by the formula written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import Logps, RePO, build

PAIRS = torch.tensor([[0, 1], [2, 1]])


def _score(policy: Tensor, reference: Tensor, behavior: Tensor) -> float:
    """The paper's score of one response, β = 1, as the double sum is printed."""
    total = 0.0
    length = len(policy)
    for t in range(length):
        future = [(policy[s] - behavior[s]).item() for s in range(t + 1, length)]
        total += (policy[t] - reference[t]).item() + (sum(future) / len(future) if future else 0.0)
    return total


def test_repo_scores_when_compared_with_the_printed_double_sum_are_equal(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    lengths = [7, 1, 4]
    batch = make_batch(lengths)
    scores = build("repo")(Logps(**batch), PAIRS).scores
    without_behavior = build("repo_det")(Logps(**{**batch, "behavior": torch.zeros(3, 7)}), PAIRS).scores
    assert scores is not None
    assert without_behavior is not None
    for row, length in enumerate(lengths):
        policy, reference, behavior = (batch[name][row, :length] for name in ("policy", "reference", "behavior"))
        assert scores[row].item() == pytest.approx(_score(policy, reference, behavior), rel=1e-12)
        expected = _score(policy, reference, torch.zeros(length))
        assert without_behavior[row].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("discount", [None, 1.0, 0.9])
def test_repo_when_the_reference_wrote_then_it_is_dpo_with_position_weights(
    discount: float | None, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    lengths, beta = [7, 1, 4], 0.3
    batch = make_batch(lengths)
    batch["behavior"] = batch["reference"]
    found = build("repo", beta=beta, discount=discount)(Logps(**batch), PAIRS)
    assert found.scores is not None
    expected = []
    for row, length in enumerate(lengths):
        # How often token s is ahead of another one, by the window's mean or by the discount.
        weights = [
            1 + sum(1 / (length - t) if discount is None else discount ** (s - t) for t in range(1, s))
            for s in range(1, length + 1)
        ]
        ratios = (batch["policy"] - batch["reference"])[row, :length].detach()
        expected.append(beta * float(ratios @ torch.tensor(weights, dtype=torch.float64)))
    assert found.scores.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    losses = [math.log1p(math.exp(expected[worse] - expected[better])) for better, worse in PAIRS.tolist()]
    assert found.pair_losses.tolist() == pytest.approx(losses, rel=1e-12)


def test_ppl_is_the_printed_sum_without_a_reference_and_asks_for_none(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    lengths = [7, 1, 4]
    batch = make_batch(lengths)
    objective = build("ppl", beta=0.3)
    assert objective.needs == {"rejected", "behavior"}
    output = objective(Logps(**batch), PAIRS)
    policy, behavior = batch["policy"].detach(), batch["behavior"]
    expected = [0.3 * _score(policy[row, :n], torch.zeros(n), behavior[row, :n]) for row, n in enumerate(lengths)]
    losses = [math.log1p(math.exp(expected[worse] - expected[better])) for better, worse in PAIRS.tolist()]
    assert output.pair_losses.tolist() == pytest.approx(losses, rel=1e-12)
    same = build("repo", beta=0.3, reference_weight=0)(Logps(**batch), PAIRS)
    assert output.pair_losses.tolist() == same.pair_losses.tolist()


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_cpl_by_hand_is_repo_det_without_reference_and_future(
    weight: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch([7, 1, 4])
    objective = build("cpl", rejected_weight=weight)
    assert objective.needs == {"rejected"}
    output = objective(Logps(batch["policy"], mask=batch["mask"]), PAIRS)
    sums = [0.1 * float(batch["policy"][row, :n].sum()) for row, n in enumerate([7, 1, 4])]
    losses = [math.log1p(math.exp(weight * sums[worse] - sums[better])) for better, worse in PAIRS.tolist()]
    assert output.pair_losses.tolist() == pytest.approx(losses, rel=1e-12)
    options = {"beta": 0.1, "reference_weight": 0, "discount": 0, "rejected_weight": weight}
    same = build("repo_det", **options)(Logps(**batch), PAIRS)
    assert output.pair_losses.tolist() == pytest.approx(same.pair_losses.tolist(), rel=1e-12)
    gradients = [torch.autograd.grad(found.loss, batch["policy"])[0] for found in (output, same)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def _score_of_cut(policy: Tensor, reference: Tensor, behavior: Tensor, cut: int, options: dict[str, Any]) -> float:
    """The score of the first `cut` tokens, β = 1, whose future goes on to the end: the double sum written out."""
    total, length = 0.0, len(policy)
    released, discount = options.get("formulation") == "released", options.get("discount")
    for t in range(cut):
        ahead = range(t if released else t + 1, length)
        later = [(policy[s] - behavior[s]).item() * (1 if discount is None else discount ** (s - t)) for s in ahead]
        total += (policy[t] - reference[t]).item() + sum(later) / (max(len(later), 1) if discount is None else 1)
    return total / cut if released else total


@pytest.mark.parametrize("options", [{}, {"discount": 0.9}, {"discount": 0.0}, {"formulation": "released"}])
@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_repo_when_tokens_are_stored_behind_a_cut_then_they_are_future_alone(
    options: dict[str, Any], sft_weight: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    lengths, cuts = [7, 3, 4], [4, 1, 4]
    batch = make_batch(lengths)
    future = (torch.arange(7) >= torch.tensor(cuts).unsqueeze(1)).double()
    objective = build("repo", horizon="stored", sft_weight=sft_weight, **options)
    output = objective(Logps(**batch, future=future), PAIRS)
    assert output.scores is not None
    expected = []
    for row, (length, cut) in enumerate(zip(lengths, cuts, strict=True)):
        policy, reference, behavior = (batch[name][row, :length] for name in ("policy", "reference", "behavior"))
        expected.append(_score_of_cut(policy, reference, behavior, cut, options))
    assert output.scores.tolist() == pytest.approx(expected, rel=1e-12)
    weight = 0.5 if "formulation" in options else 1.0
    for number, (better, worse) in enumerate(PAIRS.tolist()):
        nll = -batch["policy"][better, : cuts[better]].mean().item()
        loss = math.log1p(math.exp(weight * expected[worse] - expected[better])) + sft_weight * nll
        assert output.pair_losses[number].item() == pytest.approx(loss, rel=1e-12)
    # Without anything behind the cuts it is the plain loss.
    nothing = objective(Logps(**batch, future=torch.zeros(3, 7)), PAIRS)
    plain = build("repo", sft_weight=sft_weight, **options)(Logps(**batch), PAIRS)
    assert nothing.pair_losses.tolist() == plain.pair_losses.tolist()


@pytest.mark.parametrize("options", [{}, {"discount": 0.9}, {"formulation": "released"}, {"importance": "sum"}])
def test_repo_when_log_probabilities_are_those_of_units_then_each_unit_counts_as_one_token(
    options: dict[str, Any], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    # Units of two, one and three tokens; one of each; the behavior policy's number is at the last token of a unit.
    units = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 0, 0], [0, 1, 1, 1, 1, 2]])
    lengths = [6, 4, 6]
    batch = make_batch(lengths)
    ends = units != units.roll(-1, 1)
    ends[[0, 2], -1] = True
    batch["behavior"] = batch["behavior"].masked_fill(~ends, 0.0)
    found = build("repo", **options)(Logps(**batch, units=units), PAIRS)
    # The same with a token for each unit, whose log-probability is the sum.
    rows = {name: torch.zeros(3, 6, dtype=torch.float64) for name in ("policy", "reference", "behavior")}
    for name, row in rows.items():
        row.scatter_add_(1, units, batch[name].detach().masked_fill(batch["mask"] == 0, 0.0).double())
    counts = torch.tensor([[3], [4], [3]])
    as_tokens = build("repo", **options)(Logps(**rows, mask=torch.arange(6) < counts), PAIRS)
    assert found.scores is not None and as_tokens.scores is not None
    assert found.scores.tolist() == pytest.approx(as_tokens.scores.tolist(), rel=1e-12)
    assert found.pair_losses.tolist() == pytest.approx(as_tokens.pair_losses.tolist(), rel=1e-12)


@pytest.mark.parametrize("formulation", ["paper", "released"])
def test_repo_when_every_token_is_a_unit_then_it_is_the_same_to_the_bit(
    formulation: str, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch([7, 1, 4])
    plain = build("repo", formulation=formulation)(Logps(**batch), PAIRS)
    units = torch.arange(7).expand(3, 7)
    assert build("repo", formulation=formulation)(Logps(**batch, units=units), PAIRS).pair_losses.equal(
        plain.pair_losses
    )


@pytest.mark.parametrize(
    ("name", "options", "reads"),
    [
        ("repo", {}, True),
        ("repo", {"estimator": "topk"}, False),
        ("repo", {"ld_alpha": 0.5}, False),
        ("repo_det", {}, False),
        ("dpo", {"reference": "behavior"}, False),
        ("weighted_sum", {"terms": [{"objective": "repo"}, {"objective": "sft"}]}, True),
        ("weighted_sum", {"terms": [{"objective": "repo"}, {"objective": "dpo", "reference": "behavior"}]}, False),
    ],
)
def test_objective_when_it_reads_single_tokens_then_it_is_given_no_units(
    name: str, options: dict[str, Any], reads: bool
) -> None:
    assert build(name, **options).reads_units == reads


def test_repo_in_steps_when_cut_then_windows_of_later_steps_do_not_count() -> None:
    # Steps of one, two and one tokens, cut behind the first: w of the later steps is 1/2, of one window.
    mask, steps, future = torch.ones(1, 4), torch.tensor([[0, 1, 1, 2]]), torch.tensor([[0, 1, 1, 1]])
    objective = build("repo", granularity="step", horizon="stored")
    assert isinstance(objective, RePO)
    assert objective.token_weights(mask.bool(), steps, future=future)[0].tolist() == [0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("options", [{"ld_alpha": 0.5}, {"importance": "mean"}])
def test_stored_horizon_when_whole_responses_are_weighed_then_it_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="horizon: ld_alpha and importance weigh whole responses"):
        build("repo", horizon="stored", **options)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("repo_det", {}, "repo_det reads no behavior policy; leave it out"),
        ("repo", {"importance": "mean"}, "importance and reference=behavior need the behavior policy of every pair"),
        ("repo", {"reference": "behavior"}, "importance and reference=behavior need the behavior policy of every pair"),
    ],
)
def test_dirac_behavior_when_it_has_no_meaning_then_it_is_refused(
    name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"unknown_behavior: {told}"):
        build(name, unknown_behavior="dirac", **options)
    assert build("repo", unknown_behavior="dirac").missing == {"behavior": 0.0}
    assert build("repo").missing == {}


def test_repo_in_steps_weighs_the_sums_of_each_step() -> None:
    # Four tokens in three steps; the paper's weights of three units are 0, 1/2, 3/2.
    policy = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
    logps = Logps(
        policy,
        mask=torch.ones(1, 4),
        reference=torch.full((1, 4), -2.0),
        behavior=torch.tensor([[-1.0, -1.0, -1.0, -2.0]]),
        steps=torch.tensor([[0, 0, 1, 2]]),
    )
    objective = build("repo", granularity="step", beta=2.0)
    assert isinstance(objective, RePO)
    assert objective.token_weights(logps.mask, logps.steps)[0].tolist() == pytest.approx([0, 0, 1 / 2, 3 / 2])
    # Σ(π − r) = −2; futures: ½ (−3 + 1) + 3/2 (−4 + 2) = −4.
    assert objective.token_scores(logps)[0].tolist() == pytest.approx([2.0, 0.0, 2 * (-1 - 1), 2 * (-2 - 3)])
    released = build("repo", granularity="step", formulation="released")
    assert isinstance(released, RePO)
    # Windows with the current step: 1/3, 5/6, 11/6; and the mean over three steps, not four tokens.
    assert released.token_scores(logps)[0, 3].item() == pytest.approx((-2 + 11 / 6 * -2) / 3)
    with pytest.raises(DataError, match=r"needs `steps`.*granularity=token"):
        objective.token_weights(logps.mask)


def test_repo_steps_of_one_token_each_change_nothing(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    batch = make_batch([6, 3, 5])
    steps = torch.arange(6).expand(3, 6)
    for formulation in ("paper", "released"):
        by_token = build("repo", formulation=formulation)(Logps(**batch), PAIRS)
        by_step = build("repo", formulation=formulation, granularity="step")(Logps(**batch, steps=steps), PAIRS)
        torch.testing.assert_close(by_step.pair_losses, by_token.pair_losses)


def test_repo_discount_when_written_out_is_the_discounted_sum_of_the_theorem(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    batch = make_batch([5, 5, 5])
    scores = build("repo", discount=0.7)(Logps(**batch), PAIRS).scores
    assert scores is not None
    policy, reference, behavior = (batch[name][0].tolist() for name in ("policy", "reference", "behavior"))
    expected = sum(
        policy[t] - reference[t] + sum(0.7**step * (policy[t + step] - behavior[t + step]) for step in range(1, 5 - t))
        for t in range(5)
    )
    assert scores[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("formulation", "weight"), [("paper", 1.0), ("released", 0.5)])
def test_repo_rejected_weight_when_left_out_follows_the_formulation(
    formulation: str, weight: float, make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    logps = Logps(**make_batch([4, 3, 5]))
    output = build("repo", formulation=formulation)(logps, PAIRS)
    explicit = build("repo", formulation=formulation, rejected_weight=weight)(logps, PAIRS)
    assert output.pair_losses.tolist() == explicit.pair_losses.tolist()
    assert output.scores is not None
    margin = (output.scores[0] - weight * output.scores[1]).item()
    assert output.pair_losses[0].item() == pytest.approx(math.log1p(math.exp(-margin)))


def test_repo_sft_term_adds_the_chosen_mean_negative_log_likelihood_with_its_gradient(
    make_batch: Callable[..., dict[str, Tensor]],
) -> None:
    batch = make_batch([4, 3, 5])
    policy = batch["policy"]
    plain = build("repo")(Logps(**batch), PAIRS).loss
    with_sft = build("repo", sft_weight=0.3)(Logps(**batch), PAIRS).loss
    nll = (-policy[0, :4].mean() - policy[2, :5].mean()) / 2
    assert (with_sft - plain).item() == pytest.approx(0.3 * nll.item())
    (gradient,) = torch.autograd.grad(with_sft - plain, policy)
    assert gradient[0, :4].tolist() == pytest.approx([-0.3 / 4 / 2] * 4)
    assert gradient[2, :5].tolist() == pytest.approx([-0.3 / 5 / 2] * 5)
    assert gradient[1].abs().max() < 1e-15


def test_repo_without_reference_weight_needs_no_reference(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    batch = make_batch([4, 3, 5])
    half = build("repo_det", reference_weight=0.5)(Logps(**batch), PAIRS).scores
    full = build("repo_det")(Logps(**batch), PAIRS).scores
    bare = build("repo_det", reference_weight=0)
    assert bare.needs == {"rejected"}
    del batch["reference"]
    none = bare(Logps(**batch), PAIRS).scores
    assert half is not None
    assert full is not None
    assert none is not None
    torch.testing.assert_close(2 * half, full + none)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("repo", {}),
        ("repo", {"formulation": "released", "sft_weight": 0.1}),
        ("repo_det", {"discount": 0.99}),
        ("dpo", {}),
        ("ipo", {}),
        ("rpo", {}),
        ("kto", {"reference_point": "paired"}),
        ("tdpo", {}),
    ],
)
def test_objective_in_float32_at_4096_tokens_agrees_with_float64(
    name: str, options: dict[str, Any], make_batch: Callable[..., dict[str, Tensor]]
) -> None:
    batch = make_batch([4096, 4000, 100])
    results = {}
    for dtype in (torch.float64, torch.float32):
        policy = batch["policy"].detach().to(dtype).requires_grad_()
        inputs = {key: value if key == "mask" else value.detach().to(dtype) for key, value in batch.items()}
        output = build(name, beta=0.01, **options)(Logps(**{**inputs, "policy": policy}), PAIRS)
        (gradient,) = torch.autograd.grad(output.loss, policy)
        assert gradient.dtype == dtype
        results[dtype] = (output.loss.item(), gradient.double())
    loss, gradient = results[torch.float32]
    exact_loss, exact_gradient = results[torch.float64]
    assert loss == pytest.approx(exact_loss, rel=1e-5)
    assert (gradient - exact_gradient).norm() <= 1e-5 * exact_gradient.norm()


@pytest.mark.parametrize("name", ["repo", "repo_det", "dpo", "rpo", "kto", "tdpo"])
@pytest.mark.parametrize("sign", [1, -1])
def test_objective_in_float32_at_a_margin_of_ten_thousand_nats_saturates_without_nan(name: str, sign: int) -> None:
    # One token a response: its log-ratio is the whole score, and β = 1 makes the margin exactly ±1e4.
    policy = torch.tensor([[0.0], [-1e4]] if sign > 0 else [[-1e4], [0.0]], requires_grad=True)
    zeros = torch.zeros(2, 1)
    logps = Logps(policy, mask=torch.ones(2, 1), reference=zeros, behavior=zeros, reference_kl=zeros, z_ref=0.0)
    options = {"eta": 0.0} if name == "rpo" else {}
    output = build(name, beta=1.0, **options)(logps, torch.tensor([[0, 1]]))
    (gradient,) = torch.autograd.grad(output.loss, policy)
    assert gradient.isfinite().all()
    if name == "kto":
        assert output.pair_losses.tolist() == ([[0.5, 0.0]] if sign > 0 else [[1.0, 0.5]])
    else:
        assert output.loss.item() == (0.0 if sign > 0 else 1e4)
        assert gradient.flatten().tolist() == ([0.0, 0.0] if sign > 0 else [-1.0, 1.0])
