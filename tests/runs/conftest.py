"""A copy of a finished run in miniature."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, in another folder."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
