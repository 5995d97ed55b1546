"""What the commands behind docs/theory.md share: their options, tables, and the look of their figures."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from regretless.core.text_cleaning import never_fail_to_print

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#767676"
"""Colors that stay apart for color-blind readers (Okabe and Ito)."""


def figure_path(description: str | None, name: str) -> Path | None:
    """Parses the command line: where the figure goes, or None with --no-figure."""
    never_fail_to_print()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, default=FIGURES / name, metavar="SVG", help="default: %(default)s")
    parser.add_argument("--no-figure", action="store_true", help="print the table only")
    options = parser.parse_args()
    if not options.no_figure:
        check_matplotlib(" or print the table only with --no-figure")
    return None if options.no_figure else options.figure


def check_matplotlib(instead: str = "") -> None:
    """Ends with a message without matplotlib, before the work."""
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit(f"figures need matplotlib: pip install 'regretless[figures]'{instead and ',' + instead}")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers right-aligned under every header but the first."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def magnitude(error: float) -> str:
    """An error of rounding as the power of ten that it stays below: its digits differ from machine to machine."""
    return "0" if error == 0 else f"< 1e{math.floor(math.log10(error)) + 1}"


def share(part: float, whole: float) -> str:
    """A percentage with one decimal; a dash when there is nothing to take a share of."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def start_figure(columns: int = 1, *, width: float = 7.0, height: float = 2.9) -> tuple[Figure, list[Axes]]:
    """A figure with a row of axes, white behind them so that it reads on dark pages too."""
    check_matplotlib()
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    settings = {"svg.fonttype": "none", "svg.hashsalt": "theory", "font.size": 9, "font.family": "sans-serif"}
    plt.rcParams.update({**settings, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the SVG without a date, so that the same numbers give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
