"""4-bit base models (QLoRA): settings, loading, and the same kernels in every forward pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils.hub import cached_file

from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_json
from regretless.core.settings import Section

FILE = "quantization.json"
"""File beside an adapter that says how its base was quantized in training."""


class Quantization(Section):
    """A base model in 4 bits (bitsandbytes) under an adapter; names are those of transformers' BitsAndBytesConfig."""

    load_in_4bit: bool = True
    """Always true; 8 bits, and other quantizers, are for Python (`PreferenceTrainer(quantization_config=…)`)."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """Data type of the weights. The default is QLoRA's; transformers' own is fp4."""
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of the blocks of weights are quantized, too."""
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type that products are computed in. The default is QLoRA's; transformers' own is float32."""
    llm_int8_skip_modules: list[str] | None = None
    """Names of layers that stay as they are; by default the output layer."""

    @model_validator(mode="after")
    def _four_bits(self) -> Self:
        if not self.load_in_4bit:
            raise ValueError("load_in_4bit: expected true, got false; leave out quantization for a base in full size")
        return self


def for_transformers(settings: Quantization) -> BitsAndBytesConfig:
    """The settings as `from_pretrained` takes them. Raises ConfigError without the package."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("model.quantization: needs a package: pip install 'regretless[quantization]'")
    return BitsAndBytesConfig(**settings.model_dump())


def keep_weights_as_loaded(model: nn.Module) -> None:
    """Make the 4-bit layers of bitsandbytes compute with the same weights in every pass.

    On CPUs with AVX512-BF16 its layers repack their weights in the first pass without a gradient, and never back: later
    passes then compute with another kernel, through which no gradient flows. A scoring pass before training would so
    cut off the gradients of all layers below, silently.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()  # bitsandbytes unpacks before it saves


def write_quantization(model: nn.Module, folder: Path) -> None:
    """Write beside an adapter how this base model was quantized when it was loaded; nothing for other models."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    config = getattr(quantizer, "quantization_config", None)
    if not isinstance(config, BitsAndBytesConfig) or not config.load_in_4bit or quantizer.pre_quantized:
        return
    values: dict[str, Any] = {name: getattr(config, name) for name in Quantization.model_fields}
    plain = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in values.items()
    }
    write_json(folder / FILE, plain)


def quantization_of(adapter: str | None, revision: str | None) -> Quantization | None:
    """How the base of an adapter (hub id or folder) was quantized in training; None if it was not."""
    if adapter is None:
        return None
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(adapter, FILE, revision=revision, **missing)
    return None if file is None else Quantization.parse(read_json(Path(file)), f"{adapter}/{FILE}")
