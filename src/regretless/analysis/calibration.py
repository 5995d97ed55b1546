"""Whether the preferences that a trained model implies come true as often as it says, on pairs held out of training."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import special

from regretless.core.estimates import mean_by_prompt, wilson

BINS = 10
OBSERVED = (
    "The predicted response of a pair is the one with the larger reward, the confidence σ(|margin|), the margin chosen "
    "minus rejected reward as training logs it; observed is whether the pair's chosen response is the predicted one"
)


def calibration(margins: Sequence[float], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Calibration of σ(margin) as the probability that the chosen response is preferred; margins in nats.

    `bins`: of confidence, [0.5, 1] in ten equal parts, the last closed: number of pairs, their mean confidence, the
    share predicted right with its 95 % Wilson interval. `ece`: the mean over pairs of the distance of the two in their
    bin. `brier`: mean of (1 − σ(margin))². Pairs with a margin of exactly zero predict nothing: they are counted in
    `ties`, and count in `brier` only. `accuracy` and `brier` carry a standard error over prompts; the intervals of
    bins take pairs as independent, and are too narrow where prompts have several.
    """
    margin = np.asarray(margins, dtype=np.float64)
    told = margin != 0
    confidence, right = special.expit(np.abs(margin[told])), margin[told] > 0
    # Confidence 1 belongs to the last bin.
    place = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = []
    distance = 0.0
    for number in range(BINS):
        inside = place == number
        count = int(inside.sum())
        if not count:
            continue
        hits = int(right[inside].sum())
        mean, share = float(confidence[inside].mean()), hits / count
        interval = wilson(hits, count)
        bins.append(
            {
                "from": round(0.5 + number / (2 * BINS), 10),
                "to": round(0.5 + (number + 1) / (2 * BINS), 10),
                "pairs": count,
                "confidence": mean,
                "accuracy": share,
                "low": interval.low,
                "high": interval.high,
            }
        )
        distance += count * abs(share - mean)
    ones = [1.0] * len(margin)
    decided = [prompt for prompt, is_told in zip(prompts, told, strict=True) if is_told]
    return {
        "pairs": len(margin),
        "ties": int((~told).sum()),
        "confidence": float(confidence.mean()) if len(confidence) else None,
        "accuracy": mean_by_prompt(right.astype(float).tolist(), [1.0] * len(right), decided),
        "ece": distance / len(confidence) if len(confidence) else None,
        "brier": mean_by_prompt(np.square(special.expit(-margin)).tolist(), ones, prompts),
        "bins": bins,
    }
