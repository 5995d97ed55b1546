"""DPOP: DPO-Positive, which keeps the chosen response from losing probability (arXiv:2402.13228)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive, margins


class DPOP(Objective):
    """−log σ(β (ρ⁺ − ρ⁻ − λ max(0, −ρ⁺))), ρ the summed log-ratio of policy to reference in nats."""

    name: ClassVar[str] = "dpop"
    title: ClassVar[str] = "DPOP: DPO-Positive"
    paper: ClassVar[str] = "arXiv:2402.13228"
    formula: ClassVar[str] = "ρ = Σ_s (π_s − r_s)\nloss = −log σ(β (ρ⁺ − ρ⁻ − λ max(0, −ρ⁺)))"

    beta: Positive = 0.3
    """Inverse temperature β of the implicit reward."""
    penalty: NonNegative = 50.0
    """Weight λ of each nat that the chosen response has lost."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        ratios = logps.log_ratio()
        lost = torch.relu(-ratios[pairs[:, 0]])
        losses = -F.logsigmoid(self.beta * (margins(ratios, pairs) - self.penalty * lost))
        return Output(losses, rewards=self.beta * ratios.detach())
