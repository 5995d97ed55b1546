"""Real architecture classes with tiny sizes and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regretless.core.errors import ConfigError
from regretless.modeling.load import ModelConfig, default_architecture, load_tokenizer

SMOKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
}
"""Sizes of a tiny model, by the parameter names that transformers' configurations share."""


def smoke_architecture(model_type: str, vocab_size: int) -> dict[str, Any]:
    """Architecture of the real class with two tiny layers, for `ModelConfig.architecture`.

    Raises ConfigError when transformers does not know the model type.
    """
    architecture = default_architecture(model_type)
    sizes = {key: value for key, value in SMOKE.items() if hasattr(architecture, key)}
    return {"model_type": model_type, "vocab_size": vocab_size, **sizes}


FAMILIES = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama", "gemma-2": "gemma2", "mistral": "mistral"}
"""Part of a hub id → the model type it implies."""


def shrink(config: ModelConfig, *, tokenizer: str) -> ModelConfig:
    """The same architecture class with tiny random weights and another tokenizer, to test that a recipe runs.

    The model type comes from `architecture`, from the folder's config.json, or (to work offline) from the family name
    in a hub id. Raises ConfigError if none of these names it.
    """
    vocab_size = len(load_tokenizer(ModelConfig(name_or_path=tokenizer)))
    architecture = smoke_architecture(_model_type(config), vocab_size)
    return ModelConfig(architecture=architecture, tokenizer=tokenizer, init_seed=config.init_seed)


def _model_type(config: ModelConfig) -> str:
    if config.architecture is not None:
        return str(config.architecture["model_type"])
    name = str(config.name_or_path)
    if (file := Path(name) / "config.json").is_file():
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"])
    for part, model_type in FAMILIES.items():
        if part in name.lower():
            return model_type
    raise ConfigError(
        f"model {name}: cannot tell its architecture offline (no {', '.join(FAMILIES)} in the name); "
        "set model.architecture instead of the name"
    )
