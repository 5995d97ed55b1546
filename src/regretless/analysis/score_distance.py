"""Difference between two models' scores of the same tokens: the paper's score distance."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from regretless.analysis.subset import Sample, Scores
from regretless.data.columns import SIDES
from regretless.modeling.layout import Item, own_ids


def score_distances(sample: Sample, scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """Score distance of every two models: the mean squared difference of token log-probabilities, nats squared.

    The mean is over all tokens of the chosen and rejected responses; a response in several pairs counts once (paper,
    table of the ablation, column MSE, there relative to RePO's model). Models are in the order of `scores`; each row
    has `first`, `second`, and the estimate with its standard error and interval, clustered by prompt.
    """
    rows = []
    for first, second in combinations(scores, 2):

        def squares(item: Item, first_scores: Scores = scores[first], second_scores: Scores = scores[second]) -> float:
            difference = first_scores[item].astype(np.float64) - second_scores[item].astype(np.float64)
            return float(np.square(difference).sum())

        estimate = sample.mean(squares, lambda item: len(own_ids(item[1])), *SIDES)
        rows.append({"first": first, "second": second, **estimate})
    return rows
