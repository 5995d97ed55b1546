"""Versions that results depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from regretless.core.plugins import plugin_parts, plugin_versions

VERSIONED = ("regretless", "torch", "transformers", "peft", "accelerate", "datasets", "math-verify", "numpy")


def version() -> str:
    """The installed version of this package, which comes from the repository's tags (pyproject.toml)."""
    try:
        return importlib.metadata.version("regretless")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"  # a checkout on sys.path that is not installed


def versions() -> dict[str, str]:
    """Versions of this package, of the packages that its results depend on (including plug-ins), and of Python."""
    return _installed() | plugin_versions()


@cache
def _installed() -> dict[str, str]:
    # Once for a process, which goes on with the packages that it has imported: it parses all their metadata.
    versions = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def versions_for(settings: Any) -> dict[str, str]:
    """The versions that results of these settings depend on: without plug-ins, if no part of one is named in them.

    A part is named by a text, or by a key (as in `methods`), that equals its name. Where one is named, all plug-ins
    count, since a part may use another's.
    """
    unused = plugin_versions() if plugin_parts().isdisjoint(_texts(settings)) else {}
    return {name: version for name, version in versions().items() if name not in unused}


def _texts(settings: Any) -> Iterator[str]:
    """All texts in settings, keys included."""
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        yield from (text for pair in settings.items() for item in pair for text in _texts(item))
    elif isinstance(settings, list | tuple):
        yield from (text for item in settings for text in _texts(item))
