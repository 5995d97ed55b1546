"""APO: anchored preference optimization (arXiv:2408.06266)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from regretless.objectives.base import Logps, Objective, Output, Positive


class APO(Objective):
    """Losses that say in which direction each response's probability should go, relative to the reference.

    zero: (1 − σ(β ρ⁺)) + σ(β ρ⁻), the chosen up and the rejected down (eq. 7); down: σ(β ρ⁺) + (1 − σ(β (ρ⁺ − ρ⁻))),
    both down, the rejected more (eq. 8). ρ: summed log-ratio of policy to reference, nats.
    """

    name: ClassVar[str] = "apo"
    title: ClassVar[str] = "APO: anchored preference optimization"
    paper: ClassVar[str] = "arXiv:2408.06266"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s)\n"
        "loss = (1 − σ(β ρ⁺)) + σ(β ρ⁻) (variant=zero)\n"
        "loss = σ(β ρ⁺) + (1 − σ(β (ρ⁺ − ρ⁻))) (variant=down)"
    )

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    variant: Literal["zero", "down"] = "zero"
    """`zero` for chosen responses that are better than the model's own, `down` for ones that are worse."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        chosen, rejected = rewards[pairs].unbind(dim=1)
        # 1 − σ(x) as σ(−x): the subtraction would round small losses to zero.
        if self.variant == "zero":
            losses = torch.sigmoid(-chosen) + torch.sigmoid(rejected)
        else:
            losses = torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)
        return Output(losses, rewards=rewards.detach())
