"""TDPO: token-level direct preference optimization (arXiv:2404.11999)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive, margins


class TDPO(Objective):
    """−log σ(β[ρ⁺ − ρ⁻ − a (K⁻ − K⁺)]), ρ the summed log-ratio, K = Σ_t KL(π_ref ‖ π_θ) over the vocabulary, nats.

    tdpo2: a = alpha, and no gradient through K⁺; tdpo1: a = 1, gradient through both.
    """

    name: ClassVar[str] = "tdpo"
    title: ClassVar[str] = "TDPO: token-level direct preference optimization"
    paper: ClassVar[str] = "arXiv:2404.11999"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s)\n"
        "K = Σ_s KL(π_ref(· | q, o_<s) ‖ π_θ(· | q, o_<s))\n"
        "loss = −log σ(β [ρ⁺ − ρ⁻ − a (K⁻ − K⁺)])"
    )

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    alpha: NonNegative = 0.5
    """Weight of the KL difference in tdpo2; tdpo1 does not use it."""
    variant: Literal["tdpo2", "tdpo1"] = "tdpo2"
    """Which of the paper's two losses to use."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference", "reference_kl", "rejected"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        assert logps.reference_kl is not None
        ratios, divergences = logps.log_ratio(), logps.reference_kl.sum(dim=1)
        chosen_kl, rejected_kl = divergences[pairs].unbind(dim=1)
        weight = 1.0
        if self.variant == "tdpo2":
            weight, chosen_kl = self.alpha, chosen_kl.detach()
        losses = -F.logsigmoid(self.beta * (margins(ratios, pairs) - weight * (rejected_kl - chosen_kl)))
        return Output(losses, rewards=self.beta * (ratios + weight * divergences).detach())
