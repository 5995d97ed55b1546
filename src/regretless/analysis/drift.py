"""Log-probabilities of chosen and rejected responses over the checkpoints of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regretless.analysis.subset import Sample, Scores
from regretless.data.columns import SIDES
from regretless.modeling.layout import Item, own_ids

LOGGED = tuple(f"{name}/{side}" for name in ("logps", "logratios") for side in SIDES)


def point(sample: Sample, step: int | None, scores: Scores, start: Scores) -> dict[str, Any]:
    """Log-probability of the sample's responses after `step` optimizer steps (None if unknown), by side.

    `per_response` and `per_token`: means in nats; `change`: the mean over responses of the difference to the start, for
    the same response under both models, in nats. Each has its standard error and 95 % interval, clustered by prompt.
    """

    def total(item: Item) -> float:
        return float(scores[item].astype(np.float64).sum())

    def change(item: Item) -> float:
        return float((scores[item].astype(np.float64) - start[item].astype(np.float64)).sum())

    entry: dict[str, Any] = {"step": step}
    for side in SIDES:
        entry[side] = {
            "per_response": sample.mean(total, lambda _: 1, side),
            "per_token": sample.mean(total, lambda item: len(own_ids(item[1])), side),
            "change": sample.mean(change, lambda _: 1, side),
        }
    return entry


def logged(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The same quantities as training logged them: means over the pairs of the steps since the previous line (nats).

    Each line covers other pairs, so the lines match the scored points only roughly; they also exist where checkpoints
    do not.
    """
    lines = [{name: line[name] for name in ("step", *LOGGED) if name in line} for line in history if "loss" in line]
    return [line for line in lines if len(line) > 1]


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spaced between the start and the end of training."""
    if count >= len(steps):
        return list(steps)
    return [steps[round(index)] for index in np.linspace(-1, len(steps), count + 2)[1:-1].tolist()]
