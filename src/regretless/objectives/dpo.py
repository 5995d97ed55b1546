"""DPO: direct preference optimization (arXiv:2305.18290)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, Objective, Output, Positive, margins


class DPO(Objective):
    """−log σ(β (ρ⁺ − ρ⁻)), ρ the summed log-ratio of policy to reference in nats (eq. 7)."""

    name: ClassVar[str] = "dpo"
    title: ClassVar[str] = "DPO: direct preference optimization"
    paper: ClassVar[str] = "arXiv:2305.18290"
    formula: ClassVar[str] = "ρ = Σ_s (π_s − r_s)\nloss = −log σ(β (ρ⁺ − ρ⁻))"

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        return Output(-F.logsigmoid(margins(rewards, pairs)), rewards=rewards.detach())
