"""The quickstart in miniature with two methods, for tests of whole runs. Not a test by itself."""

from __future__ import annotations

import json
from pathlib import Path

from regretless.runs.miniature import smoke_recipe
from regretless.runs.recipe import Recipe, load_recipe

QUICKSTART = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
METHODS = ["train.objective=[dpo,repo]", "evaluate.seeds=[41]", "pretrain.base.save_strategy=steps"]
STEPS = [
    *("pretrain.base.save_steps=20", "pretrain.base.logging_steps=15"),
    *("train.max_steps=-1", "train.num_train_epochs=2", "train.save_steps=1", "train.pairs_per_step=8"),
]
"""Set in the miniature, which has other steps than the recipe."""


def small(folder: Path, *overrides: str) -> Recipe:
    """The recipe that runs in `folder`; the overrides hold for the miniature. Its file lies beside the folder."""
    values = smoke_recipe(load_recipe(QUICKSTART, METHODS)).model_dump(exclude_unset=True)
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(json.dumps({**values, "output_dir": str(folder)}))  # JSON is YAML
    return load_recipe(path, [*STEPS, *overrides])
