"""Tables that the command line prints about the package itself."""

from __future__ import annotations

from collections.abc import Collection

from rich.padding import Padding
from rich.text import Text

from regretless.cli.known import EVERY, declared_tables, sections, settings_from
from regretless.core import plugins
from regretless.core.errors import lookup
from regretless.core.setting_list import PLACEHOLDERS, REQUIRED, Group, Setting, grouped
from regretless.core.terminal import print_json, terminal

TRAINING_NOTE = (
    "Every argument of transformers' TrainingArguments (num_train_epochs, warmup_steps, …) is a setting too, and so is "
    "every hyperparameter of the objectives (`regretless objectives`)."
)


def notes_on(name: str, settings: list[Setting]) -> list[str]:
    """What the list of a section's settings leaves open."""
    parts = {part for setting in settings for part in setting.key.split(".")}
    notes = [f"{part} stands for {meaning}." for part, meaning in PLACEHOLDERS.items() if part in parts]
    return notes + [TRAINING_NOTE] * (name in ("train", "pretrain"))


def show_settings(name: str | None, *, as_json: bool = False, without: Collection[str] = ()) -> None:
    """Print the settings of a section, or of all sections, in groups or as JSON; `without` some, by their keys."""
    shown = sections() if name is None else {name: lookup("section", sections(), name)}
    rows = {key: [one for one in section["settings"] if one.key not in without] for key, section in shown.items()}
    if as_json:
        print_json([setting._asdict() for entries in rows.values() for setting in entries])
        return
    output = terminal()
    for section, entries in rows.items():
        output.print(Text(f"Settings of {section}", style="bold underline"))
        for note in notes_on(section, entries):
            output.print(note)
        for group in grouped(entries):
            _show_group(group, section)


def _show_group(group: Group, section: str) -> None:
    output = terminal()
    output.print()
    if inner := group.key.removeprefix(section).removeprefix("."):
        meaning = group.meaning or sections()[section]["meaning"]
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
    tables = declared_tables()["objectives"]
    added = plugins.offered("objectives")
    problems: list[str] = []
    if added if name is None else (name in added or name not in tables):
        from regretless.objectives import OBJECTIVES  # takes seconds

        found, problems = OBJECTIVES.usable() if name is None else ({name: OBJECTIVES.find(name)}, [])
        listed = {key: list(kind.hyperparameters().values()) for key, kind in found.items()}
    else:
        listed = {key: settings_from(tables[key]) for key in ([*tables][:-1] if name is None else [name])}
    listed[EVERY] = settings_from(tables[EVERY])
    output = terminal()
    if as_json:
        rows = {objective: [each._asdict() for each in parameters] for objective, parameters in listed.items()}
        print_json({"objectives": rows, "problems": problems})
        return
    for objective, hyperparameters in listed.items():
        output.print(Text(objective, style="bold underline"))
        for parameter in hyperparameters:
            head = Text.assemble((parameter.key, "bold"), f"  {parameter.type}; default: {parameter.default_text}")
            output.print(Padding(head, (0, 0, 0, 2)))
            output.print(Padding(parameter.meaning, (0, 0, 0, 8)))
        output.print()
    for problem in problems:
        output.print(problem, style="yellow", soft_wrap=True)
