"""Figures hold the numbers of the tables and of the training logs, and only what the runs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_runs import BENCHMARK, made_run, rate
from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_json, write_jsonl
from regretless.studies.compare import compare
from regretless.studies.compared_runs import Run
from regretless.studies.comparison import TableRow
from regretless.studies.figures import Drawing, as_svg, axis_of, distances, drawings, write_figures
from regretless.training import log


def right(count: int, n: int = 40) -> list[bool]:
    return [index < count for index in range(n)]


def named(found: list[Drawing]) -> dict[str, Any]:
    return {drawing.name: drawing.figure for drawing in found}


def test_bars_when_drawn_then_they_are_means_with_one_standard_deviation(tmp_path: Path) -> None:
    runs = []
    for seed, count in enumerate((20, 24, 22)):
        greedy = {"base": {BENCHMARK: right(10), "more": right(8)}, "dpo": {BENCHMARK: right(count), "more": right(9)}}
        runs.append(Run(made_run(tmp_path / str(seed), greedy, train={"seed": seed})))
    found = compare(runs)
    figure = named(drawings(found))["bars-greedy"]
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [BENCHMARK, "more"]
    base, dpo = (group for group in axes.containers if hasattr(group, "patches"))
    assert [bar.get_height() for bar in dpo.patches] == pytest.approx([55, 22.5])
    assert [bar.get_height() for bar in base.patches] == pytest.approx([25, 20])
    (segments,) = [each.get_segments() for each in axes.collections if len(each.get_segments()) == 2][-1:]
    assert segments[0][:, 1] == pytest.approx([50, 60])  # 55 ± 5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base", "dpo"]
    assert set(named(drawings(found))) == {"bars-greedy"}  # no logs, no analysis, no sweep


def test_units_when_they_differ_then_they_share_no_axis(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}})
    for label in ("base", "dpo"):
        rate(run, label, [4.0, 5.0])
    figures = named(drawings(compare([Run(run)])))
    labels = [figures[name].axes[0].get_ylabel() for name in ("bars-greedy", "bars-greedy-1_10")]
    assert labels == ["%", "1–10"]


def test_sweep_when_variants_are_values_of_one_setting_then_it_is_a_line_with_a_band(tmp_path: Path) -> None:
    runs = []
    for count in (1000, 0, 100):
        for seed in range(2):
            greedy = {"base": {BENCHMARK: right(10)}, "dpo": {BENCHMARK: right(20 + count // 100 + 2 * seed)}}
            made = made_run(tmp_path / f"{count}-{seed}", greedy, train={"seed": seed}, mask={"count": count})
            runs.append(Run(made))
    figures = named(drawings(compare(runs)))
    (axes,) = figures["sweep-Tiny-1B-greedy"].axes
    line = next(line for line in axes.lines if line.get_label() == "dpo")
    assert line.get_xydata() == pytest.approx(np.array([[0, 52.5], [100, 55], [1000, 77.5]]))
    band = axes.collections[0].get_paths()[0].vertices
    deviation = 100 * np.std([0, 2], ddof=1) / 40
    assert (band[:, 1].min(), band[:, 1].max()) == pytest.approx((52.5 - deviation, 77.5 + deviation))
    assert (axes.get_xlabel(), axes.get_xscale()) == ("mask.count", "linear")
    rates = [Run(run.path, model=run.model, variant=f"rate={1e-5 * 10**number:g}") for number, run in enumerate(runs)]
    assert named(drawings(compare(rates)))["sweep-Tiny-1B-greedy"].axes[0].get_xscale() == "log"
    assert "bars-greedy" not in figures


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (["mask.count=0", "mask.count=3e4"], {"mask.count=0": (0.0, ""), "mask.count=3e4": (30000.0, "")}),
        (["", "mask.count=5"], {"": (0.0, ""), "mask.count=5": (5.0, "")}),
        (["a=1, b=x", "b=x, a=3", "a=1"], {"a=1, b=x": (1, "b=x"), "b=x, a=3": (3, "b=x"), "a=1": (1, "")}),
        (["mask.count=5"], None),
        (["mask", "mask.count=5"], None),
        (["a=1", "b=2"], None),
        (["a=1, b=2", "a=2, b=3"], None),
        ([""], None),
    ],
)
def test_axis_of_variants_when_they_are_numbers_of_one_setting_then_that_is_it(
    variants: list[str], expected: dict[str, tuple[float, str]] | None
) -> None:
    found = axis_of(variants)
    assert (found and found.values_of) == expected


@pytest.mark.slow
def test_curves_and_distances_when_runs_have_them_then_they_are_means_over_the_seeds(quickstarts: list[Path]) -> None:
    found = compare([Run(run) for run in quickstarts])
    figures = named(drawings(found))
    panels = {axes.get_ylabel(): axes for axes in figures["curves-quickstart"].axes}
    logs = [log.read(run / "train" / "repo" / log.LOG_FILE) for run in quickstarts]
    losses = [[(line["step"], line["loss"]) for line in one.lines] for one in logs if one is not None]
    line = next(line for line in panels["loss"].lines if line.get_label() == "repo")
    assert len(losses) == 2 and len(losses[0]) > 2
    assert line.get_xydata() == pytest.approx(np.mean(losses, axis=0))
    assert len({tuple(one) for one in losses}) == 2  # the seeds differ
    rows = [read_json(run / "analyze" / "score_distance.json")["models"] for run in quickstarts]
    pairs = distances(found.runs)
    assert set(pairs) == {("base", "dpo"), ("base", "repo"), ("dpo", "repo")}
    assert pairs["base", "repo"] == pytest.approx(np.mean([one[1]["value"] for one in rows]))
    texts = [text.get_text() for text in figures["distance-quickstart"].axes[0].texts]
    assert texts[2] == texts[6] == f"{pairs['base', 'repo']:.3g}"


def test_curves_over_rounds_when_runs_have_them_then_they_are_means_over_the_rounds_of_all_seeds(
    tmp_path: Path,
) -> None:
    runs = []
    for seed, rounds in ((0, 3), (1, 2)):
        run = made_run(tmp_path / f"{seed}", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}}, seed=seed)
        rows = [
            {"round": number, "method": method, "steps": 4, "kl_to_start": None}
            | {"pass_at_1": {"value": 0.2 * number + 0.1 * seed}}
            for method in ("dpo", "other")
            for number in range(1, rounds + 1)
        ]
        write_jsonl(run / "rounds" / "rounds.jsonl", rows)
        runs.append(Run(run))
    (axes,) = named(drawings(compare(runs)))["rounds-Tiny-1B"].axes
    (line,) = axes.lines
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "Pass@1 of the round's writer")
    assert line.get_xydata() == pytest.approx(np.array([[1, 0.25], [2, 0.45]]))


def test_learning_curves_when_runs_have_rounds_then_they_join_the_rounds_logs_and_mark_where_each_begins(
    tmp_path: Path,
) -> None:
    runs = []
    for seed, steps in ((0, (4, 6, 2)), (1, (8, 6, 2))):
        run = made_run(tmp_path / f"{seed}", {"base": {BENCHMARK: right(3)}, "dpo": {BENCHMARK: right(4)}}, seed=seed)
        rows = [{"round": number, "method": "dpo", "steps": count} for number, count in enumerate(steps, 1)]
        write_jsonl(run / "rounds/rounds.jsonl", rows)
        for number, count in enumerate(steps, 1):
            losses = [{"step": step, "loss": 10.0 * number + step + seed} for step in range(2, count + 1, 2)]
            place = "1/train/dpo" if number == 1 else f"{number}/dpo/train/dpo"
            write_json(run / "rounds" / place / "trainer_state.json", {"log_history": [*losses, {"eval_loss": 1.0}]})
        write_json(run / "train/dpo/trainer_state.json", {"log_history": losses})
        runs.append(Run(run))
    drawing = next(one for one in drawings(compare(runs)) if one.name == "curves-Tiny-1B")
    (axes,) = drawing.figure.axes
    curve, *marks = axes.lines
    # Round 1 has 4 steps in one run and 8 in the other: later rounds begin at 6 and 12 in the mean.
    expected = [[2, 12.5], [4, 14.5], [8, 22.5], [10, 24.5], [12, 26.5], [14, 32.5]]
    assert curve.get_xydata() == pytest.approx(np.array(expected))
    assert [mark.get_xdata()[0] for mark in marks] == [6, 12] and "dotted lines: a round ends" in drawing.caption


def test_distances_when_runs_lack_a_pair_then_its_place_is_empty(tmp_path: Path) -> None:
    runs = []
    for method in ("dpo", "repo"):
        run = made_run(tmp_path / method, {"base": {BENCHMARK: right(3)}, method: {BENCHMARK: right(4)}})
        write_json(
            run / "analyze" / "score_distance.json",
            {"models": [{"first": "base", "second": method, "value": 0.5 if method == "dpo" else None}]},
        )
        runs.append(Run(run))
    found = compare(runs)
    assert list(found.tables[0].rows) == [TableRow("base"), TableRow("dpo"), TableRow("repo")]
    assert distances(found.runs) == {("base", "dpo"): 0.5}


def test_files_when_written_then_they_are_of_the_formats_asked_for(tmp_path: Path) -> None:
    run = made_run(tmp_path / "a", {"base": {BENCHMARK: right(3)}, "a_$b_$": {BENCHMARK: right(4)}})
    found = drawings(compare([Run(run, model="Tiny/$x$")]))
    written = write_figures(found, tmp_path / "figures", ["png", "pdf", "svg"])
    assert [path.read_bytes()[:4] for path in written[:2]] == [b"\x89PNG", b"%PDF"]
    svg = as_svg(found[0])
    assert svg.startswith("<svg") and "a_$b_$" in svg and "Tiny/$x$" in svg  # text, not mathematics
    assert svg == as_svg(drawings(compare([Run(run, model="Tiny/$x$")]))[0])
    with pytest.raises(ConfigError, match="expected png, pdf, svg; got gif"):
        write_figures(found, tmp_path / "figures", ["gif"])
