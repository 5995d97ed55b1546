"""Decoder layers compiled by torch: what is between matrix products and attention becomes a few fused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention
from regretless.modeling.recurrent import recurrent_layers

_compiled: WeakKeyDictionary[PreTrainedModel, dict[nn.Module, Callable[..., Any]]] = WeakKeyDictionary()
"""By model, its layers with their compiled calls."""


class RowKeywords:
    """Keywords that describe a row to attention. Compiled code passes the object on and does not depend on it."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        self.keywords = keywords


def compile_layers(model: PreTrainedModel, backend: Any = "inductor") -> None:
    """Compile the decoder layers of `model` for shared rows (`modeling.forward.grouped`) of any length.

    All layers share the compiled code. It calls attention, which depends on a row's segments and is not part of it;
    FlexAttention is compiled by itself. Compilation takes place in the first rows: with and without gradient, in
    training and in evaluation.
    Raises ConfigError for a model whose layers cannot be compiled so.
    """
    kind = type(model).__name__
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    why = None
    if recurrent_layers(model):
        why = "has recurrent layers, whose code depends on a row's segments"
    elif any("experts" in f"{name} {type(module).__name__}".lower() for name, module in model.named_modules()):
        why = "has experts, whose code depends on which tokens they get"
    elif not layers:
        why = "has no layers of the kinds that its _no_split_modules names"
    elif any(getattr(layer, "gradient_checkpointing", False) for layer in layers):
        why = "has checkpointing on, which computes layers again by code of its own"
    if why is not None:
        raise ConfigError(f"compile_layers: {kind} {why}; set it to false")
    _register_attention()
    gpu_attention.allow_variants()
    _compiled[model] = {layer: torch.compile(layer._call_impl, dynamic=True, backend=backend) for layer in layers}


def leave_uncompiled(model: PreTrainedModel) -> None:
    """Undo `compile_layers`, for example that of an earlier trainer of the same model."""
    _compiled.pop(model, None)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `compile_layers` was called for this model."""
    return model in _compiled


@contextlib.contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, calls of a layer of `model` run its compiled code; blocks may be nested."""
    layers = _compiled.get(model, {})
    before = [(layer, layer._compiled_call_impl) for layer in layers]
    for layer, call in layers.items():
        layer._compiled_call_impl = call
    try:
        yield
    finally:
        for layer, outer in before:
            layer._compiled_call_impl = outer


@cache  # compiled code is compiled again for another function
def _register_attention() -> None:
    for name, attend in (
        (cpu_attention.NAME, cpu_attention.grouped_attention),
        (gpu_attention.NAME, gpu_attention.flex_grouped_attention),
    ):
        of_row = partial(_attention_of_row, attend)
        AttentionInterface.register(name, torch.compiler.disable(of_row))  # type: ignore[no-untyped-call]


def _attention_of_row(attend: Callable[..., Any], *args: Any, row: RowKeywords | None = None, **kwargs: Any) -> Any:
    return attend(*args, **kwargs, **(row.keywords if row else {}))
