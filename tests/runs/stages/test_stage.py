"""The interface of stages: light to import, in the recipe's order."""

from __future__ import annotations

import subprocess
import sys

from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES


def test_stages_when_imported_then_no_heavy_package_comes_along() -> None:
    heavy = {"torch", "transformers", "peft", "pyarrow"}
    code = f"import sys, regretless.runs.stages; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_stages_when_listed_then_each_is_a_section_of_recipes_in_their_order() -> None:
    sections = [name for name in Recipe.model_fields if name in STAGES]
    assert sections == list(STAGES) and all(name == stage.name for name, stage in STAGES.items())
