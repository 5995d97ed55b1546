"""Score distances across the variants of a study, beside its results: the paper's Table 4.

A run compares the token scores of its own models. Here all models of one start and the same seeds are compared, on the
pairs of the first variant, without masked ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from markupsafe import Markup
from rich.table import Table as Screen
from rich.text import Text

from regretless.analysis.analyze import AnalyzeConfig
from regretless.core.files import read_json, write_json
from regretless.core.intervals import over_seeds
from regretless.core.terminal import console
from regretless.runs.recipe import Recipe, parse_recipe
from regretless.studies.comparison import Column, Comparison, Decoding, TableRow
from regretless.studies.job import Job
from regretless.studies.runner import Failure, failed_methods, finished, run_jobs
from regretless.studies.study import Cell, Study
from regretless.studies.tables import MISSING, metric_of, plain_html
from regretless.workflow.run_folder import resolve

FOLDER, FILE = "distances", "score_distance.json"
MSE = "MSE to"
RunSeeds = tuple[int | None, int | None]


@dataclass(frozen=True)
class Measured:
    """Mean squared difference of two models' token log-probabilities (nats²), with its 95 % interval over prompts."""

    data_seed: int | None
    training_seed: int | None
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Distance:
    """Distance of a row's models to those of another row, trained with the same seeds."""

    model: str
    row: str
    to: str
    measured: tuple[Measured, ...]
    """One for each pair of seeds."""

    @property
    def text(self) -> str:
        """Mean ± standard deviation over seeds; the value alone if there is one seed.

        Over data seeds, if there are several: two trainings on the same data are not independent.
        """
        groups: dict[RunSeeds, list[float]] = {}
        has_data_seeds = len({measurement.data_seed for measurement in self.measured}) > 1
        for measurement in self.measured:
            unit = (measurement.data_seed, None if has_data_seeds else measurement.training_seed)
            groups.setdefault(unit, []).append(measurement.value)
        spread = over_seeds([mean(values) for values in groups.values()])
        return f"{spread.mean:.3g} ± {spread.sd:.2g}" if spread.n > 1 else f"{spread.mean:.3g}"


def measure_distances(
    study: Study, failures: Sequence[Failure], *, processes: int | None = None
) -> tuple[list[Distance], list[Failure]]:
    """The distances of all rows to those of the method `distance_to`, and what failed; finished work is skipped.

    failures: of the study, whose failed methods are left out.
    """
    groups: dict[tuple[str, RunSeeds], list[Cell]] = {}
    for cell in finished(study, failures):
        groups.setdefault((cell.model, (cell.data_seed, cell.training_seed)), []).append(cell)
    failed = failed_methods(failures)
    recipes = {key: recipe for key, cells in groups.items() if (recipe := _recipe(study, cells, failed)) is not None}
    jobs = [
        Job(
            name=f"{recipe.name}: {FOLDER}",
            recipe=recipe,
            stages=None,
            folder=study.folder / "logs" / recipe.name / FOLDER,
            store=study.store,
        )
        for recipe in recipes.values()
    ]
    lost = run_jobs(study, jobs, processes=processes)
    done = {key: recipe for key, recipe in recipes.items() if recipe not in [failure.job.recipe for failure in lost]}
    return _distances(study, {key: read_json(recipe.run_dir / "analyze" / FILE) for key, recipe in done.items()}), lost


