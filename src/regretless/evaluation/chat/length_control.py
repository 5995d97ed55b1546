"""The length-controlled win rate of AlpacaEval 2: the judge's preference if both answers were equally long.

Dubois et al., Length-Controlled AlpacaEval (arXiv:2404.04475): a logistic regression of the judge's preference on the
difference in length, the difficulty of the instruction and a constant; the win rate is its mean prediction where the
difference is zero.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

from regretless.core.errors import DataError
from regretless.core.files import fingerprint
from regretless.core.intervals import Array, Estimate, from_samples, none_if_nan, resamples
from regretless.evaluation.chat.files import read_table

GAMED_WEIGHT = 0.1
"""Weight of a row of the gamed baselines: lambda = 0.2, shared by both."""
PENALTIES = np.logspace(-4, 4, 10)
"""Inverse strengths of the L1 penalty that cross-validation chooses from."""
FOLDS = 5
SOLVER_SEED = 123
PREFERENCE_COLUMNS = ("preference", "preference_fitted")
PUBLISHED_REFERENCE = "ee8ec23ebae0f0daacc4f7efe1de20f0"
"""Fingerprint of AlpacaEval's alpaca_eval_gpt4_baseline.json, to which its df_gamed.csv belongs: each instruction, and
the characters of its answer, in order."""


@dataclass(frozen=True)
class GamedBaselines:
    """Answers of the reference model prompted to be long or short, and data about the instructions.

    In the fit, they prevent length from acting as a proxy for quality.
    """

    features: Array
    """(N, 3): see `features`; the constant is 0, since they are the reference's own answers."""
    preferences: Array
    """(N,) probabilities."""
    difficulty: Mapping[int, float]
    """Difficulty of an instruction, by its index in the reference file."""
    reference_lengths: Mapping[int, int]
    """Characters of the reference's answer, by the same index."""

    def check_belong(self, lengths: Mapping[int, int]) -> None:
        """Check that these rows belong to some instructions and their reference.

        lengths: characters of the reference's answer, by index. Raises DataError, because difficulties of other
        instructions would shift the result unnoticed.
        """
        strange = [index for index in lengths if index not in self.difficulty]
        moved = [
            index for index in lengths.keys() & self.difficulty if self.reference_lengths.get(index) != lengths[index]
        ]
        if strange or moved:
            raise DataError(
                f"gamed_baselines: {len(strange)} instruction(s) without a difficulty, {len(moved)} with a reference "
                "of another length; expected the file that belongs to these instructions and this reference, in its "
                "order"
            )


@dataclass(frozen=True)
class Coefficients:
    """A fitted or published regression."""

    length: float
    difficulty: float
    constant: float


@dataclass(frozen=True)
class LengthControlled:
    """The win rate in percent, and the regression behind it."""

    estimate: Estimate
    """Its error and interval come from resampled instructions, with the regression refitted to each resample."""
    prediction_error: float
    """Standard error as leaderboards report it: of the mean prediction, as if predictions were measurements."""
    coefficients: Coefficients
    penalty: float
    """Inverse strength of the L1 penalty, chosen by cross-validation."""

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return self.estimate.shown(
            prediction_standard_error=none_if_nan(self.prediction_error),
            coefficients=vars(self.coefficients),
            penalty=self.penalty,
        )


