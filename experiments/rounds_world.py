"""What the experiments in the world of studies/rounds.yaml share: how they run the recipe, and their command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "rounds.yaml"
WORLD = [
    *("world.steps=[2,6]", "world.policies.base.gives_as_plus=0.58", "world.policies.base.forget_third=0.35"),
    "pretrain.base.max_length=192",
]
OUTSIDE = ["pretrain.base=null", "world=null"]
"""For runs whose world and base model another run has made."""
NEW_TOKENS = 96
ALWAYS = [
    *(f"sample.max_new_tokens={NEW_TOKENS}", "train.max_length=192", f"evaluate.max_new_tokens={NEW_TOKENS}"),
    *("inspect=null", "analyze=null", "report=null"),
]


def regretless(folder: Path, *settings: str) -> None:
    """Run the recipe into a folder; what is done there is not repeated."""
    command = [sys.executable, "-m", "regretless", "run", str(RECIPE), *ALWAYS, *settings, f"output_dir={folder}"]
    subprocess.run(command, check=True)


def commands(description: str | None) -> tuple[argparse.ArgumentParser, Any]:
    """The command line `run FOLDER --seeds N …` or `table`; further commands may be added to the second."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    added = parser.add_subparsers(dest="command", required=True)
    command = added.add_parser("run")
    command.add_argument("folder", type=Path)
    command.add_argument("--seeds", type=int, nargs="+", required=True)
    added.add_parser("table")
    return parser, added
