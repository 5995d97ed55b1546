"""The table of sampling engines. To add one, write a file with a class that fits `Engine` and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from regretless.core.plugins import Registry
from regretless.modeling.load import ModelConfig, load_tokenizer
from regretless.sampling.base import Engine, SamplingParams
from regretless.sampling.openai_engine import OpenAIEngine, local_tokenizer
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.sampling.vllm_engine import VllmEngine, check_vllm


@dataclass(frozen=True)
class EngineKind:
    """One row of the table: how to build an engine from settings."""

    load: Callable[[ModelConfig, SamplingParams], Engine[Any]]
    """Loads a model. Raises ConfigError for settings that the engine does not support."""
    tokenizer: Callable[[ModelConfig], PreTrainedTokenizerBase | None] = load_tokenizer
    """The tokenizer that counts a prompt's tokens before sampling; None if only a server has it."""
    takes_server: bool = False
    """True if it uses the server in the setting `server`, which is then required."""
    check: Callable[[], None] = lambda: None
    """Raises ConfigError if the engine cannot run on this machine: asked before a recipe's first stage."""
    takes_vllm: bool = False
    """True if it follows the settings of vLLM in `vllm`."""


ENGINES: Registry[EngineKind] = Registry(
    "engines",
    {
        "transformers": EngineKind(TransformersEngine),
        "vllm": EngineKind(VllmEngine, check=check_vllm, takes_vllm=True),
        "openai": EngineKind(OpenAIEngine, tokenizer=local_tokenizer, takes_server=True),
    },
    lambda _, part: None if isinstance(part, EngineKind) else f"expected an EngineKind, got {part!r}",
)
"""Allowed values of `sample.engine`."""
