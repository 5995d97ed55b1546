"""Paths that users name: what is not a path of this machine is refused before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from regretless.core.errors import ConfigError, reject

URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(?=[^/])")
"""A URL, also one that was taken for a path, which merges its slashes."""
NOTHING = "expected a value, got nothing; is a variable of the shell not set?"
"""Said of empty settings and arguments: as a path, the empty text is the current folder."""


def page(name: str) -> str:
    """The address of a page of the documentation, which an installed package does not have as a file."""
    return f"https://regretless.github.io/regretless/{name}.html"


NO_URL = f"expected a path on this machine, got the URL {{url}}; what to do instead: {page('storage')}"


def url_of(path: Path | str) -> str | None:
    """The URL that a path was meant to be, as `pathlib` turns s3://a/b into s3:/a/b; None for any other path."""
    match = URL.match(str(path))
    return None if match is None or Path(match[1] + ":").exists() else f"{match[1]}://{str(path)[match.end() :]}"


def check_output(text: str) -> str:
    """A path to write to, unchanged. Raises ValueError for an empty one, and for a URL."""
    if not text.strip():
        raise ValueError(NOTHING)
    if (url := url_of(text)) is not None:
        raise ValueError(NO_URL.format(url=url))
    return text


MADE_BY = "Made by regretless"
"""Behind it, a page has the version."""
MODEL_MARKERS = ("config.json", "adapter_config.json", "tokenizer_config.json")
OutputPath = Annotated[str, AfterValidator(check_output)]
"""A path in settings to which something is written."""


def at_home(text: str) -> str:
    """A path with the home folder in place of `~` at its beginning."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


class NamedPath(str):
    """The value of a setting that may name a file or folder: with `~` at its beginning as the home folder."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str) -> NamedPath:
        """The value of a setting with this text. Raises ValueError for an empty one.

        The empty path is the current folder: not what a variable of the shell that is not set was to name.
        """
        if not text.strip():
            raise ValueError(NOTHING)
        return cls(at_home(text))


PathSetting = Annotated[str, AfterValidator(NamedPath.of)]
"""A setting that may name a file or folder, whose content is then part of what a result depends on."""


def refuse_urls(paths: Mapping[str, Path | str | None]) -> None:
    """Raise ConfigError for URLs among the paths of flags, where only files of this machine will do."""
    urls = {name: url for name, path in paths.items() if path is not None and (url := url_of(path)) is not None}
    reject("paths", [f"{name}: {NO_URL.format(url=url)}" for name, url in urls.items()])


def is_model(path: Path) -> bool:
    """True for the folder of a model, an adapter or a tokenizer."""
    return any((path / name).is_file() for name in MODEL_MARKERS)


def harm(source: Path, emptied: Iterable[Path], written: Iterable[Path] = ()) -> str | None:
    """Why a command must not read `source`: it would be emptied, moved or changed by what the command writes.

    emptied: files and folders that are replaced or moved aside as a whole; written: folders to which files are added.
    Symbolic links count as what they lead to. None if the input stays as it is.
    """
    real = source.resolve()
    folders = [(path, path.resolve()) for path in emptied]
    for path, target in folders:
        if target == real or target in real.parents:
            return f"{source} is an input, and {path} is emptied, moved or replaced; choose another output"
    for path, target in [*folders, *((path, path.resolve()) for path in written)]:
        if target == real or (real in target.parents and real.is_dir() and not is_model(real)):
            return f"{path} is in the input {source}, which it would change; choose another output"
    return None


def check_page(page: Path, beside: Iterable[str]) -> None:
    """Raise ConfigError if a page, and files `beside` it, would replace something that this package has not written."""
    if page.is_file() and MADE_BY.encode() in page.read_bytes():
        return
    if taken := [name for name in (page.name, *beside) if (page.parent / name).exists()]:
        raise ConfigError(
            f"{page.parent / taken[0]}: exists and was not made by regretless; choose another output, or move it away"
        )
