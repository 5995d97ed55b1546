"""What the command line knows of stages, settings and objectives. Light to import: a shell's completion needs it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from regretless.core import plugins
from regretless.core.setting_list import Setting

JSON_TYPES = ("string", "number", "integer", "boolean", "section", "mapping", "any")
EVERY = "(all)"
"""Stands for the objectives where hyperparameters are listed that all of them have."""


@cache
def sections() -> dict[str, dict[str, Any]]:
    """The sections of a recipe by name: `meaning`, and `settings`."""
    tables = declared_tables()["sections"]
    return {name: {**one, "settings": settings_from(one["settings"])} for name, one in tables.items()}


def stages() -> dict[str, dict[str, Any]]:
    """The stages by name, in their order: of each `about`, `flags` and `result` (`runs.stages.Stage`)."""
    tables: dict[str, dict[str, Any]] = declared_tables()["stages"]
    return tables


def objective_names() -> list[str]:
    """Names of the objectives, those of installed packages included, without importing any."""
    names = dict.fromkeys([*declared_tables()["objectives"], *plugins.offered("objectives")])
    return [name for name in names if name != EVERY]


def values_of(section: str | None) -> dict[str, list[str]]:
    """Settings of a section by key, or of all with the section in front, each with the values that have names."""
    listed = [one for name, group in sections().items() if section in (None, name) for one in group["settings"]]
    return {
        one.key if section is None else one.key.removeprefix(f"{section}."): objective_names()
        if one.key in ("train.objective", "inspect.objectives")
        else [value for value in one.type.split(" or ") if " " not in value and value not in JSON_TYPES]
        for one in listed
    }


@cache
def declared_tables() -> Any:
    """What `regretless.cli.declared` wrote when the package was made: reading it takes neither torch nor pydantic."""
    return json.loads(Path(__file__).with_name("declared.json").read_bytes())


def settings_from(rows: Iterable[dict[str, Any]]) -> list[Setting]:
    """Rows of the tables as settings."""
    return [Setting(**row) for row in rows]
