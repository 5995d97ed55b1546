"""CPL: contrastive preference learning, by the log-probability alone (arXiv:2310.13639)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import Logps, NonNegative, Objective, Output, Positive


class CPL(Objective):
    """−log σ(score⁺ − λ score⁻), score = β Σ_s π_s in nats: the optimal advantage under entropy regularization.

    It is RePO_det without its reference and without future tokens.
    """

    name: ClassVar[str] = "cpl"
    title: ClassVar[str] = "CPL: contrastive preference learning"
    paper: ClassVar[str] = "arXiv:2310.13639"
    formula: ClassVar[str] = "score = β Σ_s π_s\nloss = −log σ(score⁺ − λ score⁻)"

    beta: Positive = 0.1
    """Inverse temperature β of the score."""
    rejected_weight: NonNegative = 0.5
    """Weight λ of the rejected score; below 1 the loss falls as both responses become more likely."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"rejected"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        scores = -self.beta * logps.nll("sum")
        chosen, rejected = scores[pairs].unbind(dim=1)
        losses = -F.logsigmoid(chosen - self.rejected_weight * rejected)
        return Output(losses, scores=scores, rewards=scores.detach())
