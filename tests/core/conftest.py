"""The example plug-in, installed for other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def regretless(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command line in a process that finds the example plug-in installed."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    source = tmp_path_factory.mktemp("source") / "plugin"
    # Building leaves files beside the sources.
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "regretless", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run
