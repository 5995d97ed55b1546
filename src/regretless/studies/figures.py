"""Figures of a comparison with matplotlib: bars, sweeps, learning curves over seeds, score distances."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from regretless.core.errors import ConfigError
from regretless.core.files import atomic_path, read_json
from regretless.core.intervals import over_seeds
from regretless.core.text_cleaning import one_line
from regretless.data.rounds_table import measured_rounds
from regretless.reporting.collect import training_log
from regretless.studies.compared_runs import SEPARATOR, Run
from regretless.studies.comparison import Column, Comparison, Decoding, Over, Table, TableRow
from regretless.studies.tables import title_of
from regretless.workflow.run_folder import BASE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
COLORS = ("#77756f", "#0067b1", "#c9540a", "#00805c", "#a04a8c", "#8a6d00", "#3f4fb5", "#6d4c41")
"""Those of the report: the first is the base model's."""
LOGGED_CURVES = {
    "loss": "loss",
    "rewards/margins": "reward margin (nats)",
    "rewards/accuracies": "reward accuracy",
    "logratios/chosen": "log-ratio of chosen responses (nats)",
}
"""Logged measures that are drawn, with the labels of their axes."""
ROUND_CURVES = {
    "pass_at_1": "Pass@1 of the round's writer",
    "score": "score of the round's writer",
    "both_verdicts": "prompts with both verdicts (share)",
    "kl_to_start": "KL to the start (nats)",
}
"""Measures of rounds that are drawn, in the same way."""
NUMERIC = re.compile(r"(.+)=([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)")
"""A variant on a numeric axis: `mask.count=3000`."""
LOGARITHMIC = 30
"""Ratio of the largest to the smallest value of a setting from which on its axis is logarithmic."""
SIZE = 8.0
"""Points of the text."""
PANEL = (3.3, 2.5)
"""Inches of one panel."""
MOST_ACROSS = 3
"""Most panels side by side."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its file name and caption."""

    name: str
    caption: str
    figure: Figure


def drawings(comparison: Comparison) -> list[Drawing]:
    """All figures that the runs have the numbers for. Raises ConfigError without matplotlib."""
    _check_matplotlib()
    drawn = [*_bars(comparison), *_sweeps(comparison), *_curves(comparison), *_distances(comparison)]
    return [Drawing(re.sub(r"[^\w.+-]", "_", drawing.name), drawing.caption, drawing.figure) for drawing in drawn]


def check_formats(formats: Sequence[str]) -> None:
    """Raise ConfigError for a format that figures cannot have, and for any without matplotlib."""
    if unknown := sorted(set(formats) - set(FORMATS)):
        raise ConfigError(f"format of figures: expected {', '.join(FORMATS)}; got {', '.join(unknown)}")
    if formats:
        _check_matplotlib()


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("figures need matplotlib: pip install 'regretless[figures]'") from error


