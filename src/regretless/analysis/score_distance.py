"""How far apart two models' scores of the same tokens are: the paper's score distance."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from regretless.analysis.subset import Sample, Scores
from regretless.data.records import SIDES
from regretless.modeling.layout import Item


def score_distances(sample: Sample, scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """Score distance of each two models: the mean squared difference of token log-probabilities, nats squared.

    The mean runs over all tokens of the chosen and rejected responses, a response in several pairs once (paper, table
    of the ablation, column MSE, there against RePO's model). Models in the order of `scores`; rows hold `first`,
    `second`, and the estimate with its standard error and interval over prompts.
    """
    found = []
    for first, second in combinations(scores, 2):

        def squares(item: Item, one: Scores = scores[first], other: Scores = scores[second]) -> float:
            difference = one[item].astype(np.float64) - other[item].astype(np.float64)
            return float(np.square(difference).sum())

        estimate = sample.mean(squares, lambda item: len(item[1]), *SIDES)
        found.append({"first": first, "second": second, **estimate})
    return found
