"""Versions that results depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

from regretless.core.plugins import plugin_versions

VERSIONED = ("regretless", "torch", "transformers", "peft", "accelerate", "datasets", "math-verify", "numpy")


def versions() -> dict[str, str]:
    """Versions of this package, of the packages that its results depend on (including plug-ins), and of Python."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | plugin_versions()
