"""KTO: Kahneman–Tversky optimization (arXiv:2402.01306)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive


class KTO(Objective):
    """λ_w (1 − σ(β(ρ⁺ − z))) and λ_l (1 − σ(β(z − ρ⁻))), the loss being the mean over all 2P terms.

    ρ: summed log-ratio of policy to reference, nats. z ≥ 0: the reference point, without gradient; a negative `z_ref`
    counts as 0.
    """

    name: ClassVar[str] = "kto"
    title: ClassVar[str] = "KTO: Kahneman–Tversky optimization"
    paper: ClassVar[str] = "arXiv:2402.01306"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s), z the zero point (reference_point)\n"
        "loss = mean of λ_w (1 − σ(β (ρ⁺ − z))) over chosen and λ_l (1 − σ(β (z − ρ⁻))) over rejected"
    )

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    desirable_weight: NonNegative = 1.0
    """Weight λ_w of the chosen responses."""
    undesirable_weight: NonNegative = 1.0
    """Weight λ_l of the rejected responses."""
    reference_point: Literal["mismatched", "paired"] = "mismatched"
    """Source of the reference point z: estimated from mismatched prompts and responses, or the mean log-ratio of the
    pairs themselves."""

    @property
    def needs(self) -> frozenset[str]:
        needs: set[str] = {"reference", "rejected"}
        if self.reference_point == "mismatched":
            needs.add("z_ref")
        return frozenset(needs)

    @property
    def zero_point(self) -> Literal["mismatched", "paired"]:
        return self.reference_point

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        ratios = logps.log_ratio()
        chosen, rejected = ratios[pairs].unbind(dim=1)
        z_ref = logps.z_ref
        if z_ref is None:
            # One entry per side of every pair: a response in three pairs counts three times, as it does in the loss.
            z_ref = ratios[pairs].mean()
        z = torch.as_tensor(z_ref, dtype=ratios.dtype, device=ratios.device).detach()
        if z.numel() != 1:
            raise ValueError(f"{self.name}: expected z_ref as one number, got shape {tuple(z.shape)}")
        z = z.reshape(()).clamp(min=0)
        # 1 − σ(x) as σ(−x): the subtraction would round small losses to zero.
        desirable = self.desirable_weight * torch.sigmoid(-self.beta * (chosen - z))
        undesirable = self.undesirable_weight * torch.sigmoid(-self.beta * (z - rejected))
        return Output(torch.stack([desirable, undesirable], dim=1), rewards=self.beta * ratios.detach())
