"""SimPO: simple preference optimization, without a reference (arXiv:2405.14734)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive, margins


class SimPO(Objective):
    """−log σ(β (a⁺ − a⁻) − γ), a the mean log-probability of a response's tokens under the policy, nats (eq. 6)."""

    name: ClassVar[str] = "simpo"
    title: ClassVar[str] = "SimPO: simple preference optimization"
    paper: ClassVar[str] = "arXiv:2405.14734"
    formula: ClassVar[str] = "a = 1/T Σ_s π_s\nloss = −log σ(β (a⁺ − a⁻) − γ)"
    rewards_means: ClassVar[bool] = True

    beta: Positive = 2.0
    """Scale β of the reward."""
    gamma: NonNegative = 0.5
    """Target margin γ of the rewards; the authors' gamma_beta_ratio is γ/β."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"rejected"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = -self.beta * logps.nll("mean")
        return Output(-F.logsigmoid(margins(rewards, pairs) - self.gamma), rewards=rewards.detach())
