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
MARGIN, HEAD, FOOT = 0.12, 0.34, 0.62
NAMES = {"reward": "reward", "long_horizon": "long-horizon term", "regret": "regret term"}

SHADE_QUANTILE = 0.98
"""Quantile of the sizes that gets the full shade: with the largest, a few extremes would leave all else pale."""

Line = list[tuple[str, int]]
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
    """Quantity that the color of a token shows."""
    normalized: bool = True
    """Whether to divide values by their root mean square over the response, so that models on different scales can be
    compared."""
    width: float = Field(default=7.0, ge=2, le=40)
    """Width of the figure in inches."""
    dpi: int = Field(default=200, ge=30, le=1200)
    """Resolution of png files in dots per inch."""


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
    scale = full_shade(config, content["pairs"])
    written = []
    for model in models:
        for response in pair["responses"]:
            values = _values(config, response, model)
            if values is None:
                raise DataError(
                    f"report.figures: pair {config.pair} lacks behavior log-probabilities and so {config.measure}; "
                    "set figures.measure=reward, or choose another pair"
                )
            title = f"{model}: {NAMES[config.measure]} of the {response['side']} response, pair {config.pair}"
            figure = _figure(config, response, values, scale, title)
            stem = re.sub(r"[^\w.-]", "_", f"pair-{config.pair}-{model}-{response['side']}")
            for kind in config.formats:
                path = output / f"{stem}.{kind}"
                with atomic_path(path) as temporary:
                    figure.savefig(temporary, format=kind, dpi=config.dpi)
                written.append(path)
    return written


def full_shade(config: FiguresConfig, pairs: Sequence[Mapping[str, Any]]) -> float:
    """Value of the full shade: 2 (× RMS) when normalized, else the 98th percentile of all tokens' sizes (nats).

    Of all pairs and models, so that colors compare between them; interpolated. 1 where there is nothing to scale by.
    The page has the same rule (`fullShade` in token_explorer.js) for what it shows.
    """
    if config.normalized:
        return 2.0
    sizes = [
        values
        for pair in pairs
        for response in pair["responses"]
        for model in response["policies"]
        if (values := _values(config, response, model)) is not None
    ]
    return float(np.quantile(np.abs(np.concatenate(sizes)), SHADE_QUANTILE)) or 1.0 if sizes else 1.0


def _values(config: FiguresConfig, response: Mapping[str, Any], model: str) -> NDArray[np.float64] | None:
    raw = response["policies"][model][config.measure]
    if raw is None:
        return None
    values = np.asarray(raw, dtype=np.float64)
    return values / (np.sqrt(np.mean(values**2)) or 1.0) if config.normalized else values


def wrap(texts: Sequence[str], columns: int) -> list[Line]:
    """Tokens as lines of at most `columns` characters, broken at line ends (which are drawn) and between tokens.

    A token longer than a line is broken inside.
    """
    lines: list[Line] = [[]]
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


def _figure(
    config: FiguresConfig, response: Mapping[str, Any], values: NDArray[np.float64], scale: float, title: str
) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    texts = [text or name for text, name in zip(response["tokens"], response["names"], strict=True)]
    lines = wrap(texts, int((config.width - 2 * MARGIN) / CHARACTER))
    height = HEAD + LINE * len(lines) + FOOT
    figure = Figure(figsize=(config.width, height))
    inches = figure.dpi_scale_trans
    colors = LinearSegmentedColormap.from_list("regret", [NEGATIVE, "#ffffff", POSITIVE])
    figure.text(MARGIN, height - MARGIN, title, transform=inches, va="top", size=FONT + 1.5, parse_math=False)
    for row, line in enumerate(lines):
        x, y = MARGIN, height - HEAD - LINE * (row + 1)
        for text, number in line:
            width = CHARACTER * len(text)
            color = colors((values[number] / scale + 1) / 2)
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
    bar = figure.add_axes((2 * MARGIN / config.width, 0.36 / height, 2.2 / config.width, 0.09 / height))
    bar.imshow(np.linspace(0, 1, 256)[None], aspect="auto", cmap=colors, extent=(-scale, scale, 0, 1))
    bar.set_yticks([])
    bar.tick_params(labelsize=FONT - 1, length=2, pad=2, width=0.5)
    for spine in bar.spines.values():
        spine.set_linewidth(0.5)
    unit = "multiples of the response's root mean square" if config.normalized else "nats"
    bar.set_xlabel(f"{NAMES[config.measure]} ({unit})", size=FONT - 0.5, labelpad=1)
    return figure
