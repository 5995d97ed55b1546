"""The analyze stage's files besides the token rewards, made by its own functions from made-up log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from regretless.analysis.calibration import OBSERVED, calibration
from regretless.analysis.drift import point
from regretless.analysis.gradients import gradient_places
from regretless.analysis.lengths import response_lengths
from regretless.analysis.regret_calibration import MeasuredResponse, readings, regret_calibration
from regretless.analysis.score_distance import score_distances
from regretless.analysis.subset import SIDES, Sample, Scores
from regretless.core.files import write_json
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.objectives import build


def write_comparisons(run: Path, objectives: Sequence[str]) -> None:
    """Files of models with these names, and the responses of the run's evaluation."""
    numbers = np.random.default_rng(0)
    sample = Sample(
        [
            TokenizedPair(
                pair_id=str(n),
                prompt_ids=(n // 2,),
                chosen=TokenizedSide(tuple(range(5 + n)), {"behavior": (-0.5,) * (5 + n)}),
                rejected=TokenizedSide(tuple(range(9, 20 + n)), {"behavior": (-0.5,) * (11 + n)}),
                source=f"pairs:{n}",
                kind="original",
            )
            for n in range(6)
        ]
    )
    items = [item for side in SIDES for item in sample.items(side)]

    def scores() -> Scores:
        return {item: -numbers.random(len(item[1])).astype(np.float32) for item in items}

    models = {name: scores() for name in ("base", *objectives)}
    start = models["base"]
    points = {
        name: [point(sample, step, found, start) for step, found in ((0, start), (30, scores()), (60, models[name]))]
        for name in objectives
    }
    places = {name: gradient_places(build(name), sample.pairs, start, lambda _: False) for name in objectives}
    margins = {name: numbers.normal(0.8, 1, 50).tolist() for name in objectives}
    files = {label: run / "evaluate" / label / "arithmetic" / "responses.parquet" for label in models}
    measured = []
    for number, item in enumerate(items):
        ends = [(start, start + 2) for start in range(0, len(item[1]) - 1, 2)]
        units = [
            {"start": start, "end": end, "regret": numbers.random(), "future": numbers.random()} for start, end in ends
        ]
        writer = -numbers.random(len(item[1]))
        outcome = float(number < len(items) / 2)
        measured.append(MeasuredResponse(str(number), str(item[0]), item, writer, outcome, {1.0: units, 0.1: units}))
    contents = {
        "score_distance": {"models": score_distances(sample, models)},
        "drift": {"policies": {name: {"points": found, "logged": []} for name, found in points.items()}},
        "gradients": {"policies": places},
        "calibration": {
            "observed": OBSERVED,
            "policies": {name: calibration(found, range(50)) for name, found in margins.items()},
        },
        "regret_calibration": regret_calibration(readings(measured, models), seed=0),
        "lengths": {"benchmarks": {"arithmetic": response_lengths(files)}},
    }
    for name, content in contents.items():
        write_json(run / "analyze" / f"{name}.json", content)
