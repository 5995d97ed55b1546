"""Which methods a recipe's `train` section asks for; apart from its settings, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_METHOD = "repo"
"""The method that is trained unless others are named."""


def methods_of(objective: str | Sequence[str] = DEFAULT_METHOD) -> list[str]:
    """The methods that the setting `objective` names, in order."""
    return [objective] if isinstance(objective, str) else list(objective)
