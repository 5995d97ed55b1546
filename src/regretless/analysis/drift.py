"""Where training takes the log-probabilities of chosen and rejected responses, from checkpoint to checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regretless.analysis.subset import Sample, Scores
from regretless.data.records import SIDES
from regretless.modeling.layout import Item

LOGGED = tuple(f"{name}/{side}" for name in ("logps", "logratios") for side in SIDES)


def point(sample: Sample, step: int | None, scores: Scores, start: Scores) -> dict[str, Any]:
    """Log-probability of the sample's responses after `step` optimizer steps (None where it is unknown), by side.

    `per_response` and `per_token`: means in nats; `change`: the mean over responses of the difference to the start, the
    same response under both models, in nats. Each with its standard error and 95 % interval over prompts.
    """

    def total(item: Item) -> float:
        return float(scores[item].astype(np.float64).sum())

    def change(item: Item) -> float:
        return float((scores[item].astype(np.float64) - start[item].astype(np.float64)).sum())

    found: dict[str, Any] = {"step": step}
    for side in SIDES:
        found[side] = {
            "per_response": sample.mean(total, lambda _: 1, side),
            "per_token": sample.mean(total, lambda item: len(item[1]), side),
            "change": sample.mean(change, lambda _: 1, side),
        }
    return found


def logged(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """What training itself logged of the same: means over the pairs of the steps since the line before (nats).

    Each line is about other pairs, so these lie between the scored points only roughly; they are there where
    checkpoints are not.
    """
    lines = [{name: line[name] for name in ("step", *LOGGED) if name in line} for line in history if "loss" in line]
    return [line for line in lines if len(line) > 1]


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread between the start and the end of training."""
    if count >= len(steps):
        return list(steps)
    return [steps[round(place)] for place in np.linspace(-1, len(steps), count + 2)[1:-1].tolist()]
