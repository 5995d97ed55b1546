"""Arena-Hard's win rate at equal style: if both answers had the same length and markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from sklearn.linear_model import LogisticRegression

from regretless.core.intervals import Array, Estimate, from_samples, resamples

CODE = re.compile(r"```([^`]*)```")
"""Counts as code: text between two fences, without a backtick inside."""
MARKS = (
    (r"^#{1,6}\s",),
    (r"^[^\S\n]*\d+\.\s", r"^[^\S\n]*[-*+]\s"),
    (r"\*\*[^*\n]+\*\*", r"__[^_\n]+__"),
)
"""Headings, list items, bold passages. The forms of each are counted separately: they may overlap."""
NAMES = ("length", "headings", "list_items", "bold")


def style(text: str) -> Array:
    """Characters, headings, list items and bold passages; markup inside code blocks does not count.

    Counts as the published tool does: the text between two fences is removed, the fences remain, and a block with a
    backtick inside is not a code block.
    """
    prose = text
    for block in CODE.findall(text):
        prose = prose.replace(block, "")
    counts = [sum(len(re.findall(form, prose, re.MULTILINE)) for form in forms) for forms in MARKS]
    return np.array([len(text), *counts], dtype=float)


def style_difference(answers: Sequence[str], references: Sequence[str]) -> Array:
    """How much more of each an answer has than its reference, (n, 4).

    It is (a − b) / (a + b + 1), divided by its standard deviation and not centered: zero means equal style.
    Leaderboards center over many models at once; for a single model, centering would remove the effect to control for.
    """
    first, second = (np.array([style(text) for text in texts]) for texts in (answers, references))
    relative = (first - second) / (first + second + 1)
    spread = relative.std(axis=0)
    return np.asarray(relative / np.where(spread > 0, spread, 1.0))


def style_controlled(wins: Array, weights: Array, differences: Array, *, rounds: int, seed: int) -> Estimate:
    """Bradley–Terry win rate in percent at equal style, a logistic regression on the style differences.

    wins, weights: (n,) per question: its weighted wins (ties count half) and the sum of the weights. scikit-learn's L2
    penalty (C = 1) applies to the style coefficients and not to the strength, as on the leaderboard.
    """

    def at_equal_style(resampled: Array) -> float:
        model = LogisticRegression(C=1.0, max_iter=1000)
        outcomes = np.r_[np.ones(len(wins)), np.zeros(len(wins))]
        model.fit(np.vstack([differences] * 2), outcomes, np.r_[resampled * wins, resampled * (weights - wins)])
        return float(100 / (1 + np.exp(-model.intercept_[0])))

    samples = np.array([at_equal_style(resampled) for resampled in resamples(len(wins), rounds, seed)])
    return from_samples(at_equal_style(np.ones(len(wins))), len(wins), samples)
