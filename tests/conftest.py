"""Fixtures that several test folders use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiny_model import save_tiny_model

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real data that is not part of the project: $REGRETLESS_SHARED, else `shared` beside the project.

    Without it, the tests that read it are skipped; with CI set they fail, so that they cannot be lost unnoticed.
    """
    folder = Path(os.environ.get("REGRETLESS_SHARED") or PROJECT.parent / "shared")
    if not folder.is_dir():
        message = f"no shared data at {folder}; set REGRETLESS_SHARED to the folder that holds it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, to be read only; some test files have a `model` of their own."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))
