"""Run data in the form of the page: tables, charts, shaded tokens."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, NamedTuple

from markupsafe import Markup

from regretless.core.intervals import in_percent
from regretless.reporting.collect import (
    SEPARATOR,
    ChatResult,
    FinishedStage,
    GreedyResult,
    HarnessResult,
    R,
    RunData,
    flatten,
)
from regretless.reporting.figures import IntervalRow, Series, histogram, interval_chart, line_chart
from regretless.workflow.run_folder import BASE

COLOR_CLASSES = 7
"""Color classes for trained models; class 0 is the base model's."""


TEXT_LIMIT = 6000
"""Most characters of a prompt or response on the page."""


class Curve(NamedTuple):
    """One chart of the training log; the second of two keys is a dashed line."""

    title: str
    caption: str
    keys: tuple[str, ...]
    unit: str


CURVES = (
    Curve("Loss", "Objectives have different scales.", ("loss",), "loss"),
    Curve("Reward margin", "Reward of the chosen minus the rejected response, mean.", ("rewards/margins",), "nats"),
    Curve(
        "Reward accuracy",
        "Pairs whose chosen response has the larger reward.",
        ("rewards/accuracies",),
        "share of pairs",
    ),
    Curve(
        "Log-ratio to the reference",
        "Mean per response. A falling chosen line means that the good responses become less likely, too.",
        ("logratios/chosen", "logratios/rejected"),
        "nats",
    ),
    Curve("Log-probability", "Mean per response.", ("logps/chosen", "logps/rejected"), "nats"),
    Curve("Gradient norm", "Before clipping.", ("grad_norm",), "2-norm"),
)


class RoundCurve(NamedTuple):
    """One chart over rounds, of a number in `rounds.jsonl`."""

    key: str
    title: str
    caption: str
    unit: str


ROUND_CURVES = (
    RoundCurve(
        "pass_at_1", "Pass@1", "Share of right responses of the round's writer to the round's prompts.", "share"
    ),
    RoundCurve("score", "Score", "Mean score of the round's responses.", "score"),
    RoundCurve("both_verdicts", "Both verdicts", "Prompts with right and wrong responses.", "share of prompts"),
    RoundCurve("kl_to_start", "KL to the start", "Of the round's writer to the recipe's model.", "nats per response"),
    RoundCurve(
        "effective_share",
        "Effective sample size",
        "Of the responses' importance weights under the model that the round trains; 1: it is their writer.",
        "share of responses",
    ),
    RoundCurve("tokens", "Length", "Mean of the round's responses.", "tokens"),
    RoundCurve("entropy", "Entropy", "Minus the mean log-probability of drawn tokens.", "nats per token"),
    RoundCurve(
        "mismatch",
        "Mismatch",
        "Of recorded log-probabilities to those of training's passes, mean distance. Above 0.1 a run ends. "
        "In float32 it ends above 0.01.",
        "nats per token",
    ),
    RoundCurve("saturated", "Saturated pairs", "In the last logged steps.", "share of pairs"),
)


def colors_of(run: RunData) -> dict[str, int]:
    """Color class of every model, the same in all charts: the base's is 0, trained ones count in training order."""
    trained = [stage.name.removeprefix("train/") for stage in run.stages if stage.name.startswith("train/")]
    named = [
        *trained,
        *run.logs,
        *(row.label for row in run.results),
        *(row.label for row in run.chat_results),
        *(row.label for row in run.harness_results),
        *(row.label for row in run.changes),
        *run.scores,
    ]
    if run.token_rewards:
        named += run.token_rewards["policies"]
    labels = [label for label in dict.fromkeys(named) if label != BASE]
    return {BASE: 0} | {label: 1 + index % COLOR_CLASSES for index, label in enumerate(labels)}


