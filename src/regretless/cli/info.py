"""Tables that the command line prints about the package itself."""

from __future__ import annotations

import dataclasses
import json
import typing

import torch
import typer
from pydantic import TypeAdapter
from rich.table import Table

from regretless.core.errors import lookup
from regretless.core.setting_list import REQUIRED, Setting, settings_of, type_text
from regretless.core.terminal import terminal
from regretless.core.versions import versions
from regretless.objectives import OBJECTIVES
from regretless.runs.recipe import Recipe
from regretless.training.arguments import PreferenceConfig

TRAINING_NOTE = (
    "train also takes every argument of transformers' TrainingArguments (num_train_epochs, warmup_ratio, …) and the "
    "hyperparameters of its objectives (`regretless objectives`)."
)


def settings_of_stage(name: str) -> list[Setting]:
    """All settings of a section of a recipe. Raises ConfigError for an unknown one."""
    field = lookup("section", Recipe.model_fields, name)
    found = settings_of(field.rebuild_annotation(), name)
    if name not in ("train", "pretrain"):
        return found or [Setting(name, type_text({}), field.default, str(field.description))]
    place = name if name == "train" else f"{name}.NAME"
    hints = typing.get_type_hints(PreferenceConfig)
    own = [one for one in dataclasses.fields(PreferenceConfig) if one.name in PreferenceConfig.__annotations__]
    return found + [
        Setting(
            f"{place}.{one.name}",
            type_text(TypeAdapter(hints[one.name]).json_schema()),
            {} if one.default is dataclasses.MISSING else one.default,
            str(one.metadata["help"]),
        )
        for one in own
        if one.name not in ("objective", "remove_unused_columns")
    ]


def show_settings(name: str | None, *, as_json: bool = False) -> None:
    """Print the settings of a section, or of all sections, as a table or as JSON."""
    sections = {one: settings_of_stage(one) for one in ([name] if name else Recipe.model_fields)}
    if as_json:
        rows = [setting._asdict() for found in sections.values() for setting in found]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
        return
    output = terminal()
    for section, found in sections.items():
        table = Table("setting", "type", "default", "meaning", title=f"Settings: {section}", title_justify="left")
        for setting in found:
            default = setting.default if setting.default is REQUIRED else json.dumps(setting.default, default=str)
            table.add_row(setting.key.removeprefix(f"{section}."), setting.type, default, setting.meaning)
        output.print(table)
        if section in ("train", "pretrain"):
            output.print(TRAINING_NOTE)


def show_objectives() -> None:
    """Print every objective with its hyperparameters."""
    table = Table("objective", "hyperparameter", "type", "default", "meaning")
    objectives, problems = OBJECTIVES.usable()
    for name, kind in objectives.items():
        for row, (key, parameter) in enumerate(kind.hyperparameters().items()):
            meaning = parameter.description.replace("\n", " ")
            table.add_row(name if row == 0 else "", key, parameter.type, str(parameter.default), meaning)
        table.add_section()
    output = terminal()
    output.print(table)
    for problem in problems:
        output.print(problem, style="yellow", markup=False, soft_wrap=True)


def show_environment() -> None:
    """Print versions and hardware."""
    table = Table("what", "value", show_header=False)
    for name, version in versions().items():
        table.add_row(name, version)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    table.add_row(
        "accelerator", "none" if accelerator is None else f"{accelerator} × {torch.accelerator.device_count()}"
    )
    table.add_row("CPU threads", str(torch.get_num_threads()))
    terminal().print(table)
