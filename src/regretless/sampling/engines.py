"""The table of sampling engines. To add one, write a file with a class that fits `Engine` and add a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from regretless.core.plugins import Registry
from regretless.modeling.load import ModelConfig, load_tokenizer
from regretless.sampling.base import Engine
from regretless.sampling.engine_settings import SamplingParams, SamplingServer, VllmOptions
from regretless.sampling.openai_engine import OpenAIEngine, local_tokenizer
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.sampling.vllm_engine import VllmEngine, check_vllm, tensor_parallel_size


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
    gpus: Callable[[SamplingParams], int] = lambda params: 1
    """GPUs that one loaded model uses, where there are any."""
    in_process: bool = False
    """True if it takes nothing but this process, so that several may work at the same time: no server, no devices of
    its own."""


ENGINES: Registry[EngineKind] = Registry(
    "engines",
    {
        "transformers": EngineKind(TransformersEngine, in_process=True),
        "vllm": EngineKind(VllmEngine, check=check_vllm, takes_vllm=True, gpus=tensor_parallel_size),
        "openai": EngineKind(OpenAIEngine, tokenizer=local_tokenizer, takes_server=True),
    },
    lambda _, part: None if isinstance(part, EngineKind) else f"expected an EngineKind, got {part!r}",
)
"""Allowed values of `sample.engine`."""


def check_engine_settings(engine: str, server: Mapping[str, SamplingServer | None], vllm: VllmOptions | None) -> None:
    """Raise ValueError if settings of a server or of vLLM are missing, or belong to another engine.

    server: the server by the name of its setting.
    """
    kind = ENGINES.find(engine)
    ((name, settings),) = server.items()
    if kind.takes_server and settings is None:
        raise ValueError(f"{name}: required by the engine {engine}")
    if settings is not None and not kind.takes_server:
        raise ValueError(f"{name}: the engine {engine} uses none; remove it, or choose the engine openai")
    if vllm is not None and not kind.takes_vllm:
        raise ValueError(f"vllm: the engine {engine} is another; remove it, or choose the engine vllm")
