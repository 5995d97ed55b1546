"""Settings and objectives as their classes declare them, and the file of both that commands print without torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from regretless.cli.known import EVERY
from regretless.core.errors import lookup
from regretless.core.setting_list import REQUIRED, Setting, settings_of, type_text
from regretless.objectives import OBJECTIVES, Objective
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES
from regretless.training.arguments import NOT_IN_RECIPES, PreferenceConfig


def settings_of_stage(name: str) -> list[Setting]:
    """All settings of a section of a recipe. Raises ConfigError for an unknown one."""
    field = lookup("section", Recipe.model_fields, name)
    annotation = field.rebuild_annotation()
    rows = settings_of(annotation, name)
    if name not in ("train", "pretrain"):
        default = REQUIRED if field.is_required() else field.default
        kind = type_text(TypeAdapter(annotation).json_schema())
        return rows or [Setting(name, kind, default, " ".join(str(field.description).split()))]
    prefix = name if name == "train" else f"{name}.NAME"
    hints = typing.get_type_hints(PreferenceConfig)
    arguments = [
        field for field in dataclasses.fields(PreferenceConfig) if field.name in PreferenceConfig.__annotations__
    ]
    return rows + [
        Setting(
            f"{prefix}.{argument.name}",
            type_text(TypeAdapter(hints[argument.name]).json_schema()),
            argument.default,
            str(argument.metadata["help"]),
        )
        for argument in arguments
        if argument.name not in ("objective", "remove_unused_columns", *NOT_IN_RECIPES)
    ]


def declared() -> str:
    """The text of `declared.json`: sections and this package's objectives with their settings, stages as commands.

    `docs/make_settings.py` writes the file.
    """
    sections = {
        name: {"meaning": str(field.description), "settings": _rows(settings_of_stage(name))}
        for name, field in Recipe.model_fields.items()
    }
    kinds = {name: OBJECTIVES[name].hyperparameters() for name in OBJECTIVES if name in OBJECTIVES.own}
    objectives = {name: _rows(of_one.values()) for name, of_one in [*kinds.items(), (EVERY, Objective.modifiers())]}
    stages = {name: {"about": one.about, "flags": one.flags, "result": one.result} for name, one in STAGES.items()}
    tables = {"stages": stages, "sections": sections, "objectives": objectives}
    return json.dumps(tables, indent=1, ensure_ascii=False, default=str) + "\n"


def _rows(settings: Iterable[Setting]) -> list[dict[str, Any]]:
    return [setting._asdict() for setting in settings]
