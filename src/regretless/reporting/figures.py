"""Charts as inline SVG. Colors are classes of the page's style sheet, so they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 480.0, 290.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 44.0
CHARACTER = 6.1
"""Approximate width of a character of the small font."""
MOST_STEPS = 80
"""Most logged steps in a chart; with more, every n-th and the last are drawn."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    color: int
    """Number of its color class, the same everywhere on the page."""
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True)
class IntervalRow:
    """One estimate with its interval."""

    name: str
    color: int
    value: float
    low: float | None
    high: float | None


def line_chart(
    title: str, series: Sequence[Series], x_label: str, y_label: str, marks: Collection[float] = ()
) -> Markup:
    """Lines over a common x axis; the values at an x appear when the pointer is above it. Needs at least one point.

    marks: places on the x axis that get an upright line.
    """
    series = [_thinned(line) for line in series if line.points]
    xs = sorted({x for line in series for x, _ in line.points})
    ys = [y for line in series for _, y in line.points]
    whole = all(float(x).is_integer() for x in xs)
    chart = _Chart(title, (xs[0], xs[-1]), _padded(min(ys), max(ys)), x_label, y_label, whole_x=whole)
    for mark in sorted(mark for mark in marks if xs[0] <= mark <= xs[-1]):
        chart.add("line", x1=chart.x(mark), x2=chart.x(mark), y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")
    for line in series:
        points = " ".join(f"{chart.x(x):.1f},{chart.y(y):.1f}" for x, y in line.points)
        dash = " dashed" if line.dashed else ""
        if len(line.points) == 1:
            (x, y) = line.points[0]
            chart.add("circle", cx=chart.x(x), cy=chart.y(y), r=3, class_=f"dot c{line.color}")
        else:
            chart.add("polyline", points=points, class_=f"line c{line.color}{dash}")
    values = [{x: (line, y) for x, y in line.points} for line in series]
    edges = [chart.x(x) for x in xs]
    for index, x in enumerate(xs):
        start = (edges[index - 1] + edges[index]) / 2 if index else edges[0] - 4
        stop = (edges[index + 1] + edges[index]) / 2 if index + 1 < len(xs) else edges[-1] + 4
        _hover(chart, start, stop, x, [at[x] for at in values if x in at])
    return chart.markup()


def _thinned(line: Series) -> Series:
    every = math.ceil(len(line.points) / MOST_STEPS)
    points = (*line.points[:-1:every], line.points[-1])
    return Series(line.name, line.color, points, line.dashed)


def _hover(chart: _Chart, start: float, stop: float, x: float, points: Sequence[tuple[Series, float]]) -> None:
    """A strip of the chart that displays a line and the values at `x` while the pointer is in it."""
    group = chart.add("g", class_="hit")
    _child(group, "rect", x=start, y=TOP, width=stop - start, height=HEIGHT - TOP - BOTTOM)
    tip = _child(group, "g", class_="tip")
    position = chart.x(x)
    _child(tip, "line", x1=position, x2=position, y1=TOP, y2=HEIGHT - BOTTOM)
    texts = [f"{chart.x_name} {_short(x)}", *(f"{line.name}: {_short(y)}" for line, y in points)]
    width = CHARACTER * max(map(len, texts)) + 22
    left = position + 8 if position + 8 + width < WIDTH else position - 8 - width
    _child(tip, "rect", class_="box", x=left, y=TOP + 2, width=width, height=15 * len(texts) + 7, rx=3)
    for row, text in enumerate(texts):
        _child(tip, "text", x=left + 16, y=TOP + 16 + 15 * row).text = text
    for row, (line, y) in enumerate(points, 1):
        _child(tip, "circle", cx=left + 8, cy=TOP + 12 + 15 * row, r=3.5, class_=f"dot c{line.color}")
        _child(tip, "circle", cx=position, cy=chart.y(y), r=3, class_=f"dot c{line.color}")


def histogram(title: str, chosen: Sequence[float], rejected: Sequence[float], x_label: str, bins: int = 40) -> Markup:
    """Counts of two samples in common bins; values outside the middle 99 % are counted in the outermost bins."""
    everything = np.concatenate([np.asarray(chosen, float), np.asarray(rejected, float)])
    low, high = (float(edge) for edge in np.quantile(everything, [0.005, 0.995]))
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    edges = np.linspace(low, high, bins + 1)
    counts = [np.histogram(np.clip(sample, low, high), edges)[0] for sample in (chosen, rejected)]
    chart = _Chart(title, (low, high), (0.0, 1.05 * float(max(count.max() for count in counts))), x_label, "pairs")
    for name, count in zip(("chosen", "rejected"), counts, strict=True):
        corners = [f"M{chart.x(low):.1f},{chart.y(0):.1f}"]
        for left, right, number in zip(edges[:-1], edges[1:], count, strict=True):
            corners.append(f"L{chart.x(left):.1f},{chart.y(number):.1f}L{chart.x(right):.1f},{chart.y(number):.1f}")
        corners.append(f"L{chart.x(high):.1f},{chart.y(0):.1f}Z")
        chart.add("path", d="".join(corners), class_=f"area {name}")
    if low < 0 < high:
        chart.add("line", x1=chart.x(0), x2=chart.x(0), y1=TOP, y2=HEIGHT - BOTTOM, class_="zero")
    return chart.markup()


def interval_chart(title: str, rows: Sequence[IntervalRow], x_label: str) -> Markup:
    """A dot and a whisker per row. Needs at least one row."""
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    left = LEFT + CHARACTER * max(0, max(len(row.name) for row in rows) - 5)
    height = TOP + 30.0 * len(rows) + BOTTOM
    chart = _Chart(title, _padded(min(ends), max(ends)), None, x_label, "", width=720, height=height, left=left)
    for index, row in enumerate(rows):
        y = TOP + 30.0 * index + 15
        chart.add("text", x=left - 10, y=y + 4, class_="name").text = row.name
        if row.low is not None and row.high is not None:
            chart.add("line", x1=chart.x(row.low), x2=chart.x(row.high), y1=y, y2=y, class_=f"whisker c{row.color}")
        dot = chart.add("circle", cx=chart.x(row.value), cy=y, r=5, class_=f"dot c{row.color}")
        _child(dot, "title").text = f"{row.name}: {_short(row.value)}"
    return chart.markup()


class _Chart:
    """Axes and a drawing area in data coordinates."""

    def __init__(
        self,
        title: str,
        x_range: tuple[float, float],
        y_range: tuple[float, float] | None,
        x_label: str,
        y_label: str,
        *,
        width: float = WIDTH,
        height: float = HEIGHT,
        left: float = LEFT,
        whole_x: bool = False,
    ) -> None:
        self.x_name = x_label.partition(" (")[0]
        self._x_range = x_range if x_range[1] > x_range[0] else (x_range[0] - 0.5, x_range[1] + 0.5)
        self._y_range = y_range or (0.0, 1.0)
        self._width, self._height, self._left = width, height, left
        self._svg = ET.Element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img")
        self._svg.set("aria-label", title)
        self._axes(x_label, y_label, with_y=y_range is not None, whole_x=whole_x)

    def x(self, value: float) -> float:
        low, high = self._x_range
        return self._left + (value - low) / (high - low) * (self._width - self._left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y_range
        return self._height - BOTTOM - (value - low) / (high - low) * (self._height - TOP - BOTTOM)

    def add(self, tag: str, **attributes: Any) -> ET.Element:
        return _child(self._svg, tag, **attributes)

    def markup(self) -> Markup:
        # ElementTree escapes texts and attributes, so the result is safe markup whatever the names are.
        return Markup(ET.tostring(self._svg, encoding="unicode"))

    def _axes(self, x_label: str, y_label: str, *, with_y: bool, whole_x: bool) -> None:
        floor, right = self._height - BOTTOM, self._width - RIGHT
        for tick in ticks(*self._x_range):
            if whole_x and not tick.is_integer():
                continue  # there is no step 1.2
            position = self.x(tick)
            self.add("line", x1=position, x2=position, y1=TOP if not with_y else floor, y2=floor + 4, class_="grid")
            self.add("text", x=position, y=floor + 17, class_="tick middle").text = _short(tick)
        self.add("line", x1=self._left, x2=right, y1=floor, y2=floor, class_="axis")
        self.add("text", x=(self._left + right) / 2, y=self._height - 6, class_="label middle").text = x_label
        if not with_y:
            return
        for tick in ticks(*self._y_range):
            position = self.y(tick)
            self.add("line", x1=self._left, x2=right, y1=position, y2=position, class_="grid")
            self.add("text", x=self._left - 6, y=position + 4, class_="tick end").text = _short(tick)
        middle = (TOP + floor) / 2
        label = self.add("text", x=12, y=middle, class_="label middle", transform=f"rotate(-90 12 {middle:g})")
        label.text = y_label


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
    step = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(step))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= step)
    first = math.ceil(low / step - 1e-9)
    # Multiples, not sums: adding steps of 0.1 would give 0.30000000000000004.
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.05 or max(abs(low), 1.0) * 0.1
    return low - margin, high + margin


def _child(parent: ET.Element, tag: str, **attributes: Any) -> ET.Element:
    texts = {
        name.rstrip("_").replace("_", "-"): f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()
    }
    return ET.SubElement(parent, tag, texts)


def _short(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2g}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")
