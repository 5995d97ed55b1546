"""Pairs as tensors: one shared-prefix row, and the (responses, tokens) view of it that objectives read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regretless.core.errors import DataError
from regretless.modeling.layout import Layout, Tokens, lay_out
from regretless.modeling.token_logps import TokenScores
from regretless.objectives import Logps
from regretless.training.data import TrainingPair

ReferenceLookup = Callable[[tuple[Tokens, Tokens]], NDArray[np.float32]]
"""(prompt, response) → reference log-probability of each response token, nats."""


@dataclass(frozen=True)
class PairBatch:
    """A micro-batch: R distinct responses of up to T tokens, and P pairs of them."""

    layout: Layout
    gather: Tensor
    """(R, T) place of each response token among the layout's M predicted ones; 0 behind the end."""
    mask: Tensor
    """(R, T) bool: real tokens."""
    pairs: Tensor
    """(P, 2) rows of chosen and rejected; the chosen twice for a method that reads no rejected one."""
    reference: Tensor | None
    """(R, T) nats."""
    behavior: Tensor | None
    """(R, T) nats."""
    steps: Tensor | None
    """(R, T) index of the reasoning step that each token belongs to."""
    sources: tuple[str, ...]
    """Where each pair came from, for messages."""

    def logps(self, scores: TokenScores) -> Logps:
        """What objectives read, given the policy's scores of the layout's tokens."""
        return Logps(
            policy=scores.logps[self.gather],
            reference=self.reference,
            behavior=self.behavior,
            mask=self.mask,
            reference_kl=None if scores.kl is None else scores.kl[self.gather],
            steps=self.steps,
        )

    def to(self, device: torch.device) -> PairBatch:
        """The same batch on a device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            layout=self.layout.to(device),
            gather=self.gather.to(device),
            mask=self.mask.to(device),
            pairs=self.pairs.to(device),
            reference=move(self.reference),
            behavior=move(self.behavior),
            steps=move(self.steps),
        )


def build_batch(
    pairs: Sequence[TrainingPair],
    needs: frozenset[str],
    *,
    reference: ReferenceLookup | None = None,
    ends_step: Callable[[int], bool] | None = None,
) -> PairBatch:
    """Micro-batch of pairs with what the objective needs (`objective.needs`).

    `ends_step` tells for a token id whether a reasoning step ends with it. Raises DataError when the behaviour's
    log-probabilities are needed and a pair has none.
    """
    with_behavior = "behavior" in needs
    rows: dict[tuple[Tokens, Tokens, tuple[float, ...] | None], int] = {}
    ends: list[tuple[int, int]] = []
    for item in pairs:
        pair = item.pair
        sides = [(pair.chosen_ids, pair.chosen_logps)]
        if "rejected" in needs:
            assert pair.rejected_ids is not None
            sides.append((pair.rejected_ids, pair.rejected_logps))
        if with_behavior and any(logps is None for _, logps in sides):
            raise DataError(f"{pair.source}: no behaviour log-probabilities; use repo_det, or re-score the data")
        indices = []
        for response, logps in sides:
            # The same response written by two policies is two rows over one computation.
            key = (pair.prompt_ids, response, logps if with_behavior else None)
            indices.append(rows.setdefault(key, len(rows)))
        ends.append((indices[0], indices[-1]))

    layout, places = lay_out([(prompt, response) for prompt, response, _ in rows])
    count, longest = len(rows), max(place.length for place in places)
    gather = torch.zeros(count, longest, dtype=torch.long)
    mask = torch.zeros(count, longest, dtype=torch.bool)
    reference_logps = torch.zeros(count, longest) if "reference" in needs else None
    behavior_logps = torch.zeros(count, longest) if with_behavior else None
    steps = torch.zeros(count, longest, dtype=torch.long) if "steps" in needs else None
    for row, ((prompt, response, logps), place) in enumerate(zip(rows, places, strict=True)):
        length = place.length
        gather[row, :length] = torch.arange(place.start, place.start + length)
        mask[row, :length] = True
        if reference_logps is not None:
            assert reference is not None
            reference_logps[row, :length] = torch.from_numpy(reference((prompt, response)))
        if behavior_logps is not None:
            behavior_logps[row, :length] = torch.tensor(logps)
        if steps is not None:
            assert ends_step is not None
            closed = torch.tensor([ends_step(token) for token in response[:-1]], dtype=torch.long)
            steps[row, 1:length] = closed.cumsum(0)
    return PairBatch(
        layout=layout,
        gather=gather,
        mask=mask,
        pairs=torch.tensor(ends),
        reference=reference_logps,
        behavior=behavior_logps,
        steps=steps,
        sources=tuple(item.pair.source for item in pairs),
    )
