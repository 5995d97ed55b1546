"""Recipes, studies and examples that come with the package: found by name, listed and copied.

They are files at the top of the repository. A wheel has them in the folder `bundled` of the package.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from regretless.core.errors import ConfigError, reject
from regretless.core.files import atomic_path

KINDS = ("recipes", "studies", "examples")
PACKAGE = Path(__file__).resolve().parents[1]
SHARED = "base"
"""Folder of the recipes that others extend and that do not run by themselves."""
SENTENCE_END = re.compile(r"[.;] |[.:;]$")
PROJECT_FILES = ("pyproject.toml",)
"""Mark a folder that is one example, and not several."""


@dataclass(frozen=True)
class Bundled:
    """A recipe, a study or an example."""

    kind: str
    """One of `KINDS`."""
    name: str
    """What the command line takes: `math/qwen3-1.7b`, `examples/plugin`."""
    path: Path
    about: str
    """What it is, in one sentence."""


def home() -> Path:
    """The folder that holds the folders `KINDS`: in the installed package, or the repository's top."""
    installed = PACKAGE / "bundled"
    return installed if installed.is_dir() else PACKAGE.parents[1]


def bundled(kind: str) -> list[Bundled]:
    """All of one kind, by name."""
    folder = home() / kind
    if kind != "examples":
        files = (file for file in folder.rglob("*.yaml") if file.parent.name != SHARED)
        named = [(file.relative_to(folder).with_name(file.name.removesuffix(".yaml")), file) for file in files]
    else:
        named = [(Path(kind) / file.relative_to(folder), file) for file in _examples(folder)]
    return [Bundled(kind, name.as_posix(), file, _about(file)) for name, file in sorted(named)]


def find(path: Path | str, kind: str = "recipes", *, beside: Path = Path()) -> Path:
    """The file at `path`, or else the packaged recipe or study of that name, with or without folder and `.yaml`.

    beside: folder that relative paths start from. Raises ConfigError, with similar names, if there is neither.
    """
    file = beside / path
    if file.exists() and not file.is_dir():
        return file
    name = str(path).removeprefix(f"{kind}/").removesuffix(".yaml")
    packaged = {entry.name: entry.path for entry in bundled(kind)}
    if name in packaged:
        return packaged[name]
    if file.exists():
        return file  # whoever reads it says what is wrong with it
    close = difflib.get_close_matches(name, packaged, 3)
    similar = f"; similar ones: {', '.join(close)}" if close else ""
    raise ConfigError(
        f"{file}: cannot be read (no such file); set it to the path of a YAML file, or to a name that "
        f"`regretless recipes` lists under {kind}{similar}"
    )


def copy_files(names: Sequence[str], folder: Path) -> list[Path]:
    """Copy recipes, studies and examples with the files that they build on; the files in the folder.

    Each keeps its path (`recipes/math/qwen3-1.7b.yaml`), so that files find each other and the commands in their
    comments work there. Raises ConfigError for unknown names, and for other files that are in the way.
    """
    source = home()
    names = [name.rstrip("/").removesuffix(".yaml") for name in names]
    packaged: dict[str, Path] = {}
    for kind in ("examples", "studies", "recipes"):  # a name of two is the recipe's; the path names the study
        for entry in bundled(kind):
            path = entry.path.relative_to(source).as_posix().removesuffix(".yaml")
            packaged |= {path: entry.path, entry.name.removesuffix(".yaml"): entry.path}
    reject("recipes --copy", [f"{name}: {_suggestion(name, list(packaged))}" for name in names if name not in packaged])
    files = {file for name in names for file in _with_parts(packaged[name])}
    targets = {file: folder / file.relative_to(source) for file in sorted(files)}
    in_the_way = [
        target for file, target in targets.items() if target.exists() and target.read_bytes() != file.read_bytes()
    ]
    reject(
        "recipes --copy",
        [f"{path}: exists with other content; move it away, or choose another --output" for path in in_the_way],
    )
    for file, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary:
            shutil.copyfile(file, temporary)
    return list(targets.values())


def _suggestion(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, 3)
    return f"unknown; similar: {', '.join(close)}" if close else "unknown; `regretless recipes` lists the names"


def _examples(folder: Path) -> Iterator[Path]:
    """The files that are examples, and the folders that are one example as a whole."""
    for path in sorted(folder.glob("*")):
        if path.name == "__pycache__":
            continue
        if path.is_dir() and not any((path / name).is_file() for name in PROJECT_FILES):
            yield from _examples(path)
        elif not (path.suffix == ".yaml" and path.with_suffix(".py").is_file()):
            yield path


def _with_parts(path: Path) -> Iterator[Path]:
    """A file and all files that it needs: those of a folder, the recipe beside a script, what a YAML file names."""
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return
    yield path
    if path.suffix == ".py" and path.with_suffix(".yaml").is_file():
        yield path.with_suffix(".yaml")
    if path.suffix == ".yaml":
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name in _named_files(content):
            yield from _with_parts(Path(os.path.normpath(path.parent / name)))


def _named_files(content: object) -> Iterator[str]:
    """Files that a recipe extends, and recipes that a study names."""
    if isinstance(content, dict):
        models = content.get("models")
        parts = [content, *(models.values() if isinstance(models, dict) else [])]
        yield from (
            part[key] for part in parts if isinstance(part, dict) for key in ("extends", "recipe") if key in part
        )


def _about(path: Path) -> str:
    """What a file says of itself first: in its docstring, or in the comment that it begins with, up to a command."""
    if path.is_dir():
        return _about(next(path / name for name in PROJECT_FILES if (path / name).is_file()))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    else:
        lines = [line.removeprefix("# ") for line in text.splitlines() if not line.startswith("#!")]
    paragraph = itertools.takewhile(lambda line: line and not line.startswith((" ", "#")), lines)
    return SENTENCE_END.split(" ".join(paragraph), maxsplit=1)[0]
