"""DPO: direct preference optimization (arXiv:2305.18290)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, Objective, Output, Positive, margins


class DPO(Objective):
    """−log σ(β (ρ⁺ − ρ⁻)), ρ the log-ratio of policy to reference in nats (eq. 7), summed or averaged over tokens.

    With label smoothing ε the loss is that of robust DPO (arXiv:2403.00409): the expectation over preferences
    of which a share ε is flipped is then the loss on the true ones. Or it is that of conservative DPO: the mean of the
    losses of both directions, weighted with 1 − ε and ε, which is least at a finite margin.
    """

    name: ClassVar[str] = "dpo"
    title: ClassVar[str] = "DPO: direct preference optimization"
    paper: ClassVar[str] = "arXiv:2305.18290"
    formula: ClassVar[str] = (
        "ρ = Σ_s (π_s − r_s) (reduction=sum), 1/T Σ_s (π_s − r_s) (reduction=mean)\n"
        "loss = −log σ(β (ρ⁺ − ρ⁻))\n"
        "with label_smoothing ε, l the loss and l' that of the flipped pair: ((1 − ε) l − ε l') / (1 − 2ε) "
        "(smoothing=robust), (1 − ε) l + ε l' (smoothing=conservative)"
    )
    works_with: ClassVar[Mapping[str, str]] = {"smoothing": "label_smoothing"}

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share ε of preferences that are expected to be flipped."""
    smoothing: Literal["robust", "conservative"] = "robust"
    """Loss with label_smoothing: that of robust DPO, or that of conservative DPO (cDPO)."""
    reduction: Literal["sum", "mean"] = "sum"
    """Log-ratio of a response: summed over its tokens (the paper), or averaged (length-normalized DPO)."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        ratios = logps.log_ratio()
        rewards = self.beta * (ratios / logps.lengths if self.reduction == "mean" else ratios)
        margin = margins(rewards, pairs)
        losses = -F.logsigmoid(margin)
        if share := self.label_smoothing:
            flipped = -F.logsigmoid(-margin)
            if self.smoothing == "robust":
                losses = ((1 - share) * losses - share * flipped) / (1 - 2 * share)
            else:
                losses = (1 - share) * losses + share * flipped
        return Output(losses, rewards=rewards.detach())
