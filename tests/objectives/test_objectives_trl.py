"""Objectives next to TRL's own losses, in float64: values and gradients by token log-probability."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regretless.objectives import Logps, build
from regretless.training.trl_losses import hyperparameters_of, objective_of

PROMPT = 2
LENGTHS = [5, 2, 3, 3, 1, 6]
"""Tokens of the responses: three chosen ones, then the rejected ones of the same pairs."""
PAIRS = torch.tensor([[0, 3], [1, 4], [2, 5]])
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
ATTRIBUTES = {"loss_weights": None, "ld_alpha": None, "use_weighting": False, "label_smoothing": 0.0}


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    noise = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(scale * noise).abs().masked_fill(~MASK, 0.0)


class Given(nn.Module):
    """Stands for a model whose log-probabilities are known; TRL computes everything after them."""

    is_gradient_checkpointing = False

    def __init__(self, logps: Tensor, weighting: Tensor) -> None:
        super().__init__()
        after_prompt = nn.functional.pad(logps, (PROMPT - 1, 0))
        other = torch.zeros_like(after_prompt)
        self.outputs = SimpleNamespace(
            log_probs=after_prompt,
            log_sum_sq_probs=nn.functional.pad(weighting, (PROMPT - 1, 0)),
            entropy=other,
            mean_logits=other,
            is_top1=other.bool(),
        )

    def forward(self, **_: Any) -> Any:
        return self.outputs


def loss_of_trl(losses: list[str], policy: Tensor, reference: Tensor, behavior: Tensor, **given: Any) -> Tensor:
    trl = pytest.importorskip("trl", reason="TRL is not installed (the extra `dev` has it)")
    model = Given(policy, behavior)
    values = ATTRIBUTES | given
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer: Any = SimpleNamespace(
        accelerator=accelerator,
        model=model,
        ref_model=Given(reference, behavior),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=losses,
        beta=0.4,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": {name: [] for name in ("entropy", "mean_token_accuracy", *METRICS)}},
        **(values | {"loss_weights": values["loss_weights"] or [1.0] * len(losses)}),
    )
    mask = nn.functional.pad(MASK.long(), (PROMPT, 0))
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    loss: Tensor = trl.DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    return loss


METRICS = [f"{name}/{side}" for name in ("rewards", "logps", "logits") for side in ("chosen", "rejected")]
METRICS += ["rewards/accuracies", "rewards/margins", "num_tokens"]


@pytest.mark.parametrize(
    ("losses", "given", "modifiers"),
    [
        (["sigmoid"], {}, {}),
        (["robust"], {"label_smoothing": 0.2}, {}),
        (["ipo"], {}, {}),
        (["hinge"], {}, {}),
        (["apo_zero"], {}, {}),
        (["apo_down"], {}, {}),
        (["sigmoid_norm"], {}, {}),
        (["sigmoid"], {"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
        (["sigmoid_norm", "apo_down"], {"ld_alpha": 0.0}, {"ld_alpha": 0.0}),
        (["hinge", "robust", "ipo"], {"loss_weights": [0.5, 2.0, 0.1], "label_smoothing": 0.1}, {}),
        # TRL estimates what WPO divides by; given the probabilities that responses were sampled with, it is the same.
        (["sigmoid"], {"use_weighting": True}, {"importance": "mean", "importance_clip": 1e9}),
        (["ipo", "apo_zero"], {"use_weighting": True}, {"importance": "mean", "importance_clip": 1e9}),
    ],
    ids=lambda value: "+".join(value) or "plain" if not isinstance(value, dict) else "",
)
def test_loss_when_trl_computes_it_from_the_same_log_probabilities_then_values_and_gradients_are_equal(
    losses: list[str], given: dict[str, Any], modifiers: dict[str, Any]
) -> None:
    reference, behavior = numbers(1), numbers(2)
    policy = numbers(3).requires_grad_()
    theirs = loss_of_trl(losses, policy, reference, behavior, **given)
    (expected,) = torch.autograd.grad(theirs, policy)

    weights, smoothing = given.get("loss_weights"), given.get("label_smoothing", 0.0)
    hyperparameters = hyperparameters_of(losses, weights, 0.4, smoothing)
    objective = build(objective_of(losses, weights), **hyperparameters, **modifiers)
    ours = objective(Logps(policy, mask=MASK, reference=reference, behavior=behavior), PAIRS).loss
    (gradient,) = torch.autograd.grad(ours, policy)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    torch.testing.assert_close(gradient[MASK], expected[MASK], rtol=1e-9, atol=1e-12)
    assert gradient.norm() > 0


def test_losses_without_a_reference_when_trl_computes_them_then_values_and_gradients_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (the extra `dev` has it)")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    policy = numbers(4).requires_grad_()
    sums, means = policy.sum(1), policy.sum(1) / MASK.sum(1)
    nll = -means[PAIRS[:, 0]].mean()
    plain = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), alpha=0.0, label_smoothing=0.0, beta=0.7)

    def of_cpo(values: Tensor, **changes: Any) -> Tensor:
        trainer = copy.copy(plain)
        vars(trainer).update(changes)
        return CPOTrainer.cpo_loss(trainer, values[PAIRS[:, 0]], values[PAIRS[:, 1]])[0].mean()

    odds = ORPOTrainer.odds_ratio_loss(plain, means[PAIRS[:, 0]], means[PAIRS[:, 1]])[0].mean()
    log_ratios = (policy - numbers(5)).sum(1)
    cases = [
        ("simpo", {"beta": 0.7, "gamma": 0.3}, of_cpo(means, loss_type="simpo", simpo_gamma=0.3)),
        ("cpo", {"beta": 0.7, "sft_weight": 0.2}, of_cpo(sums, loss_type="sigmoid") + 0.2 * nll),
        # TRL's odds are those of float32.
        ("orpo", {"beta": 0.7}, nll - odds),
        # TRL's conservative smoothing is on sums of log-probabilities there; given log-ratios, it is cDPO.
        (
            "dpo",
            {"beta": 0.7, "label_smoothing": 0.2, "smoothing": "conservative"},
            of_cpo(log_ratios, loss_type="sigmoid", label_smoothing=0.2),
        ),
    ]
    for name, hyperparameters, theirs in cases:
        (expected,) = torch.autograd.grad(theirs, policy, retain_graph=True)
        logps = Logps(policy, mask=MASK, reference=numbers(5) if name == "dpo" else None)
        ours = build(name, **hyperparameters)(logps, PAIRS).loss
        (gradient,) = torch.autograd.grad(ours, policy, retain_graph=True)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-6), name
        torch.testing.assert_close(gradient[MASK], expected[MASK], rtol=1e-6, atol=1e-6)
