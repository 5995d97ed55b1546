"""Which stages of a run folder were done with the settings of its recipe.yaml, which is written before any work.

After a partial or interrupted run with other settings, results of earlier ones are still there. Nobody may read them
as results of this recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import fingerprint, read_json, write_json
from regretless.core.yaml_settings import load_text, read_yaml
from regretless.runs.stages.stage import STAGES
from regretless.workflow.run_folder import RECIPE, is_part_of_a_run
from regretless.workflow.stage_folder import MANIFEST

FILE = "stages.json"
"""A hash of the recipe's settings, and the stages that are not done with them. A run of an earlier version has none."""
NO_MATTER = {
    *("name", "output_dir", "cluster", "parallel", "threads"),
    *(name for name, stage in STAGES.items() if not stage.makes_numbers),
}
"""Sections of a recipe that no result depends on."""
DESCRIBING = {name for name, stage in STAGES.items() if not stage.is_read}
"""Stages that no other stage depends on."""


def check_ours(run: Path) -> None:
    """Raise ConfigError for a folder with a recipe.yaml or stages.json that no run has written, and would replace."""
    if (run / FILE).exists():
        _read(run / FILE)
    elif (run / RECIPE).exists() and not any(is_part_of_a_run(run / stage.place) for stage in STAGES.values()):
        raise ConfigError(f"{run / RECIPE}: not written by a run; choose another output folder, or move it away")


def begin(run: Path, recipe: str, stages: Sequence[str]) -> None:
    """Note that a run of these stages begins, before its recipe.yaml with this text is written."""
    settings, file = _settings(load_text(recipe)), run / FILE
    if file.is_file():
        is_same = _read(file)["settings"] == settings
    else:
        is_same = (run / RECIPE).is_file() and _settings(read_yaml(run / RECIPE)) == settings
    if not is_same:
        write_json(file, {"settings": settings, "left": _with_numbers(stages)})


def end(run: Path, stage: str, stages: Sequence[str], *, ran: bool) -> None:
    """Note that a stage is done; if it was not before, or has done anything anew, those behind it no longer are."""
    file, order = run / FILE, _with_numbers(stages)
    record = _read(file) if file.is_file() else {"settings": _settings(read_yaml(run / RECIPE)), "left": []}
    if stage in order and (ran or stage in record["left"]):
        behind = order[order.index(stage) + 1 :]
        left = [name for name in order if name != stage and (name in record["left"] or name in behind)]
        write_json(file, {**record, "left": left})


def of_other_settings(run: Path) -> list[str]:
    """Stages with results in a run folder that are not results of its recipe.yaml."""
    if not ((run / FILE).is_file() and (run / RECIPE).is_file()):
        return []
    record, recipe = _read(run / FILE), read_yaml(run / RECIPE)
    is_same = record["settings"] == _settings(recipe)
    left = record["left"] if is_same else _with_numbers([name for name in STAGES if recipe.get(name) is not None])
    return [name for name in left if name in STAGES and any((run / STAGES[name].place).rglob(MANIFEST))]


def _read(file: Path) -> dict[str, Any]:
    advice = f"{file}: not written by a run, or damaged; choose another output folder, or move the file away"
    try:
        record = read_json(file)
    except DataError as error:
        raise ConfigError(advice) from error
    if not (isinstance(record, dict) and isinstance(record.get("left"), list) and "settings" in record):
        raise ConfigError(advice)
    return record


def _settings(recipe: Mapping[str, Any]) -> str:
    return fingerprint({name: value for name, value in recipe.items() if name not in NO_MATTER | DESCRIBING})


def _with_numbers(stages: Sequence[str]) -> list[str]:
    return [name for name in stages if STAGES[name].makes_numbers]
