"""ORPO: odds ratio preference optimization, without a reference (arXiv:2403.07691)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, Objective, Output, Positive, margins


class ORPO(Objective):
    """−a⁺ − β log σ(o⁺ − o⁻), a the mean log-probability of a response's tokens, o = a − log(1 − eᵃ) (eqs. 6, 7)."""

    name: ClassVar[str] = "orpo"
    title: ClassVar[str] = "ORPO: odds ratio preference optimization"
    paper: ClassVar[str] = "arXiv:2403.07691"
    formula: ClassVar[str] = "a = 1/T Σ_s π_s\no = a − log(1 − exp(a))\nloss = −a⁺ − β log σ(o⁺ − o⁻)"
    rewards_means: ClassVar[bool] = True

    beta: Positive = 0.1
    """Weight β of the odds ratio term, the paper's λ."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"rejected"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        nll = logps.nll("mean")
        # A response of probability one has infinite odds: beyond the last number below one, odds stay as they are.
        means = (-nll).clamp(max=-torch.finfo(nll.dtype).eps)
        log_odds = means - torch.log(-torch.expm1(means))
        losses = nll[pairs[:, 0]] - self.beta * F.logsigmoid(margins(log_odds, pairs))
        return Output(losses, rewards=-self.beta * nll.detach())
