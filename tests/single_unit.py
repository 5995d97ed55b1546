"""A unit of work by itself, as tests of run folders do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regretless.workflow.run_folder import Outcome, RunFolder, Unit


def do_unit(
    folder: RunFolder,
    name: str,
    settings: Mapping[str, Any],
    work: Callable[[Path], dict[str, Any]],
    inputs: Mapping[str, Path] | None = None,
    label: str = "",
    keeps: Sequence[str] = (),
) -> Outcome:
    """Run `work` on the folder `name` unless it is finished with the same settings and inputs."""
    unit = Unit(name, settings, inputs or {}, label, tuple(keeps))
    return folder.do_together([unit], lambda todo: [work(path) for path in todo.values()])[0]
