"""Regret-based preference optimization (RePO) for language models.

What a program needs is here by name; docs/python.md has an example for every stage. Names are imported when they are
first used, because torch and transformers take seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regretless.core.errors import (
        BudgetError,
        ConfigError,
        DataError,
        NonFiniteLossError,
        RegretlessError,
        ServerError,
        StorageError,
    )
    from regretless.data.columns import Pair, Response, Side, Verdict
    from regretless.data.preferences import parse_pairs, read_pairs
    from regretless.data.prompts import PromptSource
    from regretless.data.rejected_rows import Refusal
    from regretless.data.responses import read_responses
    from regretless.data.rows import write_records
    from regretless.modeling.forward import grouped, response_scores
    from regretless.modeling.layout import lay_out
    from regretless.modeling.load import ModelConfig
    from regretless.modeling.model_check import check_grouped
    from regretless.objectives import Logps, Objective, Output, build
    from regretless.runs.pipeline import run_recipe
    from regretless.runs.recipe import Recipe, load_recipe, parse_recipe
    from regretless.training.arguments import PreferenceConfig
    from regretless.training.trainer import PreferenceTrainer

    __version__: str

__all__ = [
    "BudgetError",
    "ConfigError",
    "DataError",
    "Logps",
    "ModelConfig",
    "NonFiniteLossError",
    "Objective",
    "Output",
    "Pair",
    "PreferenceConfig",
    "PreferenceTrainer",
    "PromptSource",
    "Recipe",
    "Refusal",
    "RegretlessError",
    "Response",
    "ServerError",
    "Side",
    "StorageError",
    "Verdict",
    "__version__",
    "build",
    "check_grouped",
    "grouped",
    "lay_out",
    "load_recipe",
    "parse_pairs",
    "parse_recipe",
    "read_pairs",
    "read_responses",
    "response_scores",
    "run_recipe",
    "write_records",
]

_HOMES = {
    "core.errors": (
        *("BudgetError", "ConfigError", "DataError", "NonFiniteLossError"),
        *("RegretlessError", "ServerError", "StorageError"),
    ),
    "data.preferences": ("parse_pairs", "read_pairs"),
    "data.prompts": ("PromptSource",),
    "data.columns": ("Pair", "Response", "Side", "Verdict"),
    "data.rejected_rows": ("Refusal",),
    "data.responses": ("read_responses",),
    "data.rows": ("write_records",),
    "modeling.forward": ("grouped", "response_scores"),
    "modeling.layout": ("lay_out",),
    "modeling.load": ("ModelConfig",),
    "modeling.model_check": ("check_grouped",),
    "objectives": ("Logps", "Objective", "Output", "build"),
    "runs.pipeline": ("run_recipe",),
    "runs.recipe": ("Recipe", "load_recipe", "parse_recipe"),
    "training.arguments": ("PreferenceConfig",),
    "training.trainer": ("PreferenceTrainer",),
}

if not TYPE_CHECKING:  # a type checker that sees this function takes any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from regretless.core.versions import version

            return version()
        for home, names in _HOMES.items():
            if name in names:
                return getattr(importlib.import_module(f"regretless.{home}"), name)
        raise AttributeError(f"module 'regretless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
