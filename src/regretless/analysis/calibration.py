"""Calibration of the preferences that a trained model implies, on pairs held out of training."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import special

from regretless.core.intervals import mean_by_prompt, share_by_prompt, wilson

BINS = 10
OBSERVED = (
    "The predicted response of a pair is the one with the larger reward, the confidence σ(|margin|), the margin chosen "
    "minus rejected reward as training logs it; observed is whether the pair's chosen response is the predicted one"
)


def calibration(margins: Sequence[float], prompts: Sequence[Hashable]) -> dict[str, Any]:
    """Calibration of σ(margin) as the probability that the chosen response is preferred; margins in nats.

    `bins`: ten equal intervals of confidence in [0.5, 1], the last one closed: number of pairs, their mean confidence,
    the share of correct predictions with its 95 % Wilson interval. `ece`: the mean over pairs of the difference between
    these two in their bin. `brier`: mean of (1 − σ(margin))². Pairs with a margin of exactly zero predict nothing: they
    are counted in `ties`, and contribute only to `brier`. `accuracy` and `brier` have a standard error clustered by
    prompt, and intervals within 0 and 1; the intervals of bins treat pairs as independent, and are too narrow if
    prompts have several pairs.
    """
    # The confidence of each prediction, and whether it is right.
    margin = np.asarray(margins, dtype=np.float64)
    decided = margin != 0
    confidence, right = special.expit(np.abs(margin[decided])), margin[decided] > 0

    # The bins. Confidence 1 is in the last.
    bin_index = np.minimum(((confidence - 0.5) * 2 * BINS).astype(int), BINS - 1)
    bins = []
    distance = 0.0
    for number in range(BINS):
        inside = bin_index == number
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

    # The estimates over all pairs.
    brier = mean_by_prompt(np.square(special.expit(-margin)).tolist(), [1.0] * len(margin), prompts)
    if brier["low"] is not None and brier["high"] is not None:
        brier |= {"low": max(0.0, brier["low"]), "high": min(1.0, brier["high"])}
    decided_prompts = [prompt for prompt, is_decided in zip(prompts, decided, strict=True) if is_decided]
    return {
        "pairs": len(margin),
        "ties": int((~decided).sum()),
        "confidence": float(confidence.mean()) if len(confidence) else None,
        "accuracy": share_by_prompt(right.tolist(), decided_prompts),
        "ece": distance / len(confidence) if len(confidence) else None,
        "brier": brier,
        "bins": bins,
    }
