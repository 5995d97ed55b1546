"""Regret-based preference optimization (RePO) for language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regretless.training.arguments import PreferenceConfig
    from regretless.training.trainer import PreferenceTrainer

__all__ = ["PreferenceConfig", "PreferenceTrainer", "__version__"]
__version__ = "0.1.0"

_HOMES = {"PreferenceConfig": "regretless.training.arguments", "PreferenceTrainer": "regretless.training.trainer"}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: `regretless --help` should not wait for them.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'regretless' has no attribute {name!r}")
