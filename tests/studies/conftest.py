"""Real miniature runs: the quickstart with two training seeds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regretless.runs.pipeline import run_recipe
from small_runs import small


@pytest.fixture(scope="package")
def quickstarts(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run folders that share everything up to training, to be read only."""
    other = Path(shutil.copytree(finished, tmp_path_factory.mktemp("quickstart") / "run"))
    run_recipe(small(other, "train.seed=1"))
    return [finished, other]
