"""Values of the objectives at the first training step, when the policy still equals the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regretless.data.tokenization import FUTURE, TokenizedPair
from regretless.modeling.layout import Ids
from regretless.objectives import Logps, Objective
from regretless.objectives.base import NO_ROW, SATURATED
from regretless.objectives.inputs import as_logps, of_data, padded, preferences, step_numbers, unit_numbers

PAIRS_AT_ONCE = 128
Reference = Mapping[tuple[Ids, Ids], NDArray[np.float32]]
"""Log-probability (nats) of every token that the model wrote of a response, keyed by (prompt, response)."""


def at_start(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> dict[str, Any]:
    """Loss and reward margins (chosen minus rejected, nats) of pairs before the first update.

    Margins are those that training logs as `rewards/margins`; None for a method without rewards. Pairs without the
    behavior log-probabilities that the objective needs are left out and counted. Where it fills them in instead
    (`Objective.missing`), `recorded` and `filled` have the rewards of both sides and the margins, of the pairs with
    them and of those without.
    """
    able = usable(objective, pairs)
    losses, rewards = values_at_start(objective, able, reference, ends_step)
    margin = None if rewards is None else rewards[:, 0] - rewards[:, 1]
    filled = np.array([bool(pair.filled) for pair in able])
    parts = {}
    if rewards is not None and filled.any():
        for name, rows in (("recorded", ~filled), ("filled", filled)):
            chosen, rejected = rewards[rows].T
            parts[name] = {
                "pairs": int(rows.sum()),
                "chosen": spread(chosen),
                "rejected": spread(rejected),
                "margin": spread(chosen - rejected),
            }
    return {
        **parts,
        "pairs": len(able),
        "without_behavior_logps": len(pairs) - len(able),
        "loss": float(losses.mean()) if able else None,
        "saturated": None if margin is None else float(np.mean(np.abs(margin) > SATURATED)),
        "margin": None if margin is None else spread(margin),
    }


def values_at_start(
    objective: Objective, able: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Loss of each of the `usable` pairs, or of their lists, before the first update, and rewards (pairs, 2) in nats.

    The rewards are None for a method without.
    """
    losses: list[Tensor] = []
    rewards: dict[int, Tensor] = {}
    lists = lists_of(able) if objective.lists else [[number] for number in range(len(able))]
    for start in range(0, len(lists), PAIRS_AT_ONCE):
        some = lists[start : start + PAIRS_AT_ONCE]
        numbers = [number for one in some for number in one]
        chunk, rows = [able[number] for number in numbers], torch.arange(2 * len(numbers)).view(-1, 2)
        # Of each list the chosen row of its first pair, and the rejected rows of all.
        ends = list(itertools.accumulate(map(len, some)))
        parts = [rows[end - len(one) : end] for one, end in zip(some, ends, strict=True)]
        taken = pad_sequence([torch.cat([part[:1, 0], part[:, 1]]) for part in parts], True, NO_ROW)
        logps = at_reference(objective, chunk, reference, ends_step)
        output = objective(logps, taken, preferences(objective, [pair.preference_probability for pair in chunk]))
        losses.append(output.pair_losses.flatten())
        if (of_pairs := output.pair_rewards(rows)) is not None:
            rewards |= zip(numbers, of_pairs, strict=True)
    in_order = torch.stack([rewards[number] for number in range(len(able))]).numpy() if rewards else None
    return torch.cat([torch.zeros(0), *losses]).numpy(), in_order


def lists_of(pairs: Sequence[TokenizedPair]) -> list[list[int]]:
    """Indices of the pairs with one prompt and one chosen response: the lists that methods of `lists` train on."""
    lists: dict[Any, list[int]] = {}
    for number, pair in enumerate(pairs):
        lists.setdefault((pair.prompt_ids, pair.chosen), []).append(number)
    return list(lists.values())


def spread(values: Any) -> dict[str, float] | None:
    """Mean and quantiles of numbers; None if there are none."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return None
    names = ("min", "q05", "q25", "median", "q75", "q95", "max")
    quantiles = np.quantile(array, (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1))
    return {"mean": float(array.mean()), **dict(zip(names, map(float, quantiles), strict=True))}


def usable(objective: Objective, pairs: Sequence[TokenizedPair]) -> list[TokenizedPair]:
    """The pairs that have all per-token data that the objective needs, up to their cuts unless it looks behind them."""
    names = of_data(objective)
    pairs = [pair if objective.reads_units else pair.without_units() for pair in pairs]
    pairs = [pair.with_missing(objective.missing) for pair in pairs]
    pairs = [pair.with_future() if FUTURE in names else pair.without_future() for pair in pairs]
    return [pair for pair in pairs if all(name in side.values for side in pair.sides for name in names)]


def at_reference(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> Logps:
    """The objective's inputs for pairs when the policy equals the reference, float64.

    Rows 2i and 2i + 1 are the chosen and rejected response of pair i.
    """
    responses = [(pair.prompt_ids, side) for pair in pairs for side in pair.sides]
    policy = padded([torch.from_numpy(reference[prompt, side.ids].astype(np.float64)) for prompt, side in responses])
    inputs = {
        name: padded([torch.tensor(side.values[name], dtype=torch.float64) for _, side in responses])
        for name in of_data(objective)
    }
    if "steps" in objective.required:
        inputs["steps"] = step_numbers([(side.ids, side.steps, side.units) for _, side in responses], ends_step)
    if objective.reads_units:
        inputs |= unit_numbers([(side.own, side.units) for _, side in responses])
    return Logps(
        policy,
        mask=padded([torch.ones(len(side.own), dtype=torch.bool) for _, side in responses]),
        reference=policy,
        reference_kl=torch.zeros_like(policy),
        z_ref=0.0,
        **as_logps(inputs),
    )
