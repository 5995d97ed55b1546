"""The notebooks of docs/notebooks: executed here, they print what is kept in them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest

PROJECT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(PROJECT.glob("docs/notebooks/*.ipynb"))
DIFFERS = re.compile(r"'[^']*'|\[[^\]]*\]|\b(correct|wrong|unknown)\b|-?[\d.]+")
"""Texts that models sampled, verdicts on them, and numbers: another processor rounds differently."""


def printed(notebook: Any) -> list[str]:
    """What each cell prints, without what differs between machines."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [DIFFERS.sub("…", "".join(output.get("text", "") for output in cell.outputs)) for cell in cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_when_executed_then_it_prints_what_it_keeps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "make notebooks executes it from the beginning"
    # The kernel imports the package of this checkout; the program sets these two variables for it.
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    executed = runpy.run_path(str(PROJECT / "docs" / "make_notebooks.py"))["execute"](path)
    assert printed(executed) == printed(kept) and any(printed(kept))


def test_notebooks_when_looked_for_then_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["dpo_to_repo", "quickstart"]
