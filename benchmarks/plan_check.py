"""Predicted against taken time of each stage: `regretless plan --measure` of the quickstart, then its run.

    python benchmarks/plan_check.py                         # the quickstart, in a temporary folder
    python benchmarks/plan_check.py --json plan_check.json

Two plans are compared with the run: one before anything has run, and one when the pairs are there. Before the responses
are verified, nothing says how many pairs they give, and the time of what trains on them rests on an assumption. The
times taken are those of the manifests. On a busy machine they vary: the load is printed with them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
SPLIT = "pair"
"""The last stage before the second plan."""


def regretless(*arguments: str) -> str:
    """Standard output of a command."""
    command = [sys.executable, "-m", "regretless", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def plan(recipe: Path, folder: Path, *overrides: str) -> dict[str, Any]:
    """The plan of a recipe in a run folder, with measured times."""
    flags = ["--measure", "--json", "--output-dir", str(folder)]
    return dict(json.loads(regretless("plan", str(recipe), *overrides, *flags)))


def predicted(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each stage that is left to do."""
    return {row["stage"]: row["seconds"] for row in found["stages"] if row["state"] != "done" and row["seconds"]}


def taken(found: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that each finished stage took."""
    return {row["stage"]: row["taken"] for row in found["stages"] if row["taken"] is not None}


def main() -> None:
    """Plan, run, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=PROJECT / "recipes" / "quickstart.yaml")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("overrides", nargs="*", help="settings of the recipe, as key=value")
    arguments = parser.parse_args()
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        where = [*arguments.overrides, "--output-dir", str(folder)]
        first = plan(arguments.recipe, folder, *arguments.overrides)
        loads.append(os.getloadavg()[0])
        regretless("run", str(arguments.recipe), *where, "--until", SPLIT)
        second = plan(arguments.recipe, folder, *arguments.overrides)
        loads.append(os.getloadavg()[0])
        regretless("run", str(arguments.recipe), *where)
        loads.append(os.getloadavg()[0])
        after = json.loads(regretless("plan", str(arguments.recipe), *where, "--json"))
    before, known, seconds = predicted(first), predicted(second), taken(after)
    print(f"{'stage':<12}{'taken, s':>10}{'predicted ÷ taken: before':>28}{'with the pairs':>18}")
    for stage, value in seconds.items():
        cells = [f"{found[stage] / value:.2f}" if stage in found else "" for found in (before, known)]
        print(f"{stage:<12}{value:>10.1f}{cells[0]:>28}{cells[1]:>18}")
    print("load (1 minute) before each part and at the end:", ", ".join(f"{load:.1f}" for load in loads))
    if arguments.json is not None:
        numbers = {"taken": seconds, "predicted": before, "predicted_with_pairs": known, "loads": loads}
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
