"""RPO: regularized preference optimization (arXiv:2405.16436)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive, margins

ETA: dict[Literal["mean", "sum"], float] = {"mean": 0.2, "sum": 0.005}
"""The authors' own weights: of their average loss, which they call the default, and of their cumulative one."""


class RPO(Objective):
    """DPO plus the negative log-likelihood of the chosen response: η times its token mean, or η β times its sum.

    A response of T tokens has a sum that is T times its mean, so an η is worth something only with its reduction.
    """

    name: ClassVar[str] = "rpo"
    title: ClassVar[str] = "RPO: regularized preference optimization"
    paper: ClassVar[str] = "arXiv:2405.16436"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s)\n"
        "loss = −log σ(β (ρ⁺ − ρ⁻)) − η · 1/T⁺ Σ_s π_s⁺ (reduction=mean)\n"
        "loss = −log σ(β (ρ⁺ − ρ⁻)) − η β Σ_s π_s⁺ (reduction=sum)"
    )

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    eta: NonNegative | None = None
    """Weight η of the likelihood term; by default 0.2 for the mean and 0.005 for the sum."""
    reduction: Literal["mean", "sum"] = "mean"
    """Likelihood of a response: `mean` over its tokens, times η; or `sum`, times η β (the formula as printed)."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        weight = ETA[self.reduction] if self.eta is None else self.eta
        if self.reduction == "sum":
            weight *= self.beta
        losses = -F.logsigmoid(margins(rewards, pairs)) + weight * logps.nll(self.reduction)[pairs[:, 0]]
        return Output(losses, rewards=rewards.detach())
