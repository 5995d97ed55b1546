"""DPO: direct preference optimization (arXiv:2305.18290)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, Objective, Output, Positive, margins, refuse_bool


class DPO(Objective):
    """−log σ(β (ρ⁺ − ρ⁻)), ρ the summed log-ratio of policy to reference in nats (eq. 7).

    With label smoothing ε the loss is that of robust DPO (arXiv:2403.00409): the expectation over preferences
    of which a share ε is flipped is then the loss on the true ones.
    """

    name: ClassVar[str] = "dpo"
    title: ClassVar[str] = "DPO: direct preference optimization"
    paper: ClassVar[str] = "arXiv:2305.18290"
    formula: ClassVar[str] = "ρ = Σ_s (π_s − r_s)\nloss = −log σ(β (ρ⁺ − ρ⁻))"

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), BeforeValidator(refuse_bool)] = 0.0
    """Share ε of preferences that are expected to be flipped; above 0 it gives robust DPO."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        margin = margins(rewards, pairs)
        losses = -F.logsigmoid(margin)
        if self.label_smoothing:
            share = self.label_smoothing
            losses = ((1 - share) * losses + share * F.logsigmoid(-margin)) / (1 - 2 * share)
        return Output(losses, rewards=rewards.detach())