def write_figures(figures: Sequence[Drawing], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each figure as <name>.<format>; returns the paths. Raises ConfigError for an unknown format."""
    check_formats(formats)
    written = []
    for drawing in figures:
        for kind in formats:
            path = folder / f"{drawing.name}.{kind}"
            with atomic_path(path) as temporary:
                drawing.figure.savefig(temporary, format=kind, dpi=200)
            written.append(path)
    return written


def as_svg(drawing: Drawing) -> str:
    """The figure as an SVG element for a page, with its text as text; equal figures give equal elements."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        drawing.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    # Ids of groups, which nothing refers to, repeat in every figure; those of clip paths depend on memory addresses.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for number, name in enumerate(dict.fromkeys(re.findall(r' id="(\w+)"', svg))):
        svg = re.sub(rf'(id="|#){name}\b', rf"\g<1>{drawing.name}-{number}", svg)
    return svg


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    across = min(count, MOST_ACROSS)
    down = math.ceil(count / across)
    figure = Figure(figsize=(PANEL[0] * across, PANEL[1] * down + 0.4), layout="constrained", facecolor="white")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    for panel in axes[:count]:
        panel.tick_params(labelsize=SIZE - 1)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#ecebe7")
        panel.set_axisbelow(True)
    return figure, axes[:count]


def _text(text: str) -> str:
    """A text as matplotlib prints it: a dollar sign starts no formula."""
    return one_line(text).replace("$", r"\$")


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, below them, with as many names side by side as the figure is wide for."""
    entries = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(entries) > 1:
        name = 0.45 + 0.011 * (SIZE - 1) * max(map(len, entries))  # inches, roughly
        columns = max(1, min(len(entries), int(figure.get_figwidth() / name)))
        handles, labels = list(entries.values()), list(entries)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=SIZE - 1, frameon=False)


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color and, once the colors are used up, hatching of each name; the base model's is always the same."""
    others = [name for name in dict.fromkeys(names) if name != BASE]
    count = len(COLORS) - 1
    return {BASE: {"color": COLORS[0], "hatch": ""}} | {
        name: {"color": COLORS[1 + number % count], "hatch": "/" * (4 * (number // count))}
        for number, name in enumerate(others)
    }


def _spread_text(table: Table) -> str:
    if table.over is Over.PROBLEMS:
        return "bars with 95 % intervals over problems"
    return f"means over {table.n} {table.over}, with one standard deviation"


# --- bars ------------------------------------------------------------------------------------------------------------


def _bars(comparison: Comparison) -> Iterator[Drawing]:
    """For each kind of decoding and unit, a panel for each model: benchmarks on the axis, a bar for each method.

    Models with a sweep have none: bars of all their variants would only repeat it.
    """
    for decoding in Decoding:
        tables = [table for table in comparison.tables if table.decoding is decoding and _axis(table) is None]
        for unit in dict.fromkeys(column.unit for table in tables for column in table.columns):
            kept = [table for table in tables if any(column.unit == unit for column in table.columns)]
            labels = [row.label for table in kept for row in table.rows]
            looks = _looks(labels)
            figure, panels = _panels(len(kept))
            for table, axes in zip(kept, panels, strict=True):
                columns = [column for column in table.columns if column.unit == unit and _any(table, column)]
                width = 0.8 / max(1, len(table.rows))
                for number, row in enumerate(table.rows):
                    positions, heights, errors = _bar_values(table, row, columns, (number + 0.5) * width - 0.4)
                    label = _text(row.label)
                    axes.bar(positions, heights, width, label=label, edgecolor="white", linewidth=0, **looks[row.label])
                    if np.max(errors, initial=0) > 0:
                        axes.errorbar(
                            positions, heights, errors, fmt="none", ecolor="#1c1c1b", elinewidth=0.8, capsize=2
                        )
                names = [_text(title_of(column)) for column in columns]
                axes.set_xticks(range(len(columns)), names, fontsize=SIZE - 1)
                axes.set_title(_text(table.model), fontsize=SIZE)
                axes.set_ylabel(unit, fontsize=SIZE)
            _legend(figure, panels)
            spreads = "; ".join(dict.fromkeys(_spread_text(table) for table in kept))
            suffix = "" if unit == "%" else f"-{unit}"
            yield Drawing(f"bars-{decoding}{suffix}", f"Results by benchmark, {decoding} answers: {spreads}.", figure)


def _any(table: Table, column: Column) -> bool:
    return any(cell.value is not None for (_, other), cell in table.cells.items() if other == column)


def _bar_values(
    table: Table, row: TableRow, columns: Sequence[Column], shift: float
) -> tuple[list[float], list[float], Any]:
    """Places, heights, and distances to the lower and upper ends (2, bars); 0 where they are not known."""
    positions, heights, errors = [], [], []
    for position, column in enumerate(columns):
        cell = table.cells.get((row, column))
        if cell is None or cell.value is None:
            continue
        positions.append(position + shift)
        heights.append(cell.value)
        if table.over is Over.PROBLEMS:
            low, high = (cell.value if bound is None else bound for bound in (cell.low, cell.high))
            errors.append((max(0.0, cell.value - low), max(0.0, high - cell.value)))
        else:
            errors.append((cell.sd or 0.0, cell.sd or 0.0))
    return positions, heights, np.array(errors, dtype=float).reshape(-1, 2).T


# --- sweeps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A setting of which variants are values."""

    key: str
    values_of: Mapping[str, tuple[float, str]]
    """Variant → the setting's value in it, and its other settings."""


def axis_of(variants: Sequence[str]) -> Axis | None:
    """The one setting of which all variants have a number, with at least two values; None if there is none, or two.

    A run that does not have the setting (an empty name) is at 0, if no variant is.
    """
    settings = {variant: [text for text in variant.split(SEPARATOR) if text] for variant in dict.fromkeys(variants)}
    numbers: dict[str, dict[str, tuple[float, str]]] = {}
    for variant, texts in settings.items():
        for text in texts:
            if (match := NUMERIC.fullmatch(text)) is not None:
                rest = SEPARATOR.join(other for other in texts if other != text)
                numbers.setdefault(match[1], {})[variant] = (float(match[2]), rest)
    axes = []
    for key, values_of in numbers.items():
        if "" in settings and 0.0 not in {value for value, _ in values_of.values()}:
            values_of[""] = (0.0, "")
        if values_of.keys() == settings.keys() and len({value for value, _ in values_of.values()}) > 1:
            axes.append(Axis(key, values_of))
    return axes[0] if len(axes) == 1 else None


def _axis(table: Table) -> Axis | None:
    return axis_of([row.variant for row in table.rows if row.method != BASE])


def _sweeps(comparison: Comparison) -> Iterator[Drawing]:
    """For each model and kind of decoding, a panel for each column: a method's value along a numeric setting."""
    for table in comparison.tables:
        if (axis := _axis(table)) is None:
            continue
        # One line for each method with equal other settings, along the values of the setting.
        lines: dict[str, list[tuple[float, TableRow]]] = {}
        for row in (row for row in table.rows if row.method != BASE):
            value, rest = axis.values_of[row.variant]
            lines.setdefault(TableRow(row.method, rest).label, []).append((value, row))
        columns = [column for column in table.columns if _any(table, column)]
        figure, panels = _panels(len(columns))
        looks = _looks(list(lines))
        for column, axes in zip(columns, panels, strict=True):
            for label, line in lines.items():
                points = sorted(
                    (value, cell.value, cell.sd or 0.0)
                    for value, row in line
                    if (cell := table.cells.get((row, column))) is not None and cell.value is not None
                )
                if points:
                    x, y, sd = np.array(points).T
                    color = looks[label]["color"]
                    axes.plot(x, y, "o-", ms=3, lw=1.2, color=color, label=_text(label))
                    axes.fill_between(x, y - sd, y + sd, color=color, alpha=0.18, linewidth=0)
            # The base model has no setting: a level line.
            base = table.cells.get((TableRow(BASE), column))
            if base is not None and base.value is not None:
                axes.axhline(base.value, color=COLORS[0], lw=1, ls="--", label=BASE)
            values = sorted({value for value, _ in axis.values_of.values()})
            if values[0] > 0 and values[-1] >= LOGARITHMIC * values[0]:
                axes.set_xscale("log")
            axes.set_xlabel(_text(axis.key), fontsize=SIZE)
            axes.set_ylabel(_text(f"{title_of(column)} ({column.unit})"), fontsize=SIZE)
        _legend(figure, panels)
        band = "" if table.over is Over.PROBLEMS else f"; bands: one standard deviation over {table.n} {table.over}"
        caption = f"{table.model} along {axis.key}, {table.decoding} answers{band}."
        yield Drawing(f"sweep-{table.model}-{table.decoding}", caption, figure)


# --- learning curves, and curves over rounds -------------------------------------------------------------------------


Points = Mapping[tuple[int, ...], Mapping[str, Any]]
"""Measures by round and step in it, or by round."""


def _curves(comparison: Comparison) -> Iterator[Drawing]:
    """For each model, a panel for each logged measure, and for each of rounds: a method's mean over its runs."""
    yield from _over_runs(comparison, "curves", "Training", "step", LOGGED_CURVES, _logged)
    yield from _over_runs(comparison, "rounds", "Rounds", "round", ROUND_CURVES, _measured)


def _logged(run: Path, method: str) -> Points:
    return {(line["round"], line["step"] - line["begin"]): line for line in training_log(run, method)}


def _measured(run: Path, method: str) -> Points:
    return {
        (row["round"],): {key: of["value"] if isinstance(of, Mapping) else of for key, of in row.items()}
        for row in measured_rounds(run)
        if row["method"] == method
    }


def _over_runs(
    comparison: Comparison,
    name: str,
    what: str,
    axis: str,
    measures_of: Mapping[str, str],
    read: Callable[[Path, str], Points],
) -> Iterator[Drawing]:
    """For each model, a panel for each measure that is there: a method's mean over its runs, with a band.

    read: what is drawn of a run folder and method, by measure: `axis` is the place on the axis, and `begin`, where it
    is there, a place that gets an upright line.
    """
    for model in dict.fromkeys(run.model or "" for run in comparison.runs):
        logs: dict[str, list[Points]] = {}
        for run in (run for run in comparison.runs if run.model == model):
            for method in dict.fromkeys(
                observation.method for observation in comparison.observed.observations if observation.run == run
            ):
                if points := read(run.path, method):
                    logs.setdefault(TableRow(method, run.variant or "").label, []).append(points)
        measures = [key for key in measures_of if any(_curve(runs, key, axis) for runs in logs.values())]
        if not measures:
            continue
        figure, panels = _panels(len(measures))
        looks = _looks(list(logs))
        begins = {begin for runs in logs.values() for _, begin, _ in _curve(runs, "begin", axis)} - {0.0}
        for key, axes in zip(measures, panels, strict=True):
            for label, runs in logs.items():
                if curve := _curve(runs, key, axis):
                    x, y, sd = np.array(curve).T
                    axes.plot(
                        x, y, lw=1.2, color=looks[label]["color"], label=_text(label), marker="o" if len(x) == 1 else ""
                    )
                    axes.fill_between(x, y - sd, y + sd, color=looks[label]["color"], alpha=0.18, linewidth=0)
            for begin in sorted(begins):
                axes.axvline(begin, color=COLORS[0], lw=0.6, ls=":")
            axes.set_xlabel(axis, fontsize=SIZE)
            axes.set_ylabel(measures_of[key], fontsize=SIZE)
        _legend(figure, panels)
        most = max(map(len, logs.values()))
        band = f": means over up to {most} runs, with one standard deviation" if most > 1 else ""
        marks = "; dotted lines: a round ends, and the next begins" if begins else ""
        yield Drawing(f"{name}-{model}", f"{what} of {model}{band}{marks}.", figure)


def _curve(runs: Sequence[Points], key: str, axis: str) -> list[tuple[float, float, float]]:
    """Place on the axis, mean and standard deviation over runs (0 for one), of what all of them logged.

    The place is a mean, too: later rounds begin at other steps where earlier ones had other numbers of them.
    """
    points = []
    for place in sorted(set.intersection(*(set(run) for run in runs))):
        values = [run[place].get(key) for run in runs]
        numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if len(numbers) == len(runs):
            spread = over_seeds(numbers)
            points.append((mean(run[place][axis] for run in runs), spread.mean, spread.sd if spread.n > 1 else 0.0))
    return points


# --- score distances -------------------------------------------------------------------------------------------------


def distances(runs: Sequence[Run]) -> dict[tuple[str, str], float]:
    """Score distance of every two models of these runs (`analyze`), nats²; the mean over the runs that have it."""
    values_of: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        file = run.path / "analyze" / "score_distance.json"
        for row in read_json(file)["models"] if file.is_file() else []:
            if row["value"] is not None:
                values_of.setdefault((str(row["first"]), str(row["second"])), []).append(float(row["value"]))
    return {pair: mean(values) for pair, values in values_of.items()}


def _distances(comparison: Comparison) -> Iterator[Drawing]:
    """For each model and variant, the matrix of score distances."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in comparison.runs:
        groups.setdefault((run.model or "", run.variant or ""), []).append(run)
    for (model, variant), runs in groups.items():
        by_pair = distances(runs)
        if not by_pair:
            continue
        # The symmetric matrix; NaN where two models were not compared.
        names = list(dict.fromkeys(name for pair in by_pair for name in pair))
        matrix = np.full((len(names), len(names)), np.nan)
        for (first, second), value in by_pair.items():
            row, column = names.index(first), names.index(second)
            matrix[row, column] = matrix[column, row] = value
        np.fill_diagonal(matrix, 0.0)
        figure, (axes,) = _panels(1)
        axes.grid(visible=False)
        # Not an image: the page allows none.
        axes.pcolormesh(np.ma.masked_invalid(matrix), cmap="Blues", vmin=0)
        axes.invert_yaxis()
        axes.set_aspect("equal")
        # The number in each square, white on dark ones.
        largest = np.nanmax(matrix)
        for (row, column), value in np.ndenumerate(matrix):
            shown = "–" if math.isnan(value) else f"{value:.3g}"
            color = "white" if value > 0.6 * largest else "#1c1c1b"
            axes.text(column + 0.5, row + 0.5, shown, ha="center", va="center", size=SIZE - 1, color=color)
        shown_names = [_text(name) for name in names]
        middles = np.arange(len(names)) + 0.5
        axes.set_xticks(middles, shown_names, fontsize=SIZE - 1, rotation=30, ha="right")
        axes.set_yticks(middles, shown_names, fontsize=SIZE - 1)
        title = f"{model} ({variant})" if variant else model
        axes.set_title(_text(title), fontsize=SIZE)
        over = f", means over {len(runs)} runs" if len(runs) > 1 else ""
        caption = f"Score distance (mean squared difference of token log-probabilities, nats²) of {title}{over}."
        yield Drawing(f"distance-{model}{'-' if variant else ''}{variant}", caption, figure)
