"""Charts whose shapes stand where the numbers say."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from regretless.reporting.figures import IntervalRow, Series, histogram, interval_chart, line_chart, ticks


def numbers(text: str | None) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text or "")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3.1, 4.2, [-2, 0, 2, 4]), (0.1, 0.35, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35])],
)
def test_ticks_when_given_a_range_then_they_are_round_and_inside(
    low: float, high: float, expected: list[float]
) -> None:
    assert ticks(low, high) == expected


def test_line_chart_when_drawn_then_points_are_linear_in_their_values() -> None:
    chart = line_chart("t", [Series("a<b", 1, ((0.0, 2.0), (5.0, 4.0), (20.0, 3.0)))], "step (steps)", "nats")
    svg = ET.fromstring(str(chart))
    (x0, y0, x1, y1, x2, y2) = numbers(next(svg.iter("polyline")).get("points"))
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.25, abs=1e-3)
    assert (y0 - y2) / (y0 - y1) == pytest.approx(0.5, abs=1e-2)
    texts = [element.text for element in svg.iter("text")]
    assert {"step (steps)", "nats", "step 5", "a<b: 4"} <= set(texts)


def test_line_chart_when_places_are_marked_then_upright_lines_stand_there() -> None:
    points = ((2.0, 2.0), (12.0, 4.0))
    svg = ET.fromstring(str(line_chart("t", [Series("a", 1, points)], "step", "nats", marks={0, 7})))
    x0, _, x1, _ = numbers(next(svg.iter("polyline")).get("points"))
    (mark,) = [line for line in svg.iter("line") if line.get("class") == "mark"]
    assert float(str(mark.get("x1"))) == float(str(mark.get("x2"))) == pytest.approx((x0 + x1) / 2, abs=0.1)


def test_line_chart_when_a_run_has_many_steps_then_first_and_last_stay() -> None:
    points = tuple((float(step), float(step)) for step in range(5003))
    svg = ET.fromstring(str(line_chart("t", [Series("a", 1, points)], "step (steps)", "nats")))
    shown = [element.text for element in svg.iter("text") if (element.text or "").startswith("a: ")]
    assert len(shown) <= 81
    assert shown[0] == "a: 0" and shown[-1] == "a: 5002"


def test_line_chart_when_there_is_one_constant_point_then_it_is_drawn() -> None:
    svg = ET.fromstring(str(line_chart("t", [Series("a", 1, ((1.0, 0.0),))], "step (steps)", "nats")))
    assert next(svg.iter("circle")).get("class") == "dot c1"


def test_histogram_when_values_lie_far_out_then_the_outermost_bins_count_them() -> None:
    chosen = [0.0] * 500 + [1.0] * 500 + [1e6]
    svg = ET.fromstring(str(histogram("t", chosen, [0.5] * 1001, "reward (nats)", bins=2)))
    path = numbers(next(svg.iter("path")).get("d"))
    floor, heights = path[1], path[1::2]
    left, right = floor - heights[1], floor - heights[3]
    assert left / right == pytest.approx(500 / 501, abs=1e-2)


def test_interval_chart_when_an_interval_is_unknown_then_only_the_dot_is_drawn() -> None:
    rows = [IntervalRow("base", 0, 35.0, 30.0, 40.0), IntervalRow("repo", 1, 70.0, None, None)]
    svg = ET.fromstring(str(interval_chart("t", rows, "Pass@1 (%)")))
    assert sum(str(element.get("class")).startswith("whisker") for element in svg.iter("line")) == 1
    (base, repo) = [float(str(element.get("cx"))) for element in svg.iter("circle")]
    (whisker,) = [line for line in svg.iter("line") if str(line.get("class")).startswith("whisker")]
    assert (base - float(str(whisker.get("x1")))) * 7 == pytest.approx(repo - base, abs=0.1)


@pytest.mark.parametrize(("steps", "expected"), [((1.0, 2.0), ["1", "2"]), ((1.0, 1.0), ["1"]), ((0.5, 1.0), None)])
def test_line_chart_when_its_steps_are_whole_then_so_are_the_numbers_below_it(
    steps: tuple[float, float], expected: list[str] | None
) -> None:
    svg = ET.fromstring(str(line_chart("t", [Series("a", 1, tuple((x, x) for x in steps))], "step (steps)", "nats")))
    below = [element.text for element in svg.iter("text") if element.get("class") == "tick middle"]
    assert below == (expected or ["0.5", "0.6", "0.7", "0.8", "0.9", "1"])
