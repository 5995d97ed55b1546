"""Listwise RePO: each better response to a prompt against all worse ones at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import NO_ROW
from regretless.objectives.repo import SCORE, RePO


class RePOListwise(RePO):
    """−log [e^score⁺ / (e^score⁺ + Σ_j e^(λ score_j⁻))] over the worse responses j to the prompt; the score is RePO's.

    With one worse response it is RePO's loss.
    """

    name: ClassVar[str] = "repo_listwise"
    title: ClassVar[str] = "Listwise RePO: regret-based preference optimization over all responses to a prompt"
    formula: ClassVar[str] = (
        f"{SCORE}loss = −log [ e^score⁺ / (e^score⁺ + Σ_j e^(λ score_j⁻)) ] + sft_weight · mean_s(−π_s⁺)"
    )
    lists: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "soft_labels": "has losses of lists, which have no flipped form",
        "ld_alpha": "compares a response with several, and there is no one shorter length",
        "importance": "has one loss for several rejected responses, each of which would weigh it",
    }

    def losses(self, scores: Tensor, pairs: Tensor) -> Tensor:
        chosen, rejected = scores[pairs[:, 0]], self.weight_of_rejected * scores[pairs[:, 1:]]
        together = rejected.masked_fill(pairs[:, 1:] == NO_ROW, -torch.inf).logsumexp(dim=1)
        return -F.logsigmoid(chosen - together)
