"""Distribution of an objective's gradient along a response, by automatic differentiation of the objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regretless.analysis.first_step import PAIRS_AT_ONCE, Reference, at_reference, usable
from regretless.core.intervals import mean_by_prompt
from regretless.data.columns import SIDES
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.layout import Ids
from regretless.objectives import Objective
from regretless.objectives.inputs import preferences

BINS, NEAR_END = 10, 10
Vector = NDArray[np.float64]


def gradient_places(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> dict[str, Any]:
    """Shares of |∂loss/∂log π(o_t)| along the response, at the first step of training (policy = reference), by side.

    A response that is in several pairs counts once, with the sum of |∂loss/∂log π(o_t)| over them.

    `shares`: part of a response's sum over tokens in each tenth of the response, mean over responses; a token that
    crosses the border of two tenths counts in both by its overlap, so that an even distribution has 0.1 in every tenth.
    `near_end`: for the last token, the one before it and so on, the ratio of its size to the size in an even
    distribution; over the responses that are long enough. Both have standard errors clustered by prompt.

    A side is None if the method's gradient is zero for all its responses; `without_gradient` counts single ones, which
    are left out, and `without_behavior_logps` counts the pairs that the objective cannot use.
    """
    able = usable(objective, pairs)
    by_side: dict[str, dict[tuple[Ids, Ids], Vector]] = {side: {} for side in SIDES}
    for start in range(0, len(able), PAIRS_AT_ONCE):
        chunk = able[start : start + PAIRS_AT_ONCE]
        for row, weights in enumerate(_sizes(objective, chunk, reference, ends_step)):
            pair, sums = chunk[row // 2], by_side[SIDES[row % 2]]
            item = pair.prompt_ids, pair.sides[row % 2].ids
            sums[item] = sums[item] + weights if item in sums else weights
    return {
        "without_behavior_logps": len(pairs) - len(able),
        **{side: _summary([(prompt, sizes) for (prompt, _), sizes in sums.items()]) for side, sums in by_side.items()},
    }


def _sizes(
    objective: Objective, pairs: Sequence[TokenizedPair], reference: Reference, ends_step: Callable[[int], bool]
) -> list[Vector]:
    """|∂loss/∂log π| of each token, for the chosen and the rejected response of each pair, alternating."""
    logps = at_reference(objective, pairs, reference, ends_step)
    policy = logps.policy.clone().requires_grad_()
    logps = dataclasses.replace(logps, policy=policy)
    rows = torch.arange(2 * len(pairs)).view(-1, 2)
    output = objective(logps, rows, preferences(objective, [pair.preference_probability for pair in pairs]))
    (gradient,) = torch.autograd.grad(output.pair_losses.sum(), policy)
    sizes, lengths = gradient.abs().numpy(), logps.lengths.tolist()
    return [sizes[row, :length] for row, length in enumerate(lengths)]


def tenths(sizes: Vector) -> Vector:
    """Share of the sum of sizes (T,) in each of `BINS` parts of equal length."""
    length = len(sizes)
    until = np.concatenate([[0.0], np.cumsum(sizes)]) / sizes.sum()
    return np.diff(np.interp(np.linspace(0, length, BINS + 1), np.arange(length + 1), until))


def _summary(responses: Sequence[tuple[Ids, Vector]]) -> dict[str, Any] | None:
    reached = [(prompt, sizes) for prompt, sizes in responses if sizes.sum() > 0]
    if not reached:
        return None
    prompts = [prompt for prompt, _ in reached]
    shares = np.stack([tenths(sizes) for _, sizes in reached])
    ones = np.ones(len(reached))
    near_end = []
    for from_end in range(1, NEAR_END + 1):
        long = [(prompt, sizes) for prompt, sizes in reached if len(sizes) >= from_end]
        strengths = [float(sizes[-from_end] * len(sizes) / sizes.sum()) for _, sizes in long]
        near_end.append(mean_by_prompt(strengths, [1] * len(long), [prompt for prompt, _ in long]))
    return {
        "responses": len(reached),
        "without_gradient": len(responses) - len(reached),
        "shares": [mean_by_prompt(shares[:, tenth].tolist(), ones.tolist(), prompts) for tenth in range(BINS)],
        "near_end": near_end,
    }
