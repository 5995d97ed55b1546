"""Paths that users name: what is not a path of this machine is refused before anything is done with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from regretless.core.errors import reject

URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(?=[^/])")
"""A URL, also one that was taken for a path, which merges its slashes."""
NO_URL = (
    "expected a path on this machine, got the URL {url}; what to do instead: "
    "https://regretless.github.io/regretless/storage.html"
)


def url_of(path: Path | str) -> str | None:
    """The URL that a path was meant to be, as `pathlib` turns s3://a/b into s3:/a/b; None for any other path."""
    match = URL.match(str(path))
    return None if match is None or Path(match[1] + ":").exists() else f"{match[1]}://{str(path)[match.end() :]}"


def check_output(text: str) -> str:
    """A path to write to, unchanged. Raises ValueError for an empty one, and for a URL."""
    if not text.strip():
        raise ValueError("expected a path, got nothing; is a variable of the shell not set?")
    if (url := url_of(text)) is not None:
        raise ValueError(NO_URL.format(url=url))
    return text


OutputPath = Annotated[str, AfterValidator(check_output)]
"""A path in settings to which something is written."""


def refuse_urls(paths: Mapping[str, Path | str | None]) -> None:
    """Raise ConfigError for URLs among the paths of flags, where only files of this machine will do."""
    urls = {name: url for name, path in paths.items() if path is not None and (url := url_of(path)) is not None}
    reject("paths", [f"{name}: {NO_URL.format(url=url)}" for name, url in urls.items()])
