"""Pairs as tensors: shared-prefix rows, or plain ones, and their view as (responses, tokens), which objectives read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regretless.core.errors import DataError
from regretless.modeling.layout import Ids, Item, Layout, own_ids
from regretless.modeling.router_loss import DistinctTokens
from regretless.modeling.rows import RowKind, lay_out_rows
from regretless.modeling.token_logps import TokenScores
from regretless.objectives import Logps, Objective
from regretless.objectives.inputs import lacks, of_data, padded, step_numbers
from regretless.training.data import TrainingPair
from regretless.training.packing import cut_rows

ReferenceLookup = Callable[[Item], NDArray[np.float32]]
"""(prompt, response) → reference log-probability of each token that the model wrote of the response, nats."""


@dataclass(frozen=True)
class PairBatch:
    """A micro-batch: R distinct responses of up to T tokens, and P pairs of them.

    T counts the tokens that the model wrote: context between its messages is in the layout alone, so that it is in no
    sum, weight, mean or length of an objective or a metric.
    """

    layouts: tuple[Layout, ...]
    """Its rows, the largest first; more than one if they would be too large for one. Each response is in one."""
    gather: Tensor
    """(R, T) index of each response token among the rows' M predicted ones together; 0 after the end."""
    mask: Tensor
    """(R, T) bool: real tokens."""
    pairs: Tensor
    """(P, 2) rows of chosen and rejected; the chosen row twice for a method that reads no rejected one."""
    reference: Tensor | None
    """(R, T) nats."""
    behavior: Tensor | None
    """(R, T) nats."""
    steps: Tensor | None
    """(R, T) index of the reasoning step that each token belongs to."""
    token_numbers: Mapping[str, Tensor]
    """(R, T) further per-token numbers of the data that the objective needs, by name."""
    token_counts: tuple[int, int]
    """Response tokens on the chosen and on the rejected sides of the pairs; a response counts in each of its pairs."""
    sources: tuple[str, ...]
    """Origin of each pair, for messages."""
    counted_tokens: int = 0
    """Tokens of its rows that the load-balancing loss is about; 0 if it is not computed."""
    aux_weight: float = 1.0
    """Factor of the load-balancing loss beside the mean loss over pairs: this micro-batch's share of the step's counted
    tokens divided by its share of the step's pairs, because the step weights the sum of the two by the latter."""

    @property
    def tokens(self) -> int:
        """Tokens that the model reads: those of all rows."""
        return sum(layout.tokens for layout in self.layouts)

    @property
    def tokens_recomputed(self) -> int:
        """Those of them that training computes twice (`training.passes`): all but the first row's."""
        return self.tokens - self.layouts[0].tokens

    def logps(self, scores: TokenScores, z_ref: Tensor | None = None) -> Logps:
        """Inputs of objectives, given the policy's scores of all rows' tokens and the step's zero point (nats)."""
        return Logps(
            policy=scores.logps[self.gather],
            reference=self.reference,
            behavior=self.behavior,
            mask=self.mask,
            reference_kl=None if scores.kl is None else scores.kl[self.gather],
            steps=self.steps,
            token_numbers=self.token_numbers,
            z_ref=z_ref,
        )

    def to(self, device: torch.device) -> PairBatch:
        """The same batch on a device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            layouts=tuple(layout.to(device) for layout in self.layouts),
            gather=self.gather.to(device),
            mask=self.mask.to(device),
            pairs=self.pairs.to(device),
            reference=move(self.reference),
            behavior=move(self.behavior),
            steps=move(self.steps),
            token_numbers={name: values.to(device, non_blocking=True) for name, values in self.token_numbers.items()},
        )


def build_batch(
    pairs: Sequence[TrainingPair],
    objective: Objective,
    *,
    reference: ReferenceLookup | None = None,
    ends_step: Callable[[int], bool] | None = None,
    kind: RowKind = "grouped",
    max_tokens: int = sys.maxsize,
    distinct: DistinctTokens | None = None,
) -> PairBatch:
    """Micro-batch of pairs with the inputs of the objective, in rows of a kind, at most `max_tokens` tokens at a time.

    `ends_step`: true for a token id that ends a reasoning step. `distinct`: the step's tokens so far, for a mixture of
    experts with a load-balancing loss; it is about those that are new in this micro-batch. Raises DataError if the
    behavior policy's log-probabilities, or other numbers of the data, are required and a pair lacks them.
    """
    needs, names = objective.required, of_data(objective)

    # The distinct responses: (prompt, response, its numbers of the data). Pairs point at them.
    # The same response generated by two policies is two of them over one computation.
    responses: dict[tuple[Ids, Ids, tuple[tuple[float, ...], ...]], int] = {}
    ends: list[tuple[int, int]] = []
    for item in pairs:
        sides = item.pair.sides if "rejected" in needs else (item.pair.chosen,)
        indices = []
        for side in sides:
            for name in names:
                if not side.has(name):
                    raise DataError(f"{item.pair.source}: {lacks(name)}")
            key = (item.pair.prompt_ids, side.ids, tuple(map(side.values, names)))
            indices.append(responses.setdefault(key, len(responses)))
        ends.append((indices[0], indices[-1]))

    # The rows that the model computes, and the index of each response's tokens among the tokens of all rows.
    layouts: list[Layout] = []
    indices_of: dict[Item, Tensor] = {}
    predicted = 0
    for items in cut_rows([(prompt, response) for prompt, response, _ in responses], max_tokens, kind):
        layout, indices_in_row = lay_out_rows(items, kind)
        if distinct is not None:
            layout = replace(layout, counted=distinct.new(layout))
        layouts.append(layout)
        for item_of_row, in_row in zip(items, indices_in_row, strict=True):
            indices_of[item_of_row] = predicted + in_row
        predicted += len(layout.targets)

    # What the objective reads of each response, padded to (responses, tokens).
    gather, lengths, reference_values = [], [], []
    values_of: dict[str, list[Tensor]] = {name: [] for name in names}
    for prompt, response, values in responses:
        gather.append(indices_of[prompt, response])
        lengths.append(len(own_ids(response)))
        for name, numbers in zip(names, values, strict=True):
            values_of[name].append(torch.tensor(numbers))
        if "reference" in needs:
            assert reference is not None
            reference_values.append(torch.from_numpy(reference((prompt, response))))
    steps = None
    if "steps" in needs:
        assert ends_step is not None
        steps = step_numbers([response for _, response, _ in responses], ends_step)
    token_numbers = {name: padded(tensors) for name, tensors in values_of.items()}
    return PairBatch(
        layouts=tuple(layouts),
        gather=padded(gather),
        mask=padded([torch.ones(length, dtype=torch.bool) for length in lengths]),
        pairs=torch.tensor(ends),
        reference=padded(reference_values) if reference_values else None,
        behavior=token_numbers.pop("behavior", None),
        steps=steps,
        token_numbers=token_numbers,
        token_counts=(sum(lengths[chosen] for chosen, _ in ends), sum(lengths[rejected] for _, rejected in ends)),
        sources=tuple(item.pair.source for item in pairs),
        counted_tokens=sum(int(layout.counted.sum()) for layout in layouts if layout.counted is not None),
    )
