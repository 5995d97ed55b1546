"""Methods side by side on benchmarks: means over seeds, ranks, and paired differences with Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import mean
from typing import Any, TypeVar

import numpy as np

from regretless.core.errors import ConfigError
from regretless.core.intervals import (
    PERCENT,
    UNKNOWN,
    PairedDifference,
    difference,
    difference_over_seeds,
    holm,
    none_if_nan,
    over_seeds,
    paired_difference,
    within,
)
from regretless.evaluation.chat.chat_results import ENDS
from regretless.studies.compared_runs import SEPARATOR, Run
from regretless.studies.comparison import (
    DIGITS,
    Column,
    Comparison,
    Decoding,
    Difference,
    Over,
    Table,
    TableCell,
    TableRow,
)
from regretless.studies.evaluations import Observation
from regretless.studies.observations import COMPARE, Observed, observe
from regretless.workflow.run_folder import BASE

T = TypeVar("T")


def compare(runs: Sequence[Run], baseline: str | None = None) -> Comparison:
    """Compare the results of run folders.

    baseline: a method, which all methods of the same model and variant are compared with; or a variant, or one of its
    settings (`mask=none` of `mask=none, train.beta=0.1`), whose methods are compared with the same ones of variants
    that differ in it alone. By default `base`, if it was evaluated.
    Raises ConfigError for runs that cannot be compared (`observe`) and an unknown baseline.
    """
    observed = observe(runs)
    methods = dict.fromkeys(observation.method for observation in observed.observations)
    variants = dict.fromkeys(run.variant for run in observed.runs if run.variant)
    settings = dict.fromkeys(text for variant in variants for text in variant.split(SEPARATOR))
    if baseline is None:
        baseline = BASE if BASE in methods and len(methods) > 1 else None
    elif baseline not in {*methods, *variants, *settings}:
        names = "; ".join(dict.fromkeys([*methods, *variants, *settings]))
        raise ConfigError(f"{COMPARE}: --baseline {baseline}: expected one of {names}")
    groups = [
        _Group(observed, model, decoding, baseline)
        for model in dict.fromkeys(run.model or "" for run in observed.runs)
        for decoding in Decoding
    ]
    tables = _corrected([group.table() for group in groups if group.observations])
    tested = [
        cell
        for table in tables
        for cell in table.cells.values()
        if cell.difference and cell.difference.p_holm is not None
    ]
    notes = [*observed.notes, *(note for group in groups for note in group.notes())]
    return Comparison(observed, tuple(tables), baseline, len(tested), tuple(dict.fromkeys(notes)))


def _corrected(tables: Sequence[Table]) -> list[Table]:
    """The tables with Holm's correction over all of their p-values."""
    tested = [
        (number, key, cell.difference)
        for number, table in enumerate(tables)
        for key, cell in table.cells.items()
        if cell.difference is not None and cell.difference.p is not None
    ]
    adjusted = holm([versus.p for _, _, versus in tested if versus.p is not None])
    cells = [dict(table.cells) for table in tables]
    for (number, key, versus), p_holm in zip(tested, adjusted, strict=True):
        cells[number][key] = replace(cells[number][key], difference=replace(versus, p_holm=p_holm))
    return [replace(table, cells=corrected) for table, corrected in zip(tables, cells, strict=True)]


RunSeeds = tuple[int, int | None]
"""Data seed, and training seed (None for the base model)."""


