"""CPO: contrastive preference optimization, without a reference (arXiv:2401.08417)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive, margins


class CPO(Objective):
    """−log σ(β (Σ_s π_s⁺ − Σ_s π_s⁻)) plus the likelihood of the chosen response: DPO with a uniform reference."""

    name: ClassVar[str] = "cpo"
    title: ClassVar[str] = "CPO: contrastive preference optimization"
    paper: ClassVar[str] = "arXiv:2401.08417"
    formula: ClassVar[str] = "loss = −log σ(β (Σ_s π_s⁺ − Σ_s π_s⁻)) + sft_weight · mean_s(−π_s⁺)"

    beta: Positive = 0.1
    """Inverse temperature β of the reward."""
    sft_weight: NonNegative = 1.0
    """Weight of the chosen response's negative log-likelihood, averaged over its tokens, which is added to the loss."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"rejected"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = -self.beta * logps.nll("sum")
        losses = -F.logsigmoid(margins(rewards, pairs)) + self.sft_weight * logps.nll("mean")[pairs[:, 0]]
        return Output(losses, rewards=rewards.detach())
