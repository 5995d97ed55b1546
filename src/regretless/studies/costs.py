"""What the models of a comparison took: tokens sampled and trained on, optimizer steps, and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from markupsafe import Markup

from regretless.studies.comparison import Comparison, TableRow
from regretless.studies.tables import MISSING, plain_html
from regretless.workflow.run_folder import BASE
from regretless.workflow.stage_folder import MANIFEST, read_mark

SAMPLING, TRAINING = ("sample", "rollout"), "train"
TOKENS = "tokens"
"""In the summaries of sampling and of training."""
COUNTED = ("prompts", *SAMPLING, "verify", "judge", "pair", "mask", "replay", TRAINING)
"""Folders of the stages that a trained model takes; what is only measured about it is not counted."""
CAPTION = (
    "What each model took from the prompts to its last step, all rounds together: tokens of sampled responses and "
    "continuations, tokens in the steps of training (prompts with each response), and seconds of the stages between. "
    "Means over the runs; what several methods share counts for each of them. Work that a run took from the store has "
    "the seconds that it once took."
)
HEADS = ("method", "tokens sampled", "tokens trained", "optimizer steps", "seconds")


@dataclass(frozen=True)
class Cost:
    """What one model took; None for what its run does not say."""

    tokens_sampled: float
    tokens_trained: float | None
    steps: float
    seconds: float


def cost_of(run: Path, method: str) -> Cost | None:
    """What the model of a method took in a run folder; None if it was not trained there."""
    place = run / "rounds" if (run / "rounds").is_dir() else run
    summaries: dict[str, list[Mapping[str, Any]]] = {name: [] for name in COUNTED}
    seconds = 0.0
    for file in sorted(place.rglob(MANIFEST)):
        # The number of a round, a method with a chain of its own, the stage, the method that is trained.
        parts = list(file.parent.relative_to(place).parts)
        if parts and parts[0].isdecimal():
            parts.pop(0)
        if len(parts) > 1 and parts[0] == method:
            parts.pop(0)
        is_counted = parts and parts[0] in COUNTED and (parts[0] != TRAINING or parts[1:] == [method])
        if is_counted and (mark := read_mark(file)) is not None:
            summaries[parts[0]].append(mark["summary"])
            seconds += mark["seconds"]
    if not (trained := summaries[TRAINING]):
        return None
    sampled = [summary.get(TOKENS, 0) for name in SAMPLING for summary in summaries[name]]
    known = all(TOKENS in summary for summary in trained)
    return Cost(
        sum(sampled),
        sum(summary[TOKENS] for summary in trained) if known else None,
        sum(summary.get("steps", 0) for summary in trained),
        seconds,
    )


def costs_of(comparison: Comparison) -> list[tuple[str, TableRow, Cost]]:
    """The mean cost of each row of the tables over its runs, with the model's name; without rows that say nothing."""
    costs: dict[tuple[str, TableRow], list[Cost]] = {}
    for run in comparison.runs:
        here = [one.method for one in comparison.observed.observations if one.run == run and one.method != BASE]
        for method in dict.fromkeys(here):
            if (cost := cost_of(run.path, method)) is not None:
                costs.setdefault((run.model or "", TableRow(method, run.variant or "")), []).append(cost)
    return [(model, row, _mean(of_runs)) for (model, row), of_runs in costs.items()]


def _mean(costs: Sequence[Cost]) -> Cost:
    values: dict[str, Any] = {}
    for name in asdict(costs[0]):
        of_name = [asdict(cost)[name] for cost in costs]
        values[name] = None if None in of_name else mean(of_name)
    return Cost(**values)


def cost_table(costs: Sequence[tuple[str, TableRow, Cost]]) -> Markup:
    """The costs as an HTML table."""
    rows = [
        (
            f"{model}: {row.label}" if model else row.label,
            [MISSING if value is None else f"{value:,.0f}" for value in asdict(cost).values()],
        )
        for model, row, cost in costs
    ]
    return plain_html(CAPTION, HEADS, rows)
