"""The run that the report's tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import build_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder with every stage done; some of its model texts are HTML."""
    return build_run(tmp_path_factory.mktemp("runs") / "quickstart")
