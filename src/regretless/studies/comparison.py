"""The result of a comparison: tables of cells with their intervals and differences, and flat records of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from regretless.studies.compared_runs import Run
from regretless.studies.observations import Observed

DIGITS = 2
"""Decimals of shown values; values that are equal as shown share a rank."""


class Decoding(StrEnum):
    """How answers to the benchmarks were made."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


class Over(StrEnum):
    """What the numbers of a table are means over."""

    PROBLEMS = "problems"
    """Of one run."""
    TRAINING = "training seeds"
    DATA = "data seeds"
    WHOLE = "seeds of data and training"
    """Each run has another of both."""
    NESTED = "data seeds, of means over training seeds"
    DECODING = "decoding seeds"
    """Of one run."""


@dataclass(frozen=True)
class Column:
    """One metric of one benchmark."""

    benchmark: str
    metric: str
    unit: str
    judge: str = ""


@dataclass(frozen=True)
class TableRow:
    """A method of one variant."""

    method: str
    variant: str = ""

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.method} ({self.variant})" if self.variant else self.method


@dataclass(frozen=True)
class Difference:
    """A row's difference to the baseline's, `n` paired problems, questions or seeds; None for what is not known."""

    baseline: TableRow
    value: float
    low: float | None
    high: float | None
    n: int
    over: str
    """What is paired: problems, questions, or a kind of seed."""
    test: str
    """The test behind `p`; empty if there is none."""
    p: float | None
    p_holm: float | None = None
    """`p` after Holm's correction over all comparisons."""


@dataclass(frozen=True)
class TableCell:
    """A row's result in one column, on the metric's scale; None for what is not known."""

    value: float | None
    sd: float | None
    low: float | None
    high: float | None
    n: int
    """Seeds that `value` is the mean over, or problems if it is one run's."""
    over: str
    rank: int | None
    """1 for the best of the column and model, 2 for the second; ties share a rank."""
    parts: tuple[tuple[str, float, Run], ...]
    """What `value` is the mean of: seed (empty for one run), value and run."""
    difference: Difference | None = None


@dataclass(frozen=True)
class Table:
    """Methods × benchmarks of one model."""

    model: str
    decoding: Decoding
    over: Over
    n: int
    """Most seeds that a cell is a mean over; 1 for one run."""
    fixed: str
    """The seeds that are the same in all runs of the table."""
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    cells: Mapping[tuple[TableRow, Column], TableCell]

    @property
    def caption(self) -> str:
        """What the numbers are, in a sentence or two."""
        has_chat = any(column.judge for column in self.columns)
        if self.decoding is Decoding.SAMPLED:
            how = "Sampled answers"
        else:
            how = "Greedy answers" + (" (chat benchmarks: as each of them prescribes)" if has_chat else "")
        if self.over is Over.PROBLEMS:
            text = f"{how} of one run a row, with its 95 % interval over problems{self.fixed}."
        elif self.over is Over.DECODING:
            text = (
                f"{how} of one run a row: mean ± standard deviation over {self.n} decoding seeds, with the 95 % "
                f"t-interval of the mean. It says nothing about other trainings{self.fixed}."
            )
        else:
            inner = ", each the mean over its decoding seeds" if self.decoding is Decoding.SAMPLED else ""
            over = self.over.replace("seeds", "seed", 1) if self.n == 1 else self.over
            text = (
                f"{how}: mean ± standard deviation over {self.n} {over}{inner}, with the 95 % t-interval of the "
                f"mean{self.fixed}."
            )
        return f"{text} Best in bold, second underlined."


@dataclass(frozen=True)
class Comparison:
    """The results of runs, compared."""

    observed: Observed
    tables: tuple[Table, ...]
    baseline: str | None
    """Method that others are compared with, or variant whose methods those of other variants are compared with."""
    comparisons: int
    """Number of p-values, all of which Holm's correction counts."""
    notes: tuple[str, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, with all labels set."""
        return self.observed.runs

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "baseline": self.baseline,
            "comparisons": self.comparisons,
            "correction": "Holm",
            "notes": list(self.notes),
            "runs": [
                {
                    "path": str(run.path),
                    "model": run.model,
                    "variant": run.variant,
                    "data_seed": run.data_seed,
                    "train_seed": run.train_seed,
                }
                for run in self.runs
            ],
            "differing_settings": {key: dict(values) for key, values in self.observed.differing.items()},
            "cells": [record | {"runs": record["runs"].split(";")} for record in records(self)],
        }


def records(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """One flat record for each cell, with full precision; None for what is not known."""
    for table in comparison.tables:
        for row in table.rows:
            for column in table.columns:
                cell = table.cells.get((row, column))
                if cell is None:
                    continue
                versus = cell.difference
                yield {
                    "model": table.model,
                    "variant": row.variant,
                    "method": row.method,
                    "benchmark": column.benchmark,
                    "metric": column.metric,
                    "unit": column.unit,
                    "judge": column.judge,
                    "decoding": table.decoding.value,
                    "over": cell.over,
                    "n": cell.n,
                    "value": cell.value,
                    "sd": cell.sd,
                    "low": cell.low,
                    "high": cell.high,
                    "rank": cell.rank,
                    "baseline": versus and versus.baseline.label,
                    "difference": versus and versus.value,
                    "difference_low": versus and versus.low,
                    "difference_high": versus and versus.high,
                    "paired": versus and versus.n,
                    "paired_over": versus and versus.over,
                    "test": versus and versus.test,
                    "p": versus and versus.p,
                    "p_holm": versus and versus.p_holm,
                    "runs": ";".join(dict.fromkeys(str(run.path) for _, _, run in cell.parts)),
                }
