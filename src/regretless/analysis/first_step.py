"""What objectives compute at the first training step, where the policy still equals the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regretless.data.codec import Ids
from regretless.data.tokenization import TokenizedPair
from regretless.objectives import Logps, Objective

SATURATED = 10.0
"""Margin (nats) beyond which a log-sigmoid loss has practically no gradient left, or as good as all it can have."""
CHUNK = 128
Reference = Mapping[tuple[Ids, Ids], NDArray[np.float32]]
"""Log-probability (nats) of every response token by (prompt, response)."""


def at_start(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> dict[str, Any]:
    """Loss and reward margins (chosen minus rejected, nats) of pairs before the first update.

    Margins are those that training logs as `rewards/margins`; None for a method that has no rewards. Pairs without the
    behaviour log-probabilities that the objective needs are left out and counted.
    """
    able = usable(objective, pairs)
    losses: list[Tensor] = []
    margins: list[Tensor] = []
    for start in range(0, len(able), CHUNK):
        chunk = able[start : start + CHUNK]
        rows = torch.arange(2 * len(chunk)).view(-1, 2)
        output = objective(at_reference(objective, chunk, reference, ends_step), rows, z_ref=0.0)
        losses.append(output.pair_losses.flatten())
        if output.rewards is not None:
            chosen, rejected = output.rewards[rows].unbind(dim=1)
            margins.append(chosen - rejected)
    margin = torch.cat(margins).numpy() if margins else None
    return {
        "pairs": len(able),
        "without_behavior_logps": len(pairs) - len(able),
        "loss": float(torch.cat(losses).mean()) if losses else None,
        "saturated": None if margin is None else float(np.mean(np.abs(margin) > SATURATED)),
        "margin": None if margin is None else spread(margin),
    }


def spread(values: Any) -> dict[str, float] | None:
    """Mean and quantiles of numbers; None for none."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return None
    names = ("min", "q05", "q25", "median", "q75", "q95", "max")
    quantiles = np.quantile(array, (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1))
    return {"mean": float(array.mean()), **dict(zip(names, map(float, quantiles), strict=True))}


def usable(objective: Objective, pairs: Sequence[TokenizedPair]) -> list[TokenizedPair]:
    """The pairs that have the behaviour log-probabilities which the objective needs, if any."""
    return [
        pair
        for pair in pairs
        if "behavior" not in objective.needs or (pair.chosen_logps is not None and pair.rejected_logps is not None)
    ]


def at_reference(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> Logps:
    """What the objective reads of pairs while the policy equals the reference, float64.

    Rows 2i and 2i + 1 are the chosen and rejected response of pair i.
    """
    responses = [
        (pair.prompt_ids, ids, logps)
        for pair in pairs
        for ids, logps in ((pair.chosen_ids, pair.chosen_logps), (pair.rejected_ids or (), pair.rejected_logps))
    ]
    shape = len(responses), max(len(ids) for _, ids, _ in responses)
    policy, behavior = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    mask, steps = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    for row, (prompt, ids, logps) in enumerate(responses):
        mask[row, : len(ids)] = True
        policy[row, : len(ids)] = torch.from_numpy(reference[prompt, ids].astype(np.float64))
        if "behavior" in objective.needs:
            behavior[row, : len(ids)] = torch.tensor(logps, dtype=torch.float64)
        if "steps" in objective.needs:
            closed = torch.tensor([ends_step(token) for token in ids[:-1]], dtype=torch.long)
            steps[row, 1 : len(ids)] = closed.cumsum(0)
    return Logps(
        policy,
        mask=mask,
        reference=policy,
        behavior=behavior if "behavior" in objective.needs else None,
        reference_kl=torch.zeros(shape, dtype=torch.float64),
        steps=steps if "steps" in objective.needs else None,
    )
