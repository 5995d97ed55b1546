"""Supervised fine-tuning on the chosen responses: the control for every preference method, and pretraining."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from regretless.objectives.base import Logps, Objective, Output


class SFT(Objective):
    """Negative log-likelihood of the chosen response, −Σ_s log π_θ(o_s), averaged over its tokens or summed, nats."""

    name: ClassVar[str] = "sft"
    title: ClassVar[str] = "SFT: supervised fine-tuning on the chosen responses"
    paper: ClassVar[str] = "arXiv:2203.02155"
    formula: ClassVar[str] = "loss = −1/T⁺ Σ_s π_s⁺ (reduction=mean)\nloss = −Σ_s π_s⁺ (reduction=sum)"

    reduction: Literal["mean", "sum"] = "mean"
    """Negative log-likelihood of a response: averaged over its tokens, so that all responses count equally, or
    summed."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        return Output(logps.nll(self.reduction)[pairs[:, 0]])
