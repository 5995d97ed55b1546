"""docs/theory.md shows what its commands print, and every figure that they write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
PAGE = PROJECT / "docs" / "theory.md"
COMMANDS = ("identities", "split", "masking", "estimator", "anchors", "gridworld", "decisions", "repo", "writers")
MARKS = {"repo": [pytest.mark.slow], "writers": [pytest.mark.slow, pytest.mark.extended]}
NUMBER = re.compile(r"\d+(?:\.(\d+))?")


def _same(printed: str, shown: str) -> bool:
    """Whether two lines differ at most in the last digits of their numbers, as two machines may."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    for one, other in zip(NUMBER.finditer(printed), NUMBER.finditer(shown), strict=True):
        unit = 10.0 ** -len(one[1] or "")
        if abs(float(one[0]) - float(other[0])) > max(2 * unit, 1e-3 * float(one[0])) * (1 + 1e-9):
            return False
    return True


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in COMMANDS])
def test_page_when_its_command_runs_shows_what_is_printed(name: str, tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    result = subprocess.run(
        [sys.executable, f"experiments/theory_{name}.py", "--figure", str(figure)],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "<svg" in figure.read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f"    python experiments/theory_{name}.py\n")[2].partition("    python ")[0]
    shown = section.splitlines()
    printed = [line.strip() for line in result.stdout.splitlines() if line.startswith("|")]
    assert len(printed) > 4
    assert [line for line in printed if not any(_same(line, other) for other in shown)] == []


def test_page_shows_every_command_with_its_figure() -> None:
    page = PAGE.read_text(encoding="utf-8")
    figures = PAGE.parent / "figures"
    assert set(re.findall(r"python experiments/theory_(\w+)\.py", page)) == set(COMMANDS)
    shown = set(re.findall(r"\(figures/(theory-\w+\.svg)\)", page))
    assert shown == {f"theory-{name}.svg" for name in COMMANDS} == {path.name for path in figures.glob("theory-*.svg")}
