"""A finished run in miniature."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from regretless.runs.pipeline import run_recipe
from small_runs import small


@pytest.fixture(scope="session")
def finished(session_folder: Path) -> Path:
    """Folder of a finished run of `small`, to be read only. The process that needs it first makes it for all."""
    folder = session_folder / "small" / "run"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # A second run would do no unit, but write the recipe again, while others copy the folder.
        if not os.fstat(file.fileno()).st_size:
            units = run_recipe(small(folder)).outcomes.keys()
            wanted = {"world", "pretrain/base", "sample", "train/dpo", "evaluate/repo/arithmetic/seed-41", "report"}
            assert wanted <= units
            file.write("done")
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, in another folder."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