class _Group:
    """The observations of one model, decoded in one way."""

    def __init__(self, observed: Observed, model: str, decoding: Decoding, baseline: str | None) -> None:
        self.model, self.decoding, self.baseline = model, decoding, baseline
        self.observations = [
            observation
            for observation in observed.observations
            if observation.run.model == model and (decoding is Decoding.GREEDY or observation.sampled)
        ]
        # Only these settings can change the base model: otherwise it is the same in all variants.
        self.base_varies = any(key.partition(".")[0] in ("model", "pretrain", "world") for key in observed.differing)
        rows = dict.fromkeys(map(self._row, self.observations))
        # By variant, and each with the base model first; otherwise in the order of the runs and their recipes.
        order = list(dict.fromkeys(row.variant for row in rows))
        self.rows = sorted(rows, key=lambda row: (order.index(row.variant), row.method != BASE))
        self.columns = list(dict.fromkeys(map(_column, self.observations)))
        self.by_cell: dict[tuple[TableRow, Column], dict[RunSeeds, list[Observation]]] = {}
        for observation in self.observations:
            seeds = (observation.run.data_seed or 0, observation.train_seed)
            self.by_cell.setdefault((self._row(observation), _column(observation)), {}).setdefault(seeds, []).append(
                observation
            )

    def _row(self, observation: Observation) -> TableRow:
        is_common = observation.method == BASE and not self.base_varies
        return TableRow(observation.method, "" if is_common else observation.run.variant or "")

    @cached_property
    def seeds(self) -> list[RunSeeds]:
        """Seeds of the trainings, and of the base model where nothing was trained."""
        seeds_of_runs = {seeds for by_seeds in self.by_cell.values() for seeds in by_seeds}
        trained = {data for data, training in seeds_of_runs if training is not None}
        return sorted(
            ((data, training) for data, training in seeds_of_runs if training is not None or data not in trained),
            key=lambda seeds: (seeds[0], seeds[1] or 0),
        )

    @cached_property
    def over(self) -> Over:
        if len(self.seeds) == 1:
            return Over.PROBLEMS if self.decoding is Decoding.GREEDY else Over.DECODING
        data, training = ({seeds[part] for seeds in self.seeds} for part in (0, 1))
        training.discard(None)
        if len(data) == 1:
            return Over.TRAINING
        if len(self.seeds) > len(data):
            return Over.NESTED
        return Over.DATA if len(training) < 2 else Over.WHOLE

    def _unit(self, seeds: RunSeeds) -> int | None:
        """The seed that a value belongs to: values of one unit are averaged first."""
        return seeds[1] if self.over is Over.TRAINING else seeds[0]

    @cached_property
    def units(self) -> list[int | None]:
        return list(dict.fromkeys(self._unit(seeds) for seeds in self.seeds))

    def _fixed(self) -> str:
        data, training = self.seeds[0]
        if self.over is Over.TRAINING:
            return f"; data seed {data} in all"
        if self.over is Over.DATA and training is not None:
            return f"; training seed {training} in all"
        return ""

    def table(self) -> Table:
        cells = {(row, column): self._cell(row, column) for row, column in self.by_cell}
        for column in self.columns:
            ranks = _ranks({row: cells[row, column].value for row in self.rows if (row, column) in cells})
            for row, rank in ranks.items():
                cells[row, column] = replace(cells[row, column], rank=rank)
        return Table(
            model=self.model,
            decoding=self.decoding,
            over=self.over,
            n=1 if self.over is Over.PROBLEMS else max(cell.n for cell in cells.values()),
            fixed=self._fixed(),
            rows=tuple(self.rows),
            columns=tuple(self.columns),
            cells=cells,
        )

    # --- values ---

    def _value(self, observation: Observation) -> float | None:
        return observation.value if self.decoding is Decoding.GREEDY else mean(observation.sampled.values())

    def _values(self, row: TableRow, column: Column) -> dict[RunSeeds, float]:
        """Value for each pair of seeds; of one model that was evaluated in several runs, the mean."""
        means = {}
        for seeds, observations in self.by_cell.get((row, column), {}).items():
            values = [value for observation in observations if (value := self._value(observation)) is not None]
            if values:
                means[seeds] = mean(values)
        return means

    def _parts(self, row: TableRow, column: Column) -> list[tuple[str, float, Run]]:
        """Each value with its seed's name and its run."""
        by_seeds = self.by_cell[row, column]
        if self.over is Over.DECODING:
            return [
                (str(seed), value, observation.run)
                for observations in by_seeds.values()
                for observation in observations
                for seed, value in observation.sampled.items()
            ]
        return [
            (self._seed_name(seeds), value, observation.run)
            for seeds, observations in by_seeds.items()
            for observation in observations
            if (value := self._value(observation)) is not None
        ]

    def _passes(self, row: TableRow, column: Column) -> dict[str, float]:
        """Value of each decoding seed; of one model that was evaluated in several runs, the mean."""
        passes: dict[str, list[float]] = {}
        for seed, value, _ in self._parts(row, column):
            passes.setdefault(seed, []).append(value)
        return {seed: mean(values) for seed, values in passes.items()}

    def _seed_name(self, seeds: RunSeeds) -> str:
        if self.over is Over.PROBLEMS:
            return ""
        data, training = seeds
        if self.over is Over.NESTED and training is not None:
            return f"{data}/{training}"
        if self.over is Over.WHOLE:
            return str(data) if training in (None, data) else f"{data}/{training}"
        return str(self._unit(seeds)) if self._unit(seeds) is not None else ""

    def _cell(self, row: TableRow, column: Column) -> TableCell:
        parts = tuple(self._parts(row, column))
        versus = self._difference(row, column)
        if self.over is Over.PROBLEMS:
            (same,) = self.by_cell[row, column].values()
            is_one = len({observation.value for observation in same}) == 1
            low, high = map(none_if_nan, same[0].interval if is_one else UNKNOWN)
            value = same[0].value if is_one else mean(value for _, value, _ in parts)
            return TableCell(value, None, low, high, same[0].n, self.over, None, parts, versus)
        if self.over is Over.DECODING:
            values = list(self._passes(row, column).values())
        else:
            values = [mean(group) for group in _grouped(self._values(row, column), self._unit).values()]
        if not values:
            return TableCell(None, None, None, None, 0, self.over, None, parts, versus)
        spread = over_seeds(values)
        low, high = map(none_if_nan, within(spread.interval, values, *ENDS[column.unit]))
        return TableCell(spread.mean, none_if_nan(spread.sd), low, high, spread.n, self.over, None, parts, versus)

    # --- differences ---

    def _baseline_of(self, row: TableRow) -> TableRow | None:
        """The row that a row is compared with."""
        if self.baseline is None:
            return None
        if not any(other.method == self.baseline for other in self.rows):
            is_variant = any(each.variant == self.baseline for each in self.rows)
            other = replace(row, variant=self.baseline if is_variant else _with(row.variant, self.baseline))
            return other if other != row and other in self.rows else None
        candidates = [TableRow(self.baseline, row.variant), *([TableRow(BASE)] if self.baseline == BASE else [])]
        return next((other for other in candidates if other in self.rows and row.method != other.method), None)

    def _difference(self, row: TableRow, column: Column) -> Difference | None:
        other = self._baseline_of(row)
        if other is None or (other, column) not in self.by_cell:
            return None
        if self.over is Over.DECODING:
            passes = [self._passes(each, column) for each in (other, row)]
            common = [seed for seed in passes[0] if seed in passes[1]]
            sides = ([values[seed] for seed in common] for values in passes)
            return _over_seeds(other, column, self.over, *sides) if common else None
        before, after = self._values(other, column), self._values(row, column)
        pairs = {
            seeds: (first, second)
            for seeds in dict.fromkeys([*before, *after])
            if seeds[1] is not None or (seeds in before and seeds in after)
            if (first := _at(before, seeds)) is not None and (second := _at(after, seeds)) is not None
        }
        units = _grouped(pairs, self._unit)
        if len(units) > 1:
            means = ([mean(pair[side] for pair in group) for group in units.values()] for side in (0, 1))
            return _over_seeds(other, column, self.over, *means)
        return self._over_problems(other, row, column, list(pairs))

    def _over_problems(
        self, other: TableRow, row: TableRow, column: Column, common: Sequence[RunSeeds]
    ) -> Difference | None:
        """The difference in the one run, or of the one seed, that both rows have."""
        if len(common) != 1:
            return None
        candidates = [_at(self.by_cell[each, column], common[0]) or [] for each in (row, other)]
        # Of one base model that several runs evaluated, the one beside the trained model.
        observation, partner = next(
            ((a, b) for a in candidates[0] for b in candidates[1] if a.run == b.run),
            (candidates[0][0], candidates[1][0]),
        )
        value, before = self._value(observation), self._value(partner)
        assert value is not None and before is not None  # only known values are paired
        if self.decoding is Decoding.SAMPLED:
            return Difference(other, value - before, None, None, 1, self.over, "", None)
        if observation.verdicts:
            problems = list(partner.verdicts)
            paired = paired_difference(
                [partner.verdicts[key] for key in problems], [observation.verdicts[key] for key in problems]
            )
            return _of_pairs(other, column, "problems", "exact McNemar", paired, PERCENT)
        if observation.sums and partner.sums:
            estimate = difference(partner.sums, observation.sums, observation.scale)
            # Equal differences everywhere show nothing of how they vary.
            interval = estimate.interval if estimate.standard_error > 0 else UNKNOWN
            pairs = PairedDifference(estimate.n, estimate.value, interval, estimate.p_value)
            return _of_pairs(other, column, "questions", "paired t", pairs)
        return Difference(other, value - before, None, None, 1, "questions", "", None)

    # --- notes ---

    def notes(self) -> Iterator[str]:
        """What a reader of the table has to know."""
        if not self.observations:
            return
        where = f"{self.model}, {self.decoding} answers"
        for row in self.rows:
            columns = {column: by_seeds for (other, column), by_seeds in self.by_cell.items() if other == row}
            missing = [seeds for seeds in self.seeds if not any(seeds in by_seeds for by_seeds in columns.values())]
            if missing and row.method != BASE:
                yield f"{where}: {row.label} lacks {_seeds_text(missing)}; differences use the others."
            changed = [
                column.benchmark
                for column, by_seeds in columns.items()
                if any(len({self._value(observation) for observation in group}) > 1 for group in by_seeds.values())
            ]
            if changed:
                yield (
                    f"{where}: several runs evaluated {row.label} with the same seeds, and its results differ between "
                    f"them on {', '.join(dict.fromkeys(changed))}; its value is their mean."
                )
        if self.over is Over.TRAINING and any(row.method == BASE for row in self.rows):
            yield f"{BASE} has no training seed: it has one value and no deviation."


