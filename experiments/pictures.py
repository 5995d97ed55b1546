"""The pictures and tables of docs/regret.md and docs/grouping.md.

    python experiments/pictures.py

Nothing is measured: what is drawn follows from the definitions, computed with the package's own functions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from theory import END, Problem, TokenTree
from theory.split import split
from theory_common import BLUE, FIGURES, GRAY, GREEN, ORANGE, PURPLE, save_figure, start_figure, table

from regretless.core.text_cleaning import never_fail_to_print
from regretless.modeling.layout import Item, Layout, lay_out
from regretless.objectives.weights import repo_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WRITERS = {"able writer": 0.9, "weak writer": 0.2}
"""Share of a writer's responses to one prompt that are right."""
ALPHA = 0.1
"""The temperature of the regret that is drawn."""
TOKENS = 24
"""Length of the response whose weights are drawn."""
PROMPT, RESPONSE, CUT = 60, 100, 32
"""Tokens of a prompt, of a response, and how many a masked response lacks."""
COLORS = (BLUE, GREEN, ORANGE, PURPLE)
NAMES = "ABab"
"""Two right responses to a prompt, and two wrong ones."""


def writer_rows() -> list[tuple[str, float, float, float]]:
    """Who wrote a response and how it ended: its reward, its reward minus its writer's mean, and its negative regret.

    All begin alike, and the next unit is right or wrong; the reference takes both equally.
    """
    tree = TokenTree(np.array([0, 1, 1]), np.array([1, END, END]))
    reward = np.array([0.0, 1.0, 0.0])
    problem = Problem(tree=tree, reward=reward, reference=np.log([1.0, 0.5, 0.5]), beta=ALPHA)
    return [
        (f"{writer}, {end}", float(outcome), float(outcome) - share, -float(regret))
        for writer, share in WRITERS.items()
        for end, outcome, regret in zip(
            ("right", "wrong"), reward[1:], split(problem, np.log([1.0, share, 1 - share])).regret, strict=True
        )
    ]


def signed(value: float) -> str:
    """A number with its sign and two decimals."""
    return f"{value:+.2f}"


def draw_writers(path: Path) -> None:
    """Bar charts of the same four responses: by reward, by regret under their writers, and by advantage."""
    rows = writer_rows()
    figure, charts = start_figure(3, width=8.0, height=2.3)
    titles = {1: "reward", 3: "negative regret", 2: "above the writer"}
    for chart, (column, title) in zip(charts, titles.items(), strict=True):
        values = [row[column] for row in rows]
        chart.barh([row[0] for row in rows], values, color=[BLUE, BLUE, ORANGE, ORANGE])
        for place, value in enumerate(values):
            side, gap = ("left", 0.05) if value >= 0 else ("right", -0.05)
            chart.text(value + gap, place, signed(value), va="center", ha=side, fontsize=8)
        chart.axvline(0, color=GRAY, linewidth=0.8)
        chart.set(title=title, xlim=(-2.4, 1.8), xticks=[])
        chart.invert_yaxis()
    for chart in charts[1:]:
        chart.set_yticks([])
    save_figure(figure, path)


def weight_rows() -> dict[str, np.ndarray]:
    """1 + w_s of every token of a response: by how much its log-probability under the policy moves the score."""
    length = torch.tensor([TOKENS])
    return {
        "DPO": np.ones(TOKENS),
        "RePO": 1 + repo_weights(length, TOKENS).numpy()[0],
        "RePO, discount = 0.9": 1 + repo_weights(length, TOKENS, discount=0.9).numpy()[0],
    }


def draw_weights(path: Path) -> None:
    """The weights against the place of the token in the response."""
    figure, (chart,) = start_figure(height=2.5, width=5.5)
    for (label, values), color in zip(weight_rows().items(), (GRAY, BLUE, GREEN), strict=True):
        chart.plot(range(1, TOKENS + 1), values, "o-", color=color, markersize=3, label=label)
    chart.set(xlabel="token of the response", ylabel="weight in the score", ylim=(0, None))
    chart.legend(loc="upper left")
    save_figure(figure, path)


def pairs_of(chosen: int, rejected: int, *, masked: bool = False, alike: int = 0) -> list[tuple[Item, Item]]:
    """All pairs of distinct right and wrong responses to a prompt; masked: each right one against its beginning too.

    alike: tokens that all responses begin with.
    """
    prompt = tuple(range(PROMPT))
    texts = [
        tuple(1000 * name * (token >= alike) + token for token in range(RESPONSE))
        for name in range(1, chosen + rejected + 1)
    ]
    right, wrong = ([(prompt, text) for text in part] for part in (texts[:chosen], texts[chosen:]))
    pairs = [(one, other) for one in right for other in wrong]
    return pairs + [(one, (prompt, one[1][:-CUT])) for one in right if masked]


def tokens(pairs: Sequence[tuple[Item, Item]]) -> tuple[int, int]:
    """Tokens that a pairwise trainer reads, and tokens in the row."""
    items = [item for pair in pairs for item in pair]
    return sum(len(prompt) + len(response) for prompt, response in items), lay_out(items)[0].tokens