def _recipe(study: Study, cells: Sequence[Cell], failed: set[tuple[str, str]]) -> Recipe | None:
    """What compares the models of some cells; None if one of the compared method is not among them."""
    first = cells[0].recipe
    trained = {
        _row(cell, method): cell.recipe.run_dir / "train" / method
        for cell in cells
        for method in cell.methods
        if (cell.name, method) not in failed
    }
    if first.model is None or not any(row.method == study.config.distance_to for row in trained):
        return None
    name = cells[0].start
    analyze = {} if first.analyze is None else first.analyze.model_dump(exclude_unset=True)
    policies = {row.label: str(folder.resolve()) for row, folder in trained.items()}
    recipe = parse_recipe(
        {
            "name": FOLDER,
            "output_dir": str((study.folder / FOLDER / name).resolve()),
            "seed": first.seed,
            "threads": first.threads,
            "model": resolve(first.model, first.run_dir).model_dump(exclude_unset=True),
            "pairs": {"dataset": str((first.run_dir / "pair" / "pairs.parquet").resolve())},
            "analyze": {**analyze, **AnalyzeConfig(policies=policies, checkpoints=0).model_dump(exclude_unset=True)},
        },
        f"{study.path}: distance_to",
    )
    return recipe.model_copy(update={"name": name})


def _row(cell: Cell, method: str) -> TableRow:
    return TableRow(method, cell.run.variant or "")


def _distances(study: Study, results: Mapping[tuple[str, RunSeeds], Any]) -> list[Distance]:
    targets = list(dict.fromkeys(_row(cell, study.config.distance_to).label for cell in study.cells))
    measured: dict[tuple[str, str, str], list[Measured]] = {}
    for (model, seeds), result in results.items():
        for distance in result["models"]:
            for row, to in ((distance["first"], distance["second"]), (distance["second"], distance["first"])):
                if to in targets:
                    measured.setdefault((model, row, to), []).append(
                        Measured(*seeds, distance["value"], distance["low"], distance["high"])
                    )
    return [Distance(*key, tuple(several)) for key, several in measured.items()]


def distance_tables(
    comparison: Comparison, distances: Sequence[Distance]
) -> Iterator[tuple[str, list[str], dict[str, dict[str, str]]]]:
    """For each model its name, the columns, and the rows by label: greedy results, and the distances to each target."""
    targets = list(dict.fromkeys(distance.to for distance in distances))
    for table in comparison.tables:
        if table.decoding is not Decoding.GREEDY:
            continue
        rows: dict[str, dict[str, str]] = {}
        for row in table.rows:
            cells = {column: table.cells.get((row, column)) for column in table.columns}
            rows[row.label] = {
                _column(column): "" if cell is None or cell.value is None else f"{cell.value:.2f}"
                for column, cell in cells.items()
            }
        columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
        for distance in distances:
            if (distance.model or table.model) == table.model and distance.row in rows:
                rows[distance.row][_head(distance.to)] = distance.text
        for to in targets:
            if to in rows:
                rows[to][_head(to)] = "0"
        yield table.model, [*columns, *map(_head, targets)], rows


def _column(column: Column) -> str:
    return f"{column.benchmark} {metric_of(column)} ({column.unit})"


def _head(to: str) -> str:
    return f"{MSE} {to}"


def show_distances(study: Study, comparison: Comparison, distances: Sequence[Distance]) -> Markup:
    """Print the distances, write their numbers beside the study's page, and return the tables as its section."""
    parts = []
    for model, columns, rows in distance_tables(comparison, distances):
        _print(f"{model}: score distance in nats² a token", rows, [name for name in columns if name.startswith(MSE)])
        named = ((label, [cells.get(name, MISSING) for name in columns]) for label, cells in rows.items())
        parts.append(plain_html(model, ("method", *columns), named))
    write_json(study.folder / "comparison" / FILE, [asdict(distance) for distance in distances])
    return Markup(
        "<p>MSE: mean squared difference of token log-probabilities (nats² a token) on the same pairs, none of them "
        "masked; over several seeds their mean ± standard deviation. Each value with its interval over prompts is in "
        "{}.</p>{}"
    ).format(FILE, Markup("").join(parts))


def _print(title: str, rows: Mapping[str, Mapping[str, str]], columns: Sequence[str]) -> None:
    """Print a table, in which no word of a name is cut."""
    table = Screen(title=title, title_justify="left")
    table.add_column("method", min_width=max(len(word) for label in rows for word in label.split()))
    for column in columns:
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    for label, cells in rows.items():
        table.add_row(Text(label), *(cells.get(column, "–") for column in columns))
    console.print(table)