def _with(variant: str, setting: str) -> str:
    """The variant with another value of one of its settings, as `key=value`."""
    key = setting.partition("=")[0]
    return SEPARATOR.join(setting if text.partition("=")[0] == key else text for text in variant.split(SEPARATOR))


def _column(observation: Observation) -> Column:
    return Column(observation.benchmark, observation.metric, observation.unit, observation.judge)


def _at(values: Mapping[RunSeeds, T], seeds: RunSeeds) -> T | None:
    """The value for these seeds; that of the base model has no training seed."""
    return values.get(seeds, values.get((seeds[0], None)))


def _grouped(values: Mapping[RunSeeds, Any], unit: Callable[[RunSeeds], int | None]) -> dict[int | None, list[Any]]:
    groups: dict[int | None, list[Any]] = {}
    for seeds, value in values.items():
        groups.setdefault(unit(seeds), []).append(value)
    return groups


def _over_seeds(
    other: TableRow, column: Column, over: str, first: Sequence[float], second: Sequence[float]
) -> Difference:
    return _of_pairs(other, column, over, "paired t", difference_over_seeds(first, second))


def _of_pairs(
    other: TableRow, column: Column, over: str, test: str, paired: PairedDifference, scale: float = 1.0
) -> Difference:
    lowest, highest = ENDS[column.unit]
    span = highest - lowest
    # Few seeds or questions give t-intervals that reach beyond the largest possible difference.
    low, high = (none_if_nan(float(np.clip(scale * bound, -span, span))) for bound in paired.interval)
    p = none_if_nan(paired.p_value)
    return Difference(other, scale * paired.mean, low, high, paired.n, over, test if p is not None else "", p)


def _ranks(values: Mapping[TableRow, float | None]) -> dict[TableRow, int]:
    """1 for the best rows and 2 for the second, as shown; none where there is nothing to choose."""
    shown = {row: round(value, DIGITS) for row, value in values.items() if value is not None and math.isfinite(value)}
    distinct = sorted(set(shown.values()), reverse=True)
    if len(distinct) < 2:
        return {}
    return {row: 1 + distinct.index(value) for row, value in shown.items() if value in distinct[:2]}


def _seeds_text(missing: Sequence[RunSeeds]) -> str:
    return ", ".join(f"data seed {data} with training seed {training}" for data, training in missing)
