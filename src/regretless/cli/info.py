"""Tables that the command line prints about the package itself."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection

from pydantic import TypeAdapter
from rich.padding import Padding
from rich.text import Text

from regretless.core.errors import lookup
from regretless.core.setting_list import PLACEHOLDERS, REQUIRED, Group, Setting, grouped, settings_of, type_text
from regretless.core.terminal import print_json, terminal
from regretless.objectives import OBJECTIVES, Objective
from regretless.runs.recipe import Recipe
from regretless.training.arguments import NOT_IN_RECIPES, PreferenceConfig

TRAINING_NOTE = (
    "Every argument of transformers' TrainingArguments (num_train_epochs, warmup_steps, …) is a setting too, and so is "
    "every hyperparameter of the objectives (`regretless objectives`)."
)


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


def notes_on(name: str, settings: list[Setting]) -> list[str]:
    """What the list of a section's settings leaves open."""
    parts = {part for setting in settings for part in setting.key.split(".")}
    notes = [f"{part} stands for {meaning}." for part, meaning in PLACEHOLDERS.items() if part in parts]
    return notes + [TRAINING_NOTE] * (name in ("train", "pretrain"))


def show_settings(name: str | None, *, as_json: bool = False, without: Collection[str] = ()) -> None:
    """Print the settings of a section, or of all sections, in groups or as JSON; `without` some, by their keys."""
    sections = {
        section: [setting for setting in settings_of_stage(section) if setting.key not in without]
        for section in ([name] if name else Recipe.model_fields)
    }
    if as_json:
        rows = [setting._asdict() for entries in sections.values() for setting in entries]
        print_json(rows)
        return
    output = terminal()
    for section, entries in sections.items():
        output.print(Text(f"Settings of {section}", style="bold underline"))
        for note in notes_on(section, entries):
            output.print(note)
        for group in grouped(entries):
            _show_group(group, section)


def _show_group(group: Group, section: str) -> None:
    output = terminal()
    output.print()
    if inner := group.key.removeprefix(section).removeprefix("."):
        meaning = group.meaning or str(Recipe.model_fields[section].description)
        output.print(Text.assemble((f"{inner}: ", "bold"), meaning))
        output.print()
    for setting in group.settings:
        key = setting.key.removeprefix(f"{section}.")
        default = REQUIRED if setting.default == REQUIRED else f"default: {setting.default_text}"
        head = Text.assemble((key, "bold"), f"  {setting.type}; {default}")
        output.print(Padding(head, (0, 0, 0, 2)))
        output.print(Padding(setting.meaning, (0, 0, 0, 8)))


def show_objectives(name: str | None = None, *, as_json: bool = False) -> None:
    """Print every objective, or one, with its hyperparameters, then those that all of them have.

    Raises ConfigError for an objective that is not known.
    """
    objectives, problems = OBJECTIVES.usable()
    if name is not None:
        objectives, problems = {name: OBJECTIVES.find(name)}, []
    listed = {key: kind.hyperparameters() for key, kind in objectives.items()} | {"(all)": Objective.modifiers()}
    output = terminal()
    if as_json:
        rows = {objective: [each._asdict() for each in parameters.values()] for objective, parameters in listed.items()}
        print_json({"objectives": rows, "problems": problems})
        return
    for objective, hyperparameters in listed.items():
        output.print(Text(objective, style="bold underline"))
        for key, parameter in hyperparameters.items():
            head = Text.assemble((key, "bold"), f"  {parameter.type}; default: {parameter.default_text}")
            output.print(Padding(head, (0, 0, 0, 2)))
            output.print(Padding(parameter.meaning, (0, 0, 0, 8)))
        output.print()
    for problem in problems:
        output.print(problem, style="yellow", soft_wrap=True)
