"""IPO: identity preference optimization (arXiv:2310.12036)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from regretless.objectives.base import Logps, Objective, Output, Positive, margins


class IPO(Objective):
    """(ρ⁺ − ρ⁻ − 1/(2β))², ρ the log-ratio of policy to reference (eq. 17, whose τ is β here)."""

    name: ClassVar[str] = "ipo"
    title: ClassVar[str] = "IPO: identity preference optimization"
    paper: ClassVar[str] = "arXiv:2310.12036"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s) (reduction=sum), 1/T Σ_s (π_s − r_s) (reduction=mean)\nloss = (ρ⁺ − ρ⁻ − 1/(2β))²"
    )

    beta: Positive = 0.1
    """Regularization β; the target margin is 1/(2β) nats."""
    reduction: Literal["sum", "mean"] = "sum"
    """Log-ratio of a response: summed over its tokens (the paper), or averaged."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        ratios = logps.log_ratio()
        if self.reduction == "mean":
            ratios = ratios / logps.lengths
        losses = (margins(ratios, pairs) - 1 / (2 * self.beta)).square()
        return Output(losses, rewards=self.beta * ratios.detach())
