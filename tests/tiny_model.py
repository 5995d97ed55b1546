"""A tiny model with random weights and the world's tokenizer."""

from __future__ import annotations

from pathlib import Path

from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.world.tiny_models import smoke_architecture
from regretless.world.tokenizer import build_tokenizer


def save_tiny_model(folder: Path) -> Path:
    """Write the model and its tokenizer into a folder; returns the folder."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = ModelConfig(architecture=smoke_architecture("qwen3", len(tokenizer)), tokenizer=str(folder))
    load_model(config).save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return folder
