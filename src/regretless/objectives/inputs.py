"""Inputs of objectives made of responses: which of them the data has to hold, and their (responses, tokens) form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.objectives.base import Objective


def of_data(objective: Objective) -> tuple[str, ...]:
    """Names of the per-token inputs that the data has to hold: `behavior`, and the objective's `token_numbers`."""
    behavior = ("behavior",) if "behavior" in objective.needs else ()
    return (*behavior, *sorted(objective.token_numbers))


def lacks(name: str) -> str:
    """What to tell about data without such an input."""
    if name == "behavior":
        return "no behavior log-probabilities; use repo_det, or re-score the data"
    return f"no token_numbers.{name}; sample with an engine that records it"


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of values of different lengths as one tensor (R, T), 0 behind their ends."""
    return pad_sequence(list(rows), batch_first=True)


def step_numbers(responses: Sequence[Sequence[int]], ends_step: Callable[[int], bool]) -> Tensor:
    """(R, T) number, from 0, of the reasoning step that each token of a response belongs to.

    `ends_step` tells for a token id whether a step ends with it.
    """
    closed = [torch.tensor([0, *map(ends_step, response[:-1])], dtype=torch.long) for response in responses]
    return padded([row.cumsum(0) for row in closed])
