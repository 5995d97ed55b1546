"""A finished run in miniature."""

from __future__ import annotations

import fcntl
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
    with (folder.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        units = run_recipe(small(folder)).outcomes.keys()
    assert {"world", "pretrain/base", "sample", "train/dpo", "evaluate/repo/arithmetic/seed-41", "report"} <= units
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, in another folder."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
