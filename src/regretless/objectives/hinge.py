"""The hinge loss on DPO's margin: SLiC with a reference, as in RSO (arXiv:2309.06657)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from regretless.objectives.base import Logps, Objective, Output, Positive, margins


class Hinge(Objective):
    """max(0, 1 − β (ρ⁺ − ρ⁻)), ρ the summed log-ratio of policy to reference in nats."""

    name: ClassVar[str] = "hinge"
    title: ClassVar[str] = "Hinge: SLiC's loss, relative to a reference"
    paper: ClassVar[str] = "arXiv:2309.06657"
    formula: ClassVar[str] = "ρ = Σ_s (π_s − r_s)\nloss = max(0, 1 − β (ρ⁺ − ρ⁻))"

    beta: Positive = 0.1
    """Inverse of the margin, in nats, from which on a pair has no gradient."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        return Output(torch.relu(1 - margins(rewards, pairs)), rewards=rewards.detach())
