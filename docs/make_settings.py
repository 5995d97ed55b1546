"""Writes the pages of docs/settings, and the file that commands print: every setting, from where it is declared.

python docs/make_settings.py
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from regretless.cli.declared import declared, settings_of_stage
from regretless.cli.info import notes_on
from regretless.core.setting_list import Setting, grouped, settings_of
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES
from regretless.studies.study import StudyConfig

FOLDER = Path(__file__).parent / "settings"
PRINTED = Path(__file__).parents[1] / "src" / "regretless" / "cli" / "declared.json"
COMMAND = "python docs/make_settings.py"
METHODS = "The hyperparameters are explained on the pages of the [methods](../README.md#methods)."
WIDTH = 100


def pages() -> dict[str, str]:
    """The text of every page by the name of its file: one a section, and one of the settings that have no section."""
    sections = {name: settings_of_stage(name) for name in Recipe.model_fields}
    single = [found[0] for name, found in sections.items() if [one.key for one in found] == [name]]
    texts = {"recipe.md": _whole_run(single), "study.md": _study()}
    for name, found in sections.items():
        if found[0] not in single:
            texts[f"{name}.md"] = _section(name, found)
    return {file: "\n".join(lines) + "\n" for file, lines in texts.items()}


def _whole_run(settings: Iterable[Setting]) -> list[str]:
    about = "They stand at the top of a recipe; `regretless run RECIPE` also takes them as `KEY=VALUE`."
    return ["# Settings of a whole run", "", *_prose(about), "", *_prose(_origin("")), "", *_table(settings, "")]


def _study() -> list[str]:
    about = "They stand at the top of a study file, for `regretless study` ([studies](../studies.md))."
    lines = ["# Settings of a study", "", *_prose(about), "", f"`{COMMAND}` writes this page.", ""]
    for group in grouped(settings_of(StudyConfig)):
        if group.key:
            lines += [f"## `{group.key}`", "", *_prose(group.meaning), ""]
        lines += [*_table(group.settings, ""), ""]
    return lines[:-1]


def _section(name: str, settings: list[Setting]) -> list[str]:
    about = str(Recipe.model_fields[name].description)
    where = f"They stand under `{name}:` in a recipe; `regretless run RECIPE` also takes them as `{name}.KEY=VALUE`"
    where += f", and `regretless {name}` as `KEY=VALUE`." if name in STAGES and STAGES[name].about else "."
    lines = [f"# Settings of `{name}`", ""]
    methods = [METHODS] * (name in ("train", "pretrain"))
    for paragraph in (about, where, *notes_on(name, settings), *methods, _origin(f" {name}")):
        lines += [*_prose(paragraph), ""]
    for group in grouped(settings):
        if inner := group.key.removeprefix(name).removeprefix("."):
            lines += [f"## `{inner}`", "", *(_prose(group.meaning) if group.meaning else _prose(about)), ""]
        lines += [*_table(group.settings, f"{name}."), ""]
    return lines[:-1]


def _origin(section: str) -> str:
    return f"`{COMMAND}` writes this page; `regretless settings{section}` prints the same."


def _prose(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(settings: Iterable[Setting], prefix: str) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for one in settings:
        cells = (f"`{one.key.removeprefix(prefix)}`", one.type, one.default_text, one.meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """Write the pages and the file, and remove those of sections that are no more."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for page in FOLDER.glob("*.md"):
        if page.name not in texts:
            page.unlink()
    PRINTED.write_text(declared(), encoding="utf-8")
    for file, text in texts.items():
        (FOLDER / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
