"""The example plug-in, installed for other processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forked

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of packages with the example plug-in installed in it."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    source = tmp_path_factory.mktemp("source") / "plugin"
    # Building leaves files beside the sources.
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return str(target)


@pytest.fixture(scope="session")
def regretless(site: str, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command line in a process that finds the example plug-in installed."""
    logs = tmp_path_factory.mktemp("logs")
    numbers = itertools.count()
    return lambda *arguments: forked.regretless(*arguments, log=logs / str(next(numbers)), paths=(site,))
