"""Real miniature runs: the quickstart with two training seeds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from regretless.runs.miniature import smoke_recipe
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import load_recipe

PROJECT = Path(__file__).resolve().parents[2]
SHRUNK = ["train.max_steps=-1", "train.num_train_epochs=2", "train.pairs_per_step=8"]


@pytest.fixture(scope="package")
def quickstarts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run folders that share everything up to training, to be read only."""
    folder = tmp_path_factory.mktemp("quickstarts")
    recipe = load_recipe(
        PROJECT / "recipes" / "quickstart.yaml", ["train.objective=[dpo,repo]", "evaluate.seeds=[41,42]"]
    )
    values = smoke_recipe(recipe).model_dump(exclude_unset=True)
    runs = []
    for seed in range(2):
        run = folder / f"seed-{seed}"
        if runs:
            shutil.copytree(runs[0], run)
        path = folder / "recipe.yaml"
        path.write_text(json.dumps({**values, "output_dir": str(run)}))  # JSON is YAML
        run_recipe(load_recipe(path, [*SHRUNK, f"train.seed={seed}"]))
        runs.append(run)
    return runs