def results(run: RunData, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each benchmark, its rows and their interval chart, in percent."""
    return [
        {"name": name, "rows": rows, "chart": _chart("Pass@1 in percent", rows, colors, "Pass@1 (%)", 100, digits=1)}
        for name, rows in _by_benchmark(run.results).items()
    ]


def chat_results(run: RunData, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each chat benchmark, the chart of its first metric, and all metrics with the models side by side."""
    sections = []
    for name, rows in _by_benchmark(run.chat_results).items():
        metrics = list(dict.fromkeys(row.metric for row in rows))
        metric = f"{words(metrics[0])} ({rows[0].unit})"
        models = {row.label: row for row in rows}.values()
        prices = [row.dollars for row in models]
        sections.append(
            {
                "name": name,
                "judges": ", ".join(dict.fromkeys(row.judge for row in rows)),
                "metric": metric,
                "rows": sorted(rows, key=lambda row: metrics.index(row.metric)),
                "chart": _chart(metric, [row for row in rows if row.metric == metrics[0]], colors, metric),
                "requests": sum(row.requests for row in models),
                "dollars": None if None in prices else sum(price or 0.0 for price in prices),
            }
        )
    return sections


def harness_results(run: RunData, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """For each task, the chart of its first metric, and all metrics with the models side by side.

    Shares are in percent (`in_percent`).
    """
    sections = []
    percent = in_percent((row.benchmark, row.metric, row.value) for row in run.harness_results)
    for name, rows in _by_benchmark(run.harness_results).items():
        metrics = list(dict.fromkeys(row.metric for row in rows))
        first, is_share = metrics[0], (name, metrics[0]) in percent
        unit, factor, digits = (f"{first} (%)", 100, 1) if is_share else (first, 1, 2)
        rows = sorted(rows, key=lambda row: metrics.index(row.metric))
        sections.append(
            {
                "name": name,
                "metric": unit,
                "rows": [{**asdict(row), "share": (name, row.metric) in percent} for row in rows],
                "chart": _chart(unit, [row for row in rows if row.metric == first], colors, unit, factor, digits),
            }
        )
    return sections


def _by_benchmark(rows: Sequence[R]) -> dict[str, list[R]]:
    groups: dict[str, list[R]] = {}
    for row in rows:
        groups.setdefault(row.benchmark, []).append(row)
    return groups


def _chart(
    title: str,
    rows: Sequence[GreedyResult | ChatResult | HarnessResult],
    colors: Mapping[str, int],
    axis: str,
    factor: int = 1,
    digits: int = 2,
) -> Markup | None:
    """The models' values with their intervals, in the unit of the axis (`factor` times that of the rows)."""
    dots = [
        IntervalRow(
            row.label,
            colors[row.label],
            factor * row.value,
            None if row.low is None else factor * row.low,
            None if row.high is None else factor * row.high,
        )
        for row in rows
        if row.value is not None
    ]
    values = "; ".join(f"{dot.name} {dot.value:.{digits}f}" for dot in dots)
    return interval_chart(f"{title}: {values}", dots, axis) if dots else None


def curves(run: RunData, colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """Charts of the training log, without those that no objective logged; lines mark where rounds begin."""
    charts, begins = [], {line["begin"] for log in run.logs.values() for line in log} - {0}
    for curve in CURVES:
        series = [
            Series(
                name if len(curve.keys) == 1 else f"{name} {key.split('/')[-1]}",
                colors[name],
                points,
                dashed=key != curve.keys[0],
            )
            for name, log in run.logs.items()
            for key in curve.keys
            if (points := _points(log, key))
        ]
        if series:
            chart = line_chart(f"{curve.title} by optimizer step", series, "step (optimizer steps)", curve.unit, begins)
            charts.append({"title": curve.title, "caption": curve.caption, "chart": chart})
    return charts


def rounds(run: RunData, colors: Mapping[str, int]) -> dict[str, Any]:
    """Charts over rounds, without those that no round has a number for, and tables; empty without rounds."""
    if not run.rounds:
        return {}
    methods = list(dict.fromkeys(row["method"] for row in run.rounds))
    charts = []
    for curve in ROUND_CURVES:
        series = [
            Series(method, colors[method], points)
            for method in methods
            if (points := tuple(_over_rounds(run, method, curve.key)))
        ]
        if series:
            chart = line_chart(f"{curve.title} by round", series, "round (number)", curve.unit)
            charts.append({"title": curve.title, "caption": curve.caption, "chart": chart})
    measured = {f"{row['method']}, round {row['round']}": row for row in run.rounds}
    shown = [curve.key for curve in ROUND_CURVES if any(_value(row, curve.key) is not None for row in run.rounds)]
    lines = [
        [name, *(_with_interval(row, key) for key in shown), row["pairs"], row["replayed"], row["steps"]]
        for name, row in measured.items()
    ]
    titles = [f"{curve.title} ({curve.unit})" for curve in ROUND_CURVES if curve.key in shown]
    numbers: dict[str, Any] = {"caption": "What was measured, with 95 % intervals over prompts where there are any."}
    numbers |= {"columns": ["round", *titles, "pairs", "replayed", "steps"], "rows": lines}
    seconds = {name: _seconds(run, row) for name, row in measured.items()}
    stages = list(dict.fromkeys(stage for taken in seconds.values() for stage in taken))
    slowest = max((value for taken in seconds.values() for value in taken.values()), default=0) or 1
    times = {"stages": stages, "rows": seconds, "slowest": slowest}
    return {"methods": methods, "curves": charts, "numbers": numbers, "times": times}


def _over_rounds(run: RunData, method: str, key: str) -> Iterator[tuple[float, float]]:
    for row in run.rounds:
        if row["method"] == method and (value := _value(row, key)) is not None:
            yield row["round"], value


def _value(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return value["value"] if isinstance(value, Mapping) else value


def _with_interval(row: Mapping[str, Any], key: str) -> float | str | None:
    value = row.get(key)
    if not isinstance(value, Mapping) or value["value"] is None or value["low"] is None:
        return _value(row, key)
    return f"{value['value']:.3g} [{value['low']:.3g}, {value['high']:.3g}]".replace("-", "−")


def _seconds(run: RunData, row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the stages of one round and method, by the stage's name."""
    place = "rounds/1/" if row["round"] == 1 else f"rounds/{row['round']}/{row['method']}/"
    seconds = {}
    for stage in run.stages:
        name, _, method = stage.name.removeprefix(place).partition("/")
        if stage.name.startswith(place) and method in ("", row["method"]):
            seconds[name] = stage.seconds
    return seconds


def _points(log: Sequence[Mapping[str, float]], key: str) -> tuple[tuple[float, float], ...]:
    return tuple((line["step"], line[key]) for line in log if math.isfinite(line.get(key, math.nan)))


def curve_ends(run: RunData) -> list[dict[str, Any]]:
    """First and last value of every drawn measure, by objective."""
    ends = []
    for key, unit in ((key, curve.unit) for curve in CURVES for key in curve.keys):
        logged = [[value for _, value in _points(log, key)] for log in run.logs.values()]
        if any(logged):
            values = [(values[0], values[-1]) if values else (None, None) for values in logged]
            name = key.replace("/", " ").replace("_", " ")
            ends.append({"name": name if unit in name else f"{name} ({unit})", "ends": values})
    return ends


def histograms(run: RunData) -> list[dict[str, Any]]:
    """For each objective, a chart of the rewards of held-out pairs."""
    charts = []
    for name, (chosen, rejected) in run.scores.items():
        above = sum(better > worse for better, worse in zip(chosen, rejected, strict=True)) / len(chosen)
        margin = statistics.median(better - worse for better, worse in zip(chosen, rejected, strict=True))
        caption = (
            f"{len(chosen):,} pairs; chosen above rejected in {100 * above:.1f} %; median margin {margin:.3g} nats."
        )
        chart = histogram(f"{name}: rewards of chosen and rejected", chosen, rejected, "reward (nats)")
        charts.append({"name": name, "caption": caption, "chart": chart})
    return charts


def stage_rows(stages: Sequence[FinishedStage]) -> list[FinishedStage]:
    """Stages as rows of a table, without counts that are shown elsewhere.

    All passes of an evaluation form one row, and so do the stages of a round.
    """
    rows: list[FinishedStage] = []
    for stage in stages:
        counts = {key: value for key, value in stage.counts.items() if not key.startswith("eval_")}
        first, *inner = stage.name.split("/")
        group = {"evaluate": first, "rounds": "/".join([first, *inner[:1]])}.get(first)
        if group is None or not inner:
            rows.append(replace(stage, counts=counts))
            continue
        if not rows or rows[-1].name != group:
            rows.append(replace(stage, name=group, seconds=0.0, counts={}))
        whole = rows[-1].counts
        if stage.name.startswith("evaluate/samples/"):
            names = ["responses", "tokens", "cut", *(["stopped"] if "stopped" in {*whole, *counts} else [])]
            whole = {key: whole.get(key, 0) + counts.get(key, 0) for key in names}
        rows[-1] = replace(rows[-1], seconds=rows[-1].seconds + stage.seconds, counts=whole)
    return rows


def busy_seconds(stages: Sequence[FinishedStage]) -> float:
    """Seconds in which one stage or more was at work: what ran at the same time counts once."""
    ends = [(datetime.fromisoformat(stage.finished).timestamp(), stage.seconds) for stage in stages]
    busy, until = 0.0, -math.inf
    for start, end in sorted((end - seconds, end) for end, seconds in ends):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def versions(stages: Sequence[FinishedStage]) -> list[dict[str, Any]]:
    """The distinct sets of versions that stages ran with: several after an upgrade between two stages."""
    stages_by_versions: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for stage in stages:
        stages_by_versions.setdefault(tuple(stage.versions.items()), []).append(stage.name)
    return [{"versions": dict(key), "stages": names} for key, names in stages_by_versions.items()]


CAPTIONS = {
    "data": "Rows and responses",
    "tokens": "Tokens: pair by pair, or each distinct one once",
    "lengths": "Lengths (tokens)",
    "objectives": "Loss and margin of each objective before the first step (nats), and the share of saturated pairs",
    "behavior_minus_reference": "Behavior minus reference log-probability (nats per token)",
    "stored_minus_rescored": "Stored minus re-scored behavior log-probability (nats per token)",
}
"""Captions of the inspect stage's tables; other keys are captions themselves."""
OMITTED_COLUMNS = tuple(
    f"{name}{SEPARATOR}{part}" for name in ("margin", "nats_per_token") for part in ("min", "q25", "q75", "max")
)
"""Columns that appear only in the file."""


def inspect_tables(content: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Tables of inspect.json, except for its notes."""
    if content is None:
        return []
    numbers = {key: value for key, value in content.items() if key not in ("notes", "scored_pairs")}
    return tables(numbers | {"data": {**content.get("data", {}), "scored_pairs": content.get("scored_pairs")}})


def tables(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Nested values as tables: a mapping of mappings has a row for each, any other a row for each of its values."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping | list)}
    result = [_list_table("Numbers", plain)] if plain else []
    for key, value in values.items():
        if not isinstance(value, Mapping) or not value:
            continue
        caption = CAPTIONS.get(key, words(key))
        if not all(isinstance(entry, Mapping) for entry in value.values()):
            result.append(_list_table(caption, value))
            continue
        entries = {name: flatten(entry) for name, entry in value.items()}
        filled = (name for entry in entries.values() for name, cell in entry.items() if cell is not None)
        columns = [name for name in dict.fromkeys(filled) if name not in OMITTED_COLUMNS]
        rows = [[name, *(entry.get(column) for column in columns)] for name, entry in entries.items()]
        if columns:
            result.append({"caption": caption, "columns": ["", *map(words, columns)], "rows": rows})
    return result


def _list_table(caption: str, values: Mapping[str, Any]) -> dict[str, Any]:
    rows = [[words(name), value] for name, value in flatten(values).items()]
    return {"caption": caption, "columns": ["", "value"], "rows": rows}


def words(key: str) -> str:
    """A key of a JSON file as words; a text among its parts, such as a reason with a setting to paste, as it is."""
    # The unit is in the caption.
    parts = key.removeprefix(f"nats_per_token{SEPARATOR}").split(SEPARATOR)
    return SEPARATOR.join(part.replace("_", " ") if re.fullmatch(r"\w+", part) else part for part in parts)


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """The text, or its beginning with the number of omitted characters."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
