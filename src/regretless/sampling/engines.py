"""The table of sampling engines. A new one is a file with a class that fits `Engine`, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from regretless.modeling.load import ModelConfig, load_tokenizer
from regretless.sampling.base import Engine, SamplingParams
from regretless.sampling.openai_engine import OpenAIEngine, local_tokenizer
from regretless.sampling.transformers_engine import TransformersEngine

ENGINES: dict[str, Callable[[ModelConfig, SamplingParams], Engine[Any]]] = {
    "transformers": TransformersEngine,
    "openai": OpenAIEngine,
}
"""What `SamplingParams.engine` may name: how to load the model of a config."""

TOKENIZERS: dict[str, Callable[[ModelConfig], PreTrainedTokenizerBase | None]] = {
    "transformers": load_tokenizer,
    "openai": local_tokenizer,
}
"""The tokenizer that an engine's prompts can be counted with beforehand; None where only a server has it."""
