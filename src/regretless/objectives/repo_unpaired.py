"""Unpaired RePO: each response is classified by its own score, as in the RePO authors' unpaired class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives.base import SINGLE_LOSSES, Positive
from regretless.objectives.repo import SCORE, RePO
from regretless.objectives.weights import Formulation

CONSTANT: dict[Formulation, float] = {"paper": 0.0, "released": 1.0}
"""Added to every loss; it has no gradient."""


class RePOUnpaired(RePO):
    """−log σ(score⁺) and −log σ(−score⁻), the loss being the mean over all 2P terms; the score is RePO's.

    The released formulation is that of `RePO_Unvalanced_Loss` in the authors' code, which adds 1 to both.
    """

    name: ClassVar[str] = "repo_unpaired"
    title: ClassVar[str] = "Unpaired RePO: regret-based preference optimization of single responses"
    formula: ClassVar[str] = (
        f"{SCORE}loss = mean of −log σ(score⁺) over chosen and −log σ(−score⁻) over rejected (released: plus 1) "
        "+ sft_weight · mean_s(−π_s⁺)"
    )
    refuses: ClassVar[Mapping[str, str]] = {"soft_labels": SINGLE_LOSSES}

    beta: Positive = 0.1
    """Inverse temperature β of the score."""
    formulation: Formulation = "released"
    """`paper` is the score of the paper's formula (future tokens, summed); `released` that of the authors' released
    code (current token too, averaged), which alone has this loss."""
    # No setting: the two scores of a pair do not meet.
    rejected_weight: ClassVar[None] = None  # type: ignore[misc]

    def losses(self, scores: Tensor, pairs: Tensor) -> Tensor:
        chosen, rejected = scores[pairs].unbind(dim=1)
        return CONSTANT[self.formulation] - F.logsigmoid(torch.stack([chosen, -rejected], dim=1))
