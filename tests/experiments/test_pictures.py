"""docs/regret.md and docs/grouping.md show what experiments/pictures.py prints and draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
# Pictures that other scripts draw: experiments/theory.py and, from hours of rollouts, experiments/world_regret.py.
OTHERS = {"theory-gridworld.svg", "world-regret.svg"}


def test_pages_when_the_script_is_run_then_they_show_its_tables_and_pictures(tmp_path: Path) -> None:
    command = [sys.executable, "experiments/pictures.py", "--figures", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    pages = "".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("regret", "grouping"))
    tables = re.findall(r"(?:^\|.*\n)+", done.stdout, re.MULTILINE)
    assert len(tables) == 3 and not [table for table in tables if table not in pages]
    drawn = {file.name for file in tmp_path.iterdir()}
    shown = set(re.findall(r"\(figures/([\w-]+\.svg)\)", pages)) - OTHERS
    kept = {file.name for kind in ("regret", "grouping") for file in (DOCS / "figures").glob(f"{kind}-*.svg")}
    assert drawn == shown == kept and len(drawn) == 4
    assert all("<svg" in (tmp_path / name).read_text(encoding="utf-8") for name in drawn)
