"""Writes docs/api.md: every public name with its signature, its meaning, its fields and methods, read from the source.

python docs/make_api.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import regretless

PAGE = Path(__file__).parent / "api.md"
COMMAND = "python docs/make_api.py"
WIDTH = 100
GROUPS = {
    "Training": ("PreferenceTrainer", "PreferenceConfig"),
    "Objectives": ("Objective", "Logps", "Output", "build"),
    "Your own loop": ("check_grouped", "lay_out", "grouped", "response_scores"),
    "Token by token": ("score_responses", "token_table"),
    "Rows": (
        *("Response", "Pair", "Side", "Verdict", "Refusal"),
        *("read_responses", "read_pairs", "parse_pairs", "write_records"),
    ),
    "Settings and runs": ("ModelConfig", "PromptSource", "Recipe", "load_recipe", "parse_recipe", "run_recipe"),
    "Errors": (
        *("RegretlessError", "ConfigError", "DataError", "NonFiniteLossError"),
        *("BudgetError", "ServerError", "StorageError"),
    ),
}
"""The public names in the order of the page."""
ABOUT = {
    "PreferenceConfig": "Beside the arguments below it takes those of transformers' `TrainingArguments`.",
    "Recipe": "Its sections are in the pages of the [settings](README.md#settings).",
}
"""A sentence behind a docstring, for this page."""


def page() -> str:
    """The text of the page."""
    listed = [name for names in GROUPS.values() for name in names]
    unlisted = set(regretless.__all__) ^ {*listed, "__version__"}
    assert not unlisted, f"GROUPS in docs/make_api.py: {', '.join(sorted(unlisted))} missing, or not public"
    start = f"Every name that `import regretless` gives; `{COMMAND}` writes this page from the docstrings."
    more = (
        "[Python examples](python.md) has an example for each stage. [Moved modules](renamed.md): where modules of "
        "earlier versions are now."
    )
    lines = ["# Python API", "", *_prose(f"{start} {more}"), ""]
    for group, names in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in names:
            lines += [f"### {name}", "", *_entry(name)]
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str) -> Iterator[str]:
    value = getattr(regretless, name)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    yield from ["```python", _signature(node), "```", ""]
    yield from _docstring(node)
    if name in ABOUT:
        yield from [*_prose(ABOUT[name]), ""]
    if isinstance(node, ast.ClassDef):
        yield from _fields(node, value)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
                yield from [f"#### {name}.{method.name}", "", "```python", _signature(method), "```", ""]
                yield from _docstring(method)


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The first lines of a definition, one parameter a line where they do not fit into one."""
    start, end = f"class {node.name}", ""
    if isinstance(node, ast.ClassDef):
        made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not made:
            return f"{start}({', '.join(ast.unparse(base) for base in node.bases)})".removesuffix("()")
        parameters = _parameters(made[0].args)
        parameters.remove("self")
    else:
        start = "\n".join([*(f"@{ast.unparse(one)}" for one in node.decorator_list), f"def {node.name}"])
        end = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        parameters = _parameters(node.args)
    one = f"{start}({', '.join(parameters)}){end}"
    if len(one.splitlines()[-1]) <= WIDTH:
        return one
    return "\n".join([f"{start}(", *(f"    {parameter}," for parameter in parameters), f"){end}"])


def _parameters(arguments: ast.arguments) -> list[str]:
    """Parameters as they are written; `ast.unparse` puts no spaces around the sign before a default."""
    depth, parts = 0, [""]
    for character in ast.unparse(arguments):
        depth += (character in "([{") - (character in ")]}")
        # A comma at the top level separates parameters; one inside of brackets belongs to a type or a default.
        if character == "," and depth == 0:
            parts.append("")
        elif character == "=" and depth == 0 and ":" in parts[-1]:
            parts[-1] += " = "
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part]


def _fields(node: ast.ClassDef, value: Any) -> Iterator[str]:
    """A table of the fields that a class declares itself, with the text under or in each declaration."""
    helps = {}
    if dataclasses.is_dataclass(value):
        helps = {one.name: one.metadata.get("help", "") for one in dataclasses.fields(value)}
    rows = []
    for item, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, kind, meaning = item.target.id, ast.unparse(item.annotation), ""
        elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name) and item.targets[0].id.isupper():
            name, kind, meaning = item.targets[0].id, ast.unparse(item.value), ""
        else:
            continue
        if name.startswith("_") or "ClassVar" in kind:
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            meaning = " ".join(str(following.value.value).split())
        cells = (f"`{name}`", f"`{kind}`", meaning or helps.get(name, ""))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if rows:
        yield from ["| field | type | meaning |", "|---|---|---|", *rows, ""]


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Paragraphs wrapped as prose; each description of parameters (`name, name: text`) is an item of a list."""
    arguments = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        blocks: list[str] = []
        for line in map(str.strip, paragraph.splitlines()):
            described = [name.strip() for name in line.partition(":")[0].split(",")] if ":" in line else []
            if described and described[0] in arguments:
                names = ", ".join(f"`{name}`" if name in arguments else name for name in described)
                blocks.append(f"- {names}:{line.partition(':')[2]}")
            elif not blocks or (blocks[-1].startswith("- ") and line.startswith("Raises ")):
                blocks.append(line)
            else:
                blocks[-1] += f" {line}"
        for number, block in enumerate(blocks):
            if number and not (block.startswith("- ") and blocks[number - 1].startswith("- ")):
                yield ""
            indent = "  " if block.startswith("- ") else ""
            first, *further = _prose(block, WIDTH - len(indent))
            yield from [first, *(f"{indent}{line}" for line in further)]
        yield ""


def _prose(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