def read_gamed_baselines(path: Path, questions: str | None = None) -> GamedBaselines:
    """Rows of the gamed baselines from a CSV file with `index`, `std_delta_len`, `instruction_difficulty`,
    `preference` (or `preference_fitted`) between 0 and 1, and `len_1`, the characters of the reference's answer.

    questions: the reference's file. If it is AlpacaEval's own, the lengths are known, so that `len_1` may be missing as
    in AlpacaEval's df_gamed.csv. Raises DataError if a column is missing or a value is not a number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.DictReader(handle))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    present = set(rows[0]) if rows else set()
    preference = next((name for name in PREFERENCE_COLUMNS if name in present), PREFERENCE_COLUMNS[0])
    needed = ("index", "std_delta_len", "instruction_difficulty", preference)
    missing = [name for name in needed if name not in present]
    if missing:
        raise DataError(
            f"{path}: missing column(s) {', '.join(missing)}; found {', '.join(sorted(present)) or 'no rows'}"
        )
    try:
        index, delta, difficulty, preferences = (np.array([float(row[name]) for row in rows]) for name in needed)
        lengths = {int(row["index"]): int(row["len_1"]) for row in rows} if "len_1" in present else {}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: expected numbers: {error}") from error
    if not (np.isfinite([delta, difficulty, preferences]).all() and ((preferences >= 0) & (preferences <= 1)).all()):
        raise DataError(f"{path}: expected finite numbers, and preferences from 0 to 1")
    rows_features = features(delta, difficulty, constant=0.0)
    by_index = {int(key): float(value) for key, value in zip(index, difficulty, strict=True)}
    return GamedBaselines(
        rows_features, preferences, by_index, lengths or _published_lengths(path, questions, by_index)
    )


def _published_lengths(path: Path, questions: str | None, indices: Collection[int]) -> dict[int, int]:
    """Characters of the published reference's answers by index, for a file without them.

    Raises DataError if the questions are not the published ones, or the file is not one of all of them.
    """
    rows = [] if questions is None else read_table(questions, ["instruction"])
    lengths = [len(str(row.get("output"))) for row in rows]
    identity = fingerprint([[row["instruction"], length] for row, length in zip(rows, lengths, strict=True)])
    if identity != PUBLISHED_REFERENCE or set(indices) != set(range(len(rows))):
        raise DataError(
            f"{path}: no column len_1 (characters of the reference's answer), so nothing shows that its rows belong to "
            f"the instructions of {questions or 'this evaluation'}, in this order; add the column, or use AlpacaEval's "
            "own two files unchanged: alpaca_eval_gpt4_baseline.json as `questions`, df_gamed.csv here"
        )
    return dict(enumerate(lengths))


def features(std_delta: Array, difficulty: Array, constant: float = 1.0) -> Array:
    """Columns of the regression, (N, 3): tanh of the standardized difference in length, difficulty, constant."""
    return np.column_stack([np.tanh(std_delta), difficulty, np.full(len(difficulty), constant)])


def standardized(lengths_1: Array, lengths_2: Array) -> Array | None:
    """Differences in length, reference minus model, over their sample standard deviation; None if all differences are
    equal."""
    delta = lengths_1 - lengths_2
    spread = float(np.std(delta, ddof=1)) if len(delta) > 1 else 0.0
    return delta / spread if spread > 0 else None


def predict(coefficients: Coefficients, difficulty: Array) -> Array:
    """Preference for the model if both answers were equally long, in percent, for each instruction."""
    logits = coefficients.difficulty * difficulty + coefficients.constant
    return np.asarray(100 / (1 + np.exp(-logits)))


def length_controlled(
    preferences: Array, std_delta: Array, difficulty: Array, gamed: GamedBaselines, *, rounds: int, seed: int
) -> LengthControlled:
    """Fit the regression to the judged instructions of one model and average its prediction at equal length.

    preferences: (n,) from 0 to 1, 1 is the model's. std_delta: from `standardized`. All three are aligned by row: a
    misaligned difficulty shifts the result by more than a point unnoticed.
    """
    rows, n = features(std_delta, difficulty), len(preferences)
    design, labels = np.vstack([gamed.features, rows]), np.r_[gamed.preferences, preferences]
    regularizing = np.full(len(gamed.preferences), GAMED_WEIGHT)
    penalty = _choose_penalty(design, labels, np.r_[regularizing, np.ones(n)])

    def fitted(weights: Array) -> Coefficients:
        return _coefficients(_fit(design, labels, np.r_[regularizing, weights], penalty))

    coefficients = fitted(np.ones(n))
    predicted = predict(coefficients, difficulty)
    samples = [
        float(np.average(predict(fitted(resampled), difficulty), weights=resampled))
        for resampled in resamples(n, rounds, seed)
    ]
    estimate = from_samples(float(predicted.mean()), n, np.array(samples))
    error = float(np.std(predicted, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return LengthControlled(estimate, error, coefficients, penalty)


def _fit(design: Array, labels: Array, weights: Array, penalty: float) -> LogisticRegression:
    """Logistic regression to labels from 0 to 1: each row counts as a win and as a loss, weighted by its label."""
    model = LogisticRegression(C=penalty, l1_ratio=1, solver="liblinear", fit_intercept=False, random_state=SOLVER_SEED)
    outcomes = np.r_[np.ones(len(labels)), np.zeros(len(labels))]
    return model.fit(np.vstack([design, design]), outcomes, np.r_[weights * labels, weights * (1 - labels)])


def _coefficients(model: LogisticRegression) -> Coefficients:
    return Coefficients(*map(float, model.coef_[0]))


def _choose_penalty(design: Array, labels: Array, weights: Array) -> float:
    """The penalty with the smallest loss in five-fold cross-validation."""
    folds = list(GroupKFold(FOLDS).split(design, groups=np.arange(len(labels))))

    def loss(penalty: float) -> float:
        losses = []
        for train, test in folds:
            share = _fit(design[train], labels[train], weights[train], penalty).predict_proba(design[test])[:, 1]
            share = np.clip(share, 1e-15, 1 - 1e-15)
            nats = labels[test] * np.log(share) + (1 - labels[test]) * np.log(1 - share)
            losses.append(-float(np.mean(weights[test] * nats)))
        return float(np.mean(losses))

    return float(min(PENALTIES, key=loss))
