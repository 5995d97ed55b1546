"""Colors of the regret explorer: whether everybody can tell them apart, and read the text on them."""

from __future__ import annotations

import re
from importlib import resources

import numpy as np
import pytest
from numpy.typing import NDArray

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
