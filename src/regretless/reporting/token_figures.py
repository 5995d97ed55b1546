"""Shaded responses as image files for a paper: one per model and side, like Figures 6 to 11 of arXiv:2606.09124."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from regretless.core.errors import ConfigError, DataError, lookup
from regretless.core.files import atomic_path
from regretless.core.settings import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEGATIVE, POSITIVE = "#f0933f", "#5ba3e6"
"""Ends of the page's color scale: orange and blue differ for all common kinds of color blindness."""
FONT = 7.5
CHARACTER, LINE = 0.602 * FONT / 72, 1.55 * FONT / 72
"""Inches: width of a character of matplotlib's fixed-width font, and line spacing."""
WIDTH, MARGIN, HEAD, FOOT = 7.0, 0.12, 0.34, 0.62
DOTS_PER_INCH = 200
FULL_SHADE = 2.0
"""Value of the full shade, in multiples of the response's root mean square; the page has the same."""
MEASURE_NAMES = {"reward": "reward", "long_horizon": "long-horizon term", "regret": "regret term"}

TokenLine = list[tuple[str, int]]
"""Pieces of text, each with the index of its token."""


class FiguresConfig(Section):
    """Figures of one pair's responses, token by token."""

    formats: list[Literal["png", "pdf", "svg"]] = Field(default=["png", "pdf"], min_length=1)
    """File formats to write."""
    pair: int = Field(default=1, ge=1)
    """Number of the pair to draw, as shown in the regret explorer."""
    models: list[str] | None = None
    """Models to draw; all that were analyzed by default."""
    measure: Literal["reward", "long_horizon", "regret"] = "reward"
    """Quantity that the color of a token shows, divided by its root mean square over the response."""


def draw(config: FiguresConfig, content: Mapping[str, Any], output: Path) -> list[Path]:
    """Write `output`/pair-<n>-<model>-<side>.<format> from the content of token_rewards.json; returns the paths.

    Raises ConfigError for a pair or model that was not analyzed and without matplotlib, DataError if the measure is
    unknown for this pair.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("report.figures: needs matplotlib; pip install 'regretless[figures]'") from error
    if config.pair > len(content["pairs"]):
        raise ConfigError(f"report.figures.pair: {config.pair} of {len(content['pairs'])} analyzed pairs")
    pair = content["pairs"][config.pair - 1]
    models = list(content["policies"]) if config.models is None else config.models
    for model in models:
        lookup("report.figures.models", content["policies"], model)
    written = []
    for model in models:
        for response in pair["responses"]:
            raw = response["policies"][model][config.measure]
            if raw is None:
                raise DataError(
                    f"report.figures: pair {config.pair} lacks behavior log-probabilities and so {config.measure}; "
                    "set figures.measure=reward, or choose another pair"
                )
            title = f"{model}: {MEASURE_NAMES[config.measure]} of the {response['side']} response, pair {config.pair}"
            values = np.asarray(raw, dtype=np.float64)
            values /= np.sqrt(np.mean(values**2)) or 1.0
            figure = _figure(response, values, title, MEASURE_NAMES[config.measure])
            stem = re.sub(r"[^\w.-]", "_", f"pair-{config.pair}-{model}-{response['side']}")
            for kind in config.formats:
                path = output / f"{stem}.{kind}"
                with atomic_path(path) as temporary:
                    figure.savefig(temporary, format=kind, dpi=DOTS_PER_INCH)
                written.append(path)
    return written


def wrap(texts: Sequence[str], columns: int) -> list[TokenLine]:
    """Tokens as lines of at most `columns` characters, broken at line ends (which are drawn) and between tokens.

    A token longer than a line is broken inside.
    """
    lines: list[TokenLine] = [[]]
    used = 0
    for number, text in enumerate(texts):
        for position, part in enumerate(text.replace("\n", "↵\n").replace("\t", "⇥").split("\n")):
            pieces = [part[start : start + columns] for start in range(0, len(part), columns)]
            if position:
                lines.append([])
                used = 0
            for piece in pieces:
                if used + len(piece) > columns:
                    lines.append([])
                    used = 0
                lines[-1].append((piece, number))
                used += len(piece)
    return lines


def _figure(response: Mapping[str, Any], values: NDArray[np.float64], title: str, measure: str) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    texts = [text or name for text, name in zip(response["tokens"], response["names"], strict=True)]
    lines = wrap(texts, int((WIDTH - 2 * MARGIN) / CHARACTER))
    height = HEAD + LINE * len(lines) + FOOT
    figure = Figure(figsize=(WIDTH, height))
    inches = figure.dpi_scale_trans
    colors = LinearSegmentedColormap.from_list("regret", [NEGATIVE, "#ffffff", POSITIVE])
    figure.text(MARGIN, height - MARGIN, title, transform=inches, va="top", size=FONT + 1.5, parse_math=False)
    for row, line in enumerate(lines):
        x, y = MARGIN, height - HEAD - LINE * (row + 1)
        for text, number in line:
            width = CHARACTER * len(text)
            color = colors((values[number] / FULL_SHADE + 1) / 2)
            figure.add_artist(Rectangle((x, y), width, LINE, transform=inches, facecolor=color, linewidth=0))
            # A dollar sign is text here, not mathematics.
            figure.text(
                x,
                y + 0.3 * LINE,
                text,
                transform=inches,
                family="DejaVu Sans Mono",
                size=FONT,
                parse_math=False,
                color="#1c1c1b" if response["tokens"][number] else "#77756f",
            )
            x += width
    bar = figure.add_axes((2 * MARGIN / WIDTH, 0.36 / height, 2.2 / WIDTH, 0.09 / height))
    bar.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=colors, extent=(-FULL_SHADE, FULL_SHADE, 0, 1))
    bar.set_yticks([])
    bar.tick_params(labelsize=FONT - 1, length=2, pad=2, width=0.5)
    for spine in bar.spines.values():
        spine.set_linewidth(0.5)
    bar.set_xlabel(f"{measure} (multiples of the response's root mean square)", size=FONT - 0.5, labelpad=1)
    return figure
