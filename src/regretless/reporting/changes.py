"""The page's section on changes through training, from the analyze stage's files: tables with intervals, and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from regretless.data.columns import SIDES
from regretless.data.regret_table import READINGS
from regretless.reporting.figures import IntervalRow, Series, interval_chart, line_chart


def changes(files: Mapping[str, Any], colors: Mapping[str, int]) -> list[dict[str, Any]]:
    """Parts of the section, each with a title, a note, a chart and tables; empty if the stage did not run."""
    parts = [
        _distances(files.get("score_distance", {})),
        _drift(files.get("drift", {}), colors),
        _gradients(files.get("gradients", {}), colors),
        _calibration(files.get("calibration", {}), colors),
        _regret(files.get("regret_calibration", {}), colors),
        _lengths(files.get("lengths", {})),
    ]
    return [part for part in parts if part["tables"]]


def _part(
    title: str,
    note: str,
    tables: Sequence[Mapping[str, Any]],
    chart: Markup | None = None,
    caption: str = "",
    *,
    single: bool = False,
) -> dict[str, Any]:
    """single: the chart names its rows itself, and has the whole width."""
    filled = [table for table in tables if table["rows"]]
    return {"title": title, "note": note, "chart": chart, "caption": caption, "tables": filled, "single": single}


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {"caption": caption, "columns": ["", *columns], "rows": rows}


def _interval(estimate: Mapping[str, Any] | None) -> list[Any]:
    """Cells of an estimate: its value and its 95 % interval."""
    if estimate is None or estimate["value"] is None:
        return [None, None]
    low, high = estimate["low"], estimate["high"]
    between = None if low is None else f"{low:.3g} to {high:.3g}".replace("-", "−")
    return [estimate["value"], between]


def _distances(content: Mapping[str, Any]) -> dict[str, Any]:
    rows = [[f"{row['first']} – {row['second']}", *_interval(row), row["n"]] for row in content.get("models", ())]
    caption = "Mean squared difference of two models' log-probabilities of the same token (nats²)."
    return _part(
        "Score distance",
        "The paper's score distance, over all tokens of the chosen and rejected responses of a sample of the pairs.",
        [_table(caption, ["score distance", "95 % interval", "tokens"], rows)],
    )


def _drift(content: Mapping[str, Any], colors: Mapping[str, int]) -> dict[str, Any]:
    series, rows = [], []
    for name, drift in content.get("policies", {}).items():
        points = [entry for entry in drift["points"] if entry["step"] is not None]
        for side in SIDES:
            line = tuple((float(entry["step"]), float(entry[side]["change"]["value"])) for entry in points)
            series.append(Series(f"{name} {side}", colors.get(name, 0), line, dashed=side == "rejected"))
        rows += [
            [
                f"{name}, step {entry['step']}",
                *(
                    cell
                    for side in SIDES
                    for cell in (entry[side]["per_token"]["value"], *_interval(entry[side]["change"]))
                ),
            ]
            for entry in drift["points"][1:]
        ]
    columns = [text for side in SIDES for text in (f"{side}: nats per token", "change per response", "95 % interval")]
    chart = None
    if any(len(line.points) > 1 for line in series):
        title = "Log-probability of chosen and rejected responses, change since the start, by optimizer step"
        chart = line_chart(title, series, "step (optimizer steps)", "nats per response")
    return _part(
        "Log-probability of fixed responses",
        "The same pairs at every point: the start, the saved checkpoints, and the end of training.",
        [_table("Log-probability, and its change since the start (nats).", columns, rows)],
        chart,
        "Change since the start; chosen solid, rejected dashed.",
    )


def _gradients(content: Mapping[str, Any], colors: Mapping[str, int]) -> dict[str, Any]:
    series, rows = [], []
    for name, result in content.get("policies", {}).items():
        for side in SIDES:
            if result[side] is None:
                continue
            shares = [entry["value"] for entry in result[side]["shares"]]
            line = tuple((tenth / 10, float(share)) for tenth, share in enumerate(shares, 1))
            series.append(Series(f"{name} {side}", colors.get(name, 0), line, dashed=side == "rejected"))
            last = result[side]["near_end"]
            rows.append([f"{name}, {side}", shares[0], shares[4], shares[-1], *_interval(last[0]), last[-1]["value"]])
    columns = ["first tenth", "fifth tenth", "last tenth", "last token", "95 % interval", "tenth token from the end"]
    chart = None
    if series:
        title = "Share of a response's gradient in each tenth of it"
        chart = line_chart(title, series, "end of the tenth (share of the response)", "share of the gradient")
    return _part(
        "Distribution of the objectives' gradients",
        "Absolute derivative of the loss by each token's log-probability at the first step; an even distribution has "
        "0.1 in each tenth. For single tokens: the ratio to an even distribution.",
        [_table("Share of the gradient along a response, mean over responses.", columns, rows)],
        chart,
        "Share in each tenth; chosen solid, rejected dashed.",
    )


def _calibration(content: Mapping[str, Any], colors: Mapping[str, int]) -> dict[str, Any]:
    series = [Series("calibrated", 0, ((0.5, 0.5), (1.0, 1.0)), dashed=True)]
    rows, bins = [], []
    for name, result in content.get("policies", {}).items():
        line = tuple((float(entry["confidence"]), float(entry["accuracy"])) for entry in result["bins"])
        series.append(Series(name, colors.get(name, 0), line))
        numbers = [result["pairs"], result["ties"], result["confidence"], *_interval(result["accuracy"]), result["ece"]]
        rows.append([name, *numbers, *_interval(result["brier"])])
        bins += [
            [
                f"{name}, {entry['from']:.2f} – {entry['to']:.2f}",
                entry["pairs"],
                entry["confidence"],
                *_interval({**entry, "value": entry["accuracy"]}),
            ]
            for entry in result["bins"]
        ]
    columns = [
        "pairs",
        "ties",
        "mean confidence",
        "correct predictions",
        "95 % interval",
        "ECE",
        "Brier score",
        "95 % interval",
    ]
    chart = None
    if rows:
        title = "Share of correct predictions on held-out pairs, by confidence"
        chart = line_chart(title, series, "confidence (mean of the bin)", "share of correct predictions")
    return _part(
        "Calibration on held-out pairs",
        f"{content.get('observed', '')}.",
        [
            _table("Predicted confidence and observed accuracy.", columns, rows),
            _table("By confidence.", ["pairs", "mean confidence", "correct predictions", "95 % interval"], bins),
        ],
        chart,
        "By bin of confidence; a calibrated model lies on the dashed line.",
    )


def _regret(content: Mapping[str, Any], colors: Mapping[str, int]) -> dict[str, Any]:
    rows, shown = [], []
    first = next((f"{alpha:g}" for alpha in content.get("alphas", ())), "")
    for name, methods in content.get("policies", {}).items():
        for method, targets in methods.items():
            for target, outcomes in targets.items():
                for outcome, by_alpha in outcomes.items():
                    label = f"{name}, {READINGS[method]}, {outcome}"
                    rows += [
                        [f"{label}, {target}, α = {alpha}", *_interval(one), one["n"], one["prompts"]]
                        for alpha, one in by_alpha.items()
                    ]
                    one = by_alpha[first]
                    if target == "units" and one["value"] is not None:
                        shown.append(IntervalRow(label, colors.get(name, 0), one["value"], one["low"], one["high"]))
    title = "Rank correlation of regret, read and measured"
    return _part(
        "Implicit scores against measured regret",
        f"{content.get('defined', '')}. Above 0, minus the method's implicit reward goes with the measured regret. "
        "The base model is a control: its implicit reward is 0 for DPO, and log π_ref/μ for RePO.",
        [_table(f"{title}.", ["ρ", "95 % interval", "numbers", "prompts"], rows)],
        interval_chart(title, shown, f"rank correlation of units, α = {first}") if shown else None,
        f"{title}: single units, with 95 % intervals.",
        single=True,
    )


def _lengths(content: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        [f"{benchmark}, {label}", *_interval(entry["length"]), *_interval(entry["change"]), result["unit"]]
        for benchmark, result in content.get("benchmarks", {}).items()
        for label, entry in result["models"].items()
    ]
    columns = ["mean length", "95 % interval", "change from base, paired", "95 % interval", "unit"]
    return _part(
        "Length of the models' own responses",
        "Greedy responses to the problems of the benchmarks.",
        [_table("Length of responses, and the paired difference from the base model.", columns, rows)],
    )
