"""Decoder layers compiled by torch: what is between matrix products and attention becomes a few fused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention
from regretless.modeling.recurrent import recurrent_layers
from regretless.modeling.router_loss import has_router_loss

_compiled: WeakKeyDictionary[PreTrainedModel, dict[nn.Module, Callable[..., Any]]] = WeakKeyDictionary()
"""By model, its layers with their compiled calls."""


class Row:
    """Keywords that describe a row to attention. Compiled code passes the object on and does not depend on it."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        self.keywords = keywords


def _attention_of_row(attend: Callable[..., Any], *args: Any, row: Row | None = None, **kwargs: Any) -> Any:
    return attend(*args, **kwargs, **(row.keywords if row else {}))


def compile_layers(model: PreTrainedModel, backend: Any = "inductor") -> None:
    """Compile the decoder layers of `model` for shared rows (`modeling.forward.grouped`) of any length.

    All layers share the compiled code. Attention is called from it: it knows the segments of a row, and FlexAttention
    is compiled by itself. Rows of new lengths compile nothing again. Compilation takes place in the first rows: with
    and without gradient, in training and in evaluation.
    Raises ConfigError for a model with recurrent layers or with experts, whose Python code depends on a row's tokens.
    """
    if recurrent_layers(model) or has_router_loss(model):
        kind = "recurrent layers" if recurrent_layers(model) else "a mixture of experts"
        raise ConfigError(
            f"compile_layers: {type(model).__name__} has {kind}, whose code depends on the row; set it to false"
        )
    names = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"compile_layers: {type(model).__name__} does not name its layers; set it to false")
    for name, attend in (
        (cpu_attention.NAME, cpu_attention.grouped_attention),
        (gpu_attention.NAME, gpu_attention.flex_grouped_attention),
    ):
        AttentionInterface.register(name, torch.compiler.disable(partial(_attention_of_row, attend)))  # type: ignore[no-untyped-call]
    gpu_attention.allow_variants()
    _compiled[model] = {layer: torch.compile(layer._call_impl, dynamic=True, backend=backend) for layer in layers}


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether `compile_layers` was called for this model."""
    return model in _compiled


@contextlib.contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, calls of a layer of `model` run its compiled code."""
    layers = _compiled.get(model, {})
    for layer, call in layers.items():
        layer._compiled_call_impl = call
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
