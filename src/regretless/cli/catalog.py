"""`regretless recipes`: the recipes, studies and examples that come with the package, listed and copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.padding import Padding
from rich.text import Text

from regretless.core.bundled import KINDS, bundled, copy_files
from regretless.core.paths import refuse_urls
from regretless.core.terminal import console, print_json, terminal

COMMANDS = {
    "recipes": "regretless run NAME",
    "studies": "regretless study NAME",
    "examples": "regretless recipes --copy NAME",
}
"""What to do with each kind."""


def show_recipes(*, as_json: bool = False) -> None:
    """Print the names, each with what it is, by kind or as JSON."""
    output = terminal()
    listed = {kind: bundled(kind) for kind in KINDS}
    if as_json:
        rows = [
            {"kind": kind, "name": entry.name, "about": entry.about, "path": str(entry.path)}
            for kind, entries in listed.items()
            for entry in entries
        ]
        print_json(rows)
        return
    for kind, entries in listed.items():
        output.print(Text.assemble((f"{kind.capitalize()} ", "bold underline"), f"({COMMANDS[kind]})"))
        for entry in entries:
            output.print(Padding(Text(entry.name, style="bold"), (0, 0, 0, 2)))
            output.print(Padding(entry.about, (0, 0, 0, 6)))
        output.print()
    output.print("To change one, copy it with the files that it builds on: regretless recipes --copy NAME")


def copy_recipes(names: Sequence[str], folder: Path) -> None:
    """Copy files by name to a folder and say what was written. Raises ConfigError as `copy_files` does."""
    refuse_urls({"--output": folder})
    for path in copy_files(names, folder):
        console.print(f"recipes: wrote {path}", soft_wrap=True)