def draw_rows(path: Path) -> None:
    """Two right and two wrong responses: eight sequences of a pairwise trainer, and the one row."""
    figure, (above, below) = start_figure(2, width=8.0, height=2.6)
    for place, (first, second) in enumerate([(right, wrong) for right in (0, 1) for wrong in (2, 3)]):
        for side, name in enumerate((first, second)):
            _blocks(above, 2.4 * place + side, [(PROMPT, GRAY, "prompt"), (RESPONSE, COLORS[name], NAMES[name])])
    above.set_title("a pairwise trainer: four pairs, eight sequences", fontsize=9)
    _blocks(below, 4, [(PROMPT, GRAY, "prompt"), *((RESPONSE - 1, COLORS[name], NAMES[name]) for name in range(4))])
    below.set_title("here: one row", fontsize=9)
    for chart in (above, below):
        chart.set(xlim=(0, PROMPT + 4 * RESPONSE), ylim=(9, -1))
        chart.axis("off")
    save_figure(figure, path)


def _blocks(chart: Axes, place: float, blocks: Sequence[tuple[int, str, str]]) -> None:
    start = 0
    for width, color, label in blocks:
        chart.barh(place, width, left=start, height=0.85, color=color, edgecolor="white")
        chart.text(start + width / 2, place, label, ha="center", va="center", color="white", fontsize=7)
        start += width


def sees(layout: Layout) -> np.ndarray:
    """(N, N) booleans: whether the token of a row sees that of a column, from the segments of a row."""
    allowed = np.zeros((layout.tokens, layout.tokens), dtype=bool)
    stops = list(itertools.accumulate(segment.length for segment in layout.segments))
    for stop, segment in zip(stops, layout.segments, strict=True):
        own = slice(stop - segment.length, stop)
        allowed[own, own] = np.tri(segment.length, dtype=bool)
        parent = segment.parent
        while parent is not None:
            allowed[own, stops[parent] - layout.segments[parent].length : stops[parent]] = True
            parent = layout.segments[parent].parent
    return allowed


def draw_attention(path: Path) -> None:
    """Who sees whom, in a short row: a prompt of 6 tokens and four responses of which 4 tokens are read."""
    prompt = tuple(range(6))
    layout, _ = lay_out([(prompt, tuple(100 * name + token for token in range(5))) for name in range(1, 5)])
    allowed = sees(layout)
    colors = ["#ffffff", GRAY, *COLORS]
    owner = np.array([1] * 6 + [2 + name for name in range(4) for _ in range(4)])
    figure, (chart,) = start_figure(width=3.4, height=3.4)
    for row, column in zip(*np.nonzero(allowed), strict=True):
        chart.add_patch(_square(column, row, colors[owner[row]]))
    edges = [0, 6, 10, 14, 18, 22]
    for edge in edges:
        chart.plot([edge, edge], [0, 22], color="#cccccc", linewidth=0.6)
        chart.plot([0, 22], [edge, edge], color="#cccccc", linewidth=0.6)
    names = ["prompt", *NAMES]
    middles = [(one + two) / 2 for one, two in itertools.pairwise(edges)]
    chart.set(
        xlim=(0, 22), ylim=(22, 0), aspect="equal", xticks=middles, yticks=middles, xlabel="is seen", ylabel="sees"
    )
    chart.set_xticklabels(names)
    chart.set_yticklabels(names)
    chart.tick_params(length=0)
    save_figure(figure, path)


def _square(column: int, row: int, color: str) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((column + 0.08, row + 0.08), 0.84, 0.84, color=color, linewidth=0)


def tables() -> dict[str, str]:
    """The tables of the pages, by page."""
    writers = [(name, f"{reward:.0f}", signed(regret), signed(above)) for name, reward, above, regret in writer_rows()]
    weights = [
        (label, *(f"{values[place - 1]:.2f}" for place in (1, 6, 12, 18, 24)), f"{values.mean():.2f}")
        for label, values in weight_rows().items()
    ]
    kinds = {
        "one right, one wrong": pairs_of(1, 1),
        "one right, two wrong": pairs_of(1, 2),
        "two right, two wrong": pairs_of(2, 2),
        "two right, two wrong, and masked pairs": pairs_of(2, 2, masked=True),
        "two right, two wrong, alike for 60 tokens": pairs_of(2, 2, alike=60),
    }
    grouping = []
    for label, pairs in kinds.items():
        pairwise, row = tokens(pairs)
        grouping.append((label, len(pairs), pairwise, row, f"{pairwise / row:.2f}"))
    return {
        "regret: writers": table(("response", "reward", "negative regret", "above the writer"), writers),
        "regret: weights": table(("score", *(f"token {place}" for place in (1, 6, 12, 18, 24)), "mean"), weights),
        "grouping": table(("responses to a prompt", "pairs", "tokens, pairwise", "tokens, one row", "ratio"), grouping),
    }


def main() -> None:
    """Print the tables and draw the pictures."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="FOLDER", help="default: %(default)s")
    folder = parser.parse_args().figures
    if find_spec("matplotlib") is None:
        parser.error("the pictures need matplotlib: pip install matplotlib")
    for name, text in tables().items():
        print(f"{name}\n\n{text}\n")
    draw_writers(folder / "regret-writers.svg")
    draw_weights(folder / "regret-weights.svg")
    draw_rows(folder / "grouping-rows.svg")
    draw_attention(folder / "grouping-attention.svg")


if __name__ == "__main__":
    main()
