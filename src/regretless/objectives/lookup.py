"""Objectives by name; `registry` lists those of this package."""

from __future__ import annotations

import inspect
from typing import Any

from regretless.core.plugins import Registry
from regretless.objectives.base import Objective


def _problem(name: str, kind: Any) -> str | None:
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        return f"expected a subclass of regretless.objectives.Objective, got {kind!r}"
    if inspect.isabstract(kind):
        return f"it has no {' and no '.join(sorted(kind.__abstractmethods__))}; define it"
    its_name = getattr(kind, "name", None)
    return None if its_name == name else f"its `name` is {its_name!r}; make it equal to the entry point's"


OBJECTIVES: Registry[type[Objective]] = Registry("objectives", {}, _problem)
"""Every objective, by its name in recipes and on the command line."""


def build(name: str, /, **hyperparameters: Any) -> Objective:
    """An objective ready to call.

    Raises ConfigError for an unknown name, for all bad hyperparameters together, and for properties of another form.
    """
    return OBJECTIVES.find(name).parse(hyperparameters, where=f"objective {name}").check_properties()


def hyperparameter_names(name: str) -> tuple[str, ...]:
    """Names of an objective's hyperparameters, in order. Raises ConfigError for an unknown objective."""
    return tuple(OBJECTIVES.find(name).model_fields)
