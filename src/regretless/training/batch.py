"""Pairs as tensors: shared-prefix rows, or plain ones, and their view as (responses, tokens), which objectives read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.core.continuations import Continuation
from regretless.core.errors import DataError
from regretless.core.top_logps import unpacked
from regretless.data.columns import CONTINUATIONS, TOP
from regretless.data.tokenization import STEPS, UNITS, TokenizedSide
from regretless.modeling.layout import Ids, Item, Layout
from regretless.modeling.router_loss import DistinctTokens
from regretless.modeling.rows import RowKind, lay_out_rows
from regretless.modeling.token_logps import TokenScores
from regretless.objectives import Logps, Objective
from regretless.objectives.base import NO_ROW
from regretless.objectives.continued import Continued
from regretless.objectives.inputs import (
    as_logps,
    lacks,
    later_steps,
    of_data,
    padded,
    preferences,
    step_numbers,
    unit_numbers,
)
from regretless.objectives.listed import Listed
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
    """(P, 2) rows of chosen and rejected; the chosen row twice for a method that reads no rejected one. Of a method of
    lists (P, 1 + K), as `Objective` takes them."""
    inputs: Mapping[str, Tensor]
    """(R, T) what the objective needs besides the policy's scores, by name (`Objective.needs`): `reference` and
    `behavior` in nats, `steps`, and further numbers of the data."""
    token_counts: tuple[int, int]
    """Response tokens on the chosen and on the rejected sides of the pairs; a response counts in each of its pairs."""
    sources: tuple[str, ...]
    """Origin of each pair, or of the first one of each list, for messages."""
    counted_tokens: int = 0
    """Tokens of its rows that the load-balancing loss is about; 0 if it is not computed."""
    top: Tensor | None = None
    """(R, T, K) log-probabilities (nats) under the behavior policy of the tokens that the layouts list, if they do."""
    preferences: Tensor | None = None
    """(P,) what an objective with `soft_labels` is called with."""
    continued: Mapping[str, Tensor] | None = None
    """Continuations of the responses, if the objective needs them: the fields of `Continued` by name, and in place of
    the policy's log-probabilities `gather` (F, L), as above."""
    aux_weight: float = 1.0
    """Factor of the load-balancing loss beside the mean loss over pairs: this micro-batch's share of the step's counted
    tokens divided by its share of the step's pairs, because the step weights the sum of the two by the latter."""

    @property
    def compared(self) -> Tensor:
        """(N, 2) rows of every two responses that are compared: the pairs, or of each list the chosen with each one."""
        if self.pairs.shape[1] == 2:
            return self.pairs  # selecting would wait for the device
        listed = self.pairs[:, 1:] != NO_ROW
        return torch.stack([self.pairs[:, :1].expand_as(listed)[listed], self.pairs[:, 1:][listed]], dim=1)

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
        top = None
        if self.top is not None and scores.listed is not None:
            top = Listed(self.top, scores.listed[:, self.gather].movedim(0, -1))
        continued = None
        if self.continued is not None:
            given = dict(self.continued)
            continued = Continued(policy=scores.logps[given.pop("gather")], **given)
        return Logps(
            policy=scores.logps[self.gather],
            mask=self.mask,
            top_logps=top,
            continuations=continued,
            reference_kl=None if scores.kl is None else scores.kl[self.gather],
            z_ref=z_ref,
            **as_logps(self.inputs),
        )

    def to(self, device: torch.device) -> PairBatch:
        """The same batch on a device."""
        return replace(
            self,
            layouts=tuple(layout.to(device) for layout in self.layouts),
            gather=self.gather.to(device),
            mask=self.mask.to(device),
            pairs=self.pairs.to(device),
            preferences=None if self.preferences is None else self.preferences.to(device),
            inputs={name: values.to(device, non_blocking=True) for name, values in self.inputs.items()},
            top=None if self.top is None else self.top.to(device, non_blocking=True),
            continued=self.continued and {name: values.to(device) for name, values in self.continued.items()},
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
    given = {name for name, wanted in ((STEPS, "steps" in needs), (UNITS, objective.reads_units)) if wanted}

    # The distinct responses, and for each pair, or list, the numbers of its own.
    responses: dict[tuple[Ids, TokenizedSide], int] = {}
    numbers: list[list[int]] = []
    for item in pairs:
        sides = item.sides(rejected="rejected" in needs)
        for name in names:
            if not all(side.has(name) for side in sides):
                raise DataError(f"{item.pair.source}: {lacks(name)}")
        # A response generated by two policies counts as two, which share one computation.
        keys = [(item.pair.prompt_ids, side.only((*names, *given.intersection(side.values)))) for side in sides]
        of_pair = [responses.setdefault(key, len(responses)) for key in keys]
        numbers.append(of_pair if len(of_pair) > 1 else of_pair * 2)

    # Rows for the model, and each response's indices among the tokens that they predict.
    items = [(prompt, side.ids) for prompt, side in responses]
    drawn = [
        (row, side, one, (prompt, ids))
        for row, (prompt, side) in enumerate(responses)
        if CONTINUATIONS in names
        for one, ids in side.paths()
    ]
    computed = [*items, *(path for *_, path in drawn)]
    of_item: dict[Item, list[int]] = {}
    for number, response in enumerate(computed):
        of_item.setdefault(response, []).append(number)
    entries = [_entries(side) for _, side in responses] if TOP in names else []
    layouts: list[Layout] = []
    gather: dict[int, Tensor] = {}
    predicted = 0
    for in_row in cut_rows(computed, max_tokens, kind):
        layout, indices = lay_out_rows(in_row, kind)
        if distinct is not None:
            layout = replace(layout, counted=distinct.new(layout))
        index = {number: of_one for one, of_one in zip(in_row, indices, strict=True) for number in of_item[one]}
        if entries:
            layout, index = _listing(layout, index, entries)
        layouts.append(layout)
        gather |= {number: predicted + of_one for number, of_one in index.items()}
        predicted += len(layout.targets)

    # What the objective reads besides the policy's scores.
    single = [name for name in names if name not in (TOP, CONTINUATIONS)]
    inputs = {name: padded([torch.tensor(side.values[name]) for _, side in responses]) for name in single}
    if "reference" in needs:
        assert reference is not None
        inputs["reference"] = padded([torch.from_numpy(reference(response)) for response in items])
    if "steps" in needs:
        assert ends_step is not None
        inputs["steps"] = step_numbers([(side.ids, side.steps, side.units) for _, side in responses], ends_step)
    inputs |= unit_numbers([(side.own, side.units) for _, side in responses])

    continued = None
    if CONTINUATIONS in names:
        steps = ends_step if "steps" in needs else None
        continued = _continued(drawn, [gather[len(items) + number] for number in range(len(drawn))], steps)

    lengths = [len(side.own) for _, side in responses]
    return PairBatch(
        layouts=tuple(layouts),
        gather=padded([gather[number] for number in range(len(items))]),
        mask=padded([torch.ones(length, dtype=torch.bool) for length in lengths]),
        pairs=pad_sequence([torch.tensor(rows) for rows in numbers], batch_first=True, padding_value=NO_ROW),
        preferences=preferences(objective, [item.pair.preference_probability for item in pairs]),
        inputs=inputs,
        top=padded([torch.from_numpy(each["logp"].copy()) for each in entries]) if entries else None,
        continued=continued,
        token_counts=(
            sum(lengths[rows[0]] * (len(rows) - 1) for rows in numbers),
            sum(lengths[row] for rows in numbers for row in rows[1:]),
        ),
        sources=tuple(item.pair.source for item in pairs),
        counted_tokens=sum(int(layout.counted.sum()) for layout in layouts if layout.counted is not None),
    )


def _continued(
    drawn: Sequence[tuple[int, TokenizedSide, Continuation, Item]],
    gather: Sequence[Tensor],
    ends_step: Callable[[int], bool] | None,
) -> dict[str, Tensor]:
    """`PairBatch.continued` of continuations: of each its row, side and path. gather: indices of the paths' tokens."""
    lengths = [len(one.ids) for *_, one, _ in drawn]
    fields = {
        "gather": [index[-length:] for index, length in zip(gather, lengths, strict=True)],
        "behavior": [torch.from_numpy(one.logps.copy()) for *_, one, _ in drawn],
        "mask": [torch.ones(length, dtype=torch.bool) for length in lengths],
    }
    if ends_step is not None:
        fields["steps"] = [
            torch.tensor(later_steps(ids, one.start, len(one.ids), side.steps, ends_step))
            for _, side, one, (_, ids) in drawn
        ]
    none = {"gather": torch.long, "steps": torch.long, "mask": torch.bool, "behavior": torch.float32}
    return {
        "rows": torch.tensor([row for row, *_ in drawn], dtype=torch.long),
        "starts": torch.tensor([one.start for *_, one, _ in drawn], dtype=torch.long),
        **{name: padded(rows) if rows else torch.zeros(0, 1, dtype=none[name]) for name, rows in fields.items()},
    }


def _entries(side: TokenizedSide) -> NDArray[np.void]:
    """The listed tokens (T, K) of a response, in the order of their ids."""
    assert side.top is not None
    entries = unpacked(side.top, len(side.own))
    return np.take_along_axis(entries, entries["id"].argsort(axis=1), axis=1)


def _listing(
    layout: Layout, index: Mapping[int, Tensor], entries: Sequence[NDArray[np.void]]
) -> tuple[Layout, dict[int, Tensor]]:
    """A row that lists tokens, and for each of its responses the indices of its tokens among those predicted then.

    A token that several responses begin with is predicted once for each set of tokens that they list in its place:
    once, if they have one writer, but where its log-probabilities are too close to say which is the K-th.
    """
    wanted = np.concatenate([np.column_stack((index[number], entries[number]["id"])) for number in index])
    distinct, places = np.unique(wanted, axis=0, return_inverse=True)
    rows = torch.from_numpy(distinct[:, 0])
    layout = replace(
        layout,
        predict=layout.predict[rows],
        targets=layout.targets[rows],
        listed=torch.from_numpy(distinct[:, 1:].copy()),
    )
    parts = torch.split(torch.from_numpy(places.reshape(-1)), [len(index[number]) for number in index])
    return layout, dict(zip(index, parts, strict=True))
