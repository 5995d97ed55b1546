"""Means over tokens, responses or pairs, with an interval that knows that what shares a prompt is not independent."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.95


def mean_by_prompt(
    totals: Sequence[float], counts: Sequence[float], prompts: Sequence[Hashable]
) -> dict[str, float | int | None]:
    """Σ totals / Σ counts, with its standard error and 95 % t-interval over prompts.

    totals, counts: of one response or pair each, such as the sum over its tokens and their number. The standard error
    is that of a ratio of sums over clusters, the prompts: √(G/(G−1) Σ_g (y_g − R x_g)²) / Σ_g x_g. None where one
    prompt, or none, gives nothing to tell it from. Raises ValueError for sequences of different lengths.
    """
    found: dict[Any, list[float]] = {}
    for total, count, prompt in zip(totals, counts, prompts, strict=True):
        sums = found.setdefault(prompt, [0.0, 0.0])
        sums[0] += float(total)
        sums[1] += float(count)
    groups = len(found)
    y, x = np.array(list(found.values()), dtype=np.float64).reshape(groups, 2).T
    weight = float(x.sum())
    if not weight:
        return {"value": None, "standard_error": None, "low": None, "high": None, "n": 0, "prompts": groups}
    value = float(y.sum()) / weight
    error = reach = None
    if groups > 1:
        error = math.sqrt(groups / (groups - 1) * float(np.square(y - value * x).sum())) / weight
        reach = float(stats.t.ppf((1 + LEVEL) / 2, groups - 1)) * error
    return {
        "value": value,
        "standard_error": error,
        "low": None if reach is None else value - reach,
        "high": None if reach is None else value + reach,
        "n": int(weight),
        "prompts": groups,
    }
