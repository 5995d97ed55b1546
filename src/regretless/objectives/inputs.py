"""Inputs of objectives computed from responses: those that the data must have, and their (responses, tokens) form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.objectives.base import INPUTS, Objective, similar

OF_DATA = ("behavior", "top_logps", "continuations", "future")
"""Inputs that come from the data alone."""


def of_data(objective: Objective) -> tuple[str, ...]:
    """Names of the per-token inputs that the data must have: of `OF_DATA`, and the objective's `token_numbers`."""
    return (*(name for name in OF_DATA if name in objective.required), *sorted(objective.token_numbers))


def lacks(name: str) -> str:
    """The problem of data without such an input, and what to do."""
    if name == "behavior":
        return "no behavior log-probabilities; use repo_det, or re-score the data"
    if name == "top_logps":
        return "no lists of the most likely tokens; sample with top_logps, or set estimator=sampled"
    if name == "continuations":
        return "no continuations; run rollout with keep_continuations, or set estimator=sampled"
    return f"no token_numbers.{name}; sample with an engine that records it{similar(name)}"


def as_logps(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of `Logps` for inputs by name: those of `INPUTS` by themselves, all others as `token_numbers`."""
    fields: dict[str, Any] = {name: values for name, values in inputs.items() if name in INPUTS}
    return {**fields, "token_numbers": {name: values for name, values in inputs.items() if name not in INPUTS}}


def preferences(objective: Objective, probabilities: Sequence[float | None]) -> Tensor | None:
    """What an objective with `soft_labels` is called with, (P,): pairs without a probability are certain; else None."""
    if not objective.soft_labels:
        return None
    return torch.tensor([1.0 if probability is None else probability for probability in probabilities])


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows of values of different lengths as one tensor (R, T), padded with 0."""
    return pad_sequence(list(rows), batch_first=True)


def step_numbers(
    responses: Sequence[tuple[Sequence[int], Sequence[int] | None, Sequence[int] | None]],
    ends_step: Callable[[int], bool],
) -> Tensor:
    """(R, T) index, from 0, of the reasoning step of each token that the model wrote of a response.

    responses: token ids, and the index and the unit of each where the data has them; negative ids are context between
    the model's messages (`modeling.layout.Ids`), which has no step. Else a step ends with a token id for which
    `ends_step` is true, and with a message. A unit that holds the end of a step belongs to it.
    """
    rows = [(_steps(ids, ends_step) if given is None else given, units) for ids, given, units in responses]
    return padded([torch.tensor(steps if units is None else _of_units(steps, units)) for steps, units in rows])


def unit_numbers(responses: Sequence[tuple[Sequence[int], Sequence[int] | None]]) -> dict[str, Tensor]:
    """The input `units`, (R, T), if a response has units.

    responses: the tokens that the model wrote, and the unit of each, or None if they are the units.
    """
    if all(units is None for _, units in responses):
        return {}
    return {"units": padded([torch.tensor(range(len(ids)) if units is None else units) for ids, units in responses])}


def _of_units(steps: Sequence[int], units: Sequence[int]) -> list[int]:
    first: dict[int, int] = {}
    for step, unit in zip(steps, units, strict=True):
        first.setdefault(unit, step)
    number = {step: index for index, step in enumerate(sorted(set(first.values())))}
    return [number[first[unit]] for unit in units]


def later_steps(
    path: Sequence[int],
    start: int,
    count: int,
    given: Sequence[int] | None,
    ends_step: Callable[[int], bool],
) -> list[int]:
    """Index of the reasoning step of each of the last `count` tokens of a path, which continue its response's `start`.

    given: index of each of the response's tokens where the data has it; `ends_step` then says where the continuation's
    own steps end, and the first of them is that of the response that goes on, unless one ends there.
    """
    if given is None:
        return _steps(path, ends_step)[-count:]
    first = given[start - 1] + (given[start] > given[start - 1])
    return [first + step for step in _steps(path[-count:], ends_step)]


def _steps(response: Sequence[int], ends_step: Callable[[int], bool]) -> list[int]:
    steps: list[int] = []
    closed = False
    for token in response:
        if token < 0:
            closed = bool(steps)
        else:
            steps.append((steps[-1] + closed) if steps else 0)
            closed = ends_step(token)
    return steps
