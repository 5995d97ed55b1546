"""Figures of shaded responses: what is drawn where, and whether everybody can tell the colors apart."""

from __future__ import annotations

import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.reporting.report import ReportConfig, run
from regretless.reporting.token_figures import (
    CHARACTER,
    DOTS_PER_INCH,
    HEAD,
    LINE,
    MARGIN,
    NEGATIVE,
    POSITIVE,
    FiguresConfig,
    draw,
    wrap,
)

# The made-up texts have characters that matplotlib's font lacks.
pytestmark = pytest.mark.filterwarnings("ignore:Glyph")


@pytest.fixture(scope="module")
def content(finished_run: Path) -> dict[str, Any]:
    """What the analysis wrote."""
    return dict(json.loads((finished_run / "analyze" / "token_rewards.json").read_text()))


def test_wrap_when_lines_end_or_are_full_then_every_character_keeps_its_token() -> None:
    assert wrap(["ab", "c\nd", "efg", "hijklm", "\n\n"], 4) == [
        [("ab", 0), ("c↵", 1)],
        [("d", 1), ("efg", 2)],
        [("hijk", 3)],
        [("lm", 3), ("↵", 4)],
        [("↵", 4)],
        [],
    ]


def test_figures_when_drawn_then_each_token_stands_on_the_color_of_its_value(
    content: dict[str, Any], tmp_path: Path
) -> None:
    config = FiguresConfig(formats=["png", "pdf"], models=["dpo", "repo"], measure="regret")
    paths = draw(config, content, tmp_path)
    names = [
        f"pair-1-{model}-{side}.{kind}"
        for model in ("dpo", "repo")
        for side in ("chosen", "rejected")
        for kind in ("png", "pdf")
    ]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert paths[1].read_bytes().startswith(b"%PDF")

    response = content["pairs"][0]["responses"][0]
    values = np.array(response["policies"]["dpo"]["regret"])
    shares = np.clip(values / np.sqrt(np.mean(values**2)) / 2, -1, 1)
    image = imread(paths[0])
    first_line = response["tokens"].index("\n")
    for place in range(first_line):
        x = int(DOTS_PER_INCH * (MARGIN + CHARACTER * (place + 0.5)))
        y = int(DOTS_PER_INCH * (HEAD + LINE)) - 4  # below the letters
        end = NEGATIVE if shares[place] < 0 else POSITIVE
        expected = 1 + abs(shares[place]) * (rgb(end) - 1)
        assert image[y, x, :3] == pytest.approx(expected, abs=0.02), place


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"pair": 4}, ConfigError, r"figures\.pair: 4 of 3 analyzed pairs"),
        ({"models": ["ipo"]}, ConfigError, "expected one of dpo, repo, repo_det"),
        ({"pair": 2, "measure": "regret"}, DataError, "pair 2 lacks behavior log-probabilities"),
    ],
)
def test_figures_when_they_cannot_be_drawn_then_the_error_says_why(
    content: dict[str, Any], tmp_path: Path, settings: dict[str, Any], error: type[RegretlessError], message: str
) -> None:
    with pytest.raises(error, match=message):
        draw(FiguresConfig(**settings), content, tmp_path)
    assert not list(tmp_path.iterdir())


def test_figures_when_matplotlib_is_missing_then_the_error_says_what_to_install(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'regretless\[figures\]'"):
        draw(FiguresConfig(), content, tmp_path)


def test_report_when_figures_are_asked_for_then_they_lie_beside_the_page(finished_run: Path, tmp_path: Path) -> None:
    settings = {"figures": {"formats": ["svg"], "models": ["repo"]}}
    assert run(ReportConfig.parse(settings, "report"), finished_run, tmp_path)["figures"] == 2
    assert (tmp_path / "figures" / "pair-1-repo-rejected.svg").read_text().lstrip().startswith("<?xml")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no token rewards"):
        run(ReportConfig.parse(settings, "report"), tmp_path / "empty", tmp_path)


# --- colors ---------------------------------------------------------------------------------------------------------

DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""How linear RGB is seen (Machado, Oliveira and Fernandes 2009, full severity)."""
SHADES = ("positive", "negative", "card", "ink")


def rgb(color: str) -> NDArray[np.float64]:
    return np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255


def linear(color: str) -> NDArray[np.float64]:
    values = rgb(color)
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(light: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* of linear RGB, white point D65."""
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    x, y, z = np.cbrt(to_xyz @ np.clip(light, 0, 1) / (to_xyz @ np.ones(3)))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def themes() -> list[dict[str, str]]:
    """Colors of the page, light and dark."""
    style = resources.files("regretless.reporting").joinpath("templates", "report.css").read_text(encoding="utf-8")
    found = [
        dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(found) == 2 and all(set(SHADES) <= theme.keys() for theme in found)
    return found


def test_colors_when_drawn_in_files_then_they_are_those_of_the_page() -> None:
    assert (themes()[0]["negative"], themes()[0]["positive"]) == (NEGATIVE, POSITIVE)


@pytest.mark.parametrize("seen_by", [None, *DEFICIENCIES])
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_when_seen_with_a_color_vision_deficiency_then_below_none_and_above_differ(
    theme: int, seen_by: str | None
) -> None:
    colors = themes()[theme]
    eye = np.array(DEFICIENCIES[seen_by]) if seen_by else np.eye(3)
    assert eye.sum(axis=1) == pytest.approx(1, abs=1e-5)
    below, none, above = (lab(eye @ linear(colors[name])) for name in ("negative", "card", "positive"))
    # A difference of 2 to 3 is just noticeable.
    for one, other in ((below, above), (below, none), (above, none)):
        assert np.linalg.norm(one - other) > 20


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_when_on_the_full_shade_then_it_has_the_contrast_that_wcag_asks_for(theme: int) -> None:
    def luminance(color: str) -> float:
        return float(np.dot([0.2126, 0.7152, 0.0722], linear(color)))

    ink = luminance(themes()[theme]["ink"])
    for name in ("positive", "negative"):
        dark, light = sorted([ink, luminance(themes()[theme][name])])
        assert (light + 0.05) / (dark + 0.05) >= 4.5
