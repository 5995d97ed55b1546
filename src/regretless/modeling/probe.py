"""Hooks and a diagonal attention for `model_check` and `plain_check`, and what they read of a configuration."""

from __future__ import annotations

import contextlib
import inspect
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from regretless.modeling.cpu_attention import grouped_attention
from regretless.modeling.gpu_attention import flex_grouped_attention
from regretless.modeling.layout import Layout

LOCAL = "regretless_local"
"""Name of the attention in which a token sees only itself."""
KNOWN = set(inspect.signature(grouped_attention).parameters) & set(
    inspect.signature(flex_grouped_attention).parameters
) | {
    "segments",
    "row_mask",
    "row",
    "calls",
    "forks",
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "training",
}
"""Arguments of attention that the shared-prefix attention computes with, on CPUs and on GPUs, or may ignore."""


@dataclass
class Call:
    """A layer's call of the attention function."""

    module: nn.Module
    window: int | None
    extras: list[str]


def _local_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    calls: list[Call] | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention function in which a token sees only itself; records the layer's arguments. Shapes as elsewhere."""
    if calls is None:
        raise ValueError("its layers do not pass keyword arguments on to attention")
    unknown = [name for name, value in extras.items() if value is not None and name not in KNOWN]
    if attention_mask is not None:
        unknown.append("attention_mask")
    calls.append(Call(module, sliding_window, unknown))
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    # Query and key take part, so that what mixes on their way is seen as well.
    result = value + 0.01 * (query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True))
    return result.transpose(1, 2).contiguous(), None


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(LOCAL, _local_attention)


@contextlib.contextmanager
def hooked(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """Register the hooks within the block, and remove them afterwards."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a module's output."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def are_positions(value: Any, positions: Tensor) -> bool:
    """Whether a value that a module was called with is the row's positions."""
    return (
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and value.shape[-1:] == positions.shape[-1:]
        and bool((value == positions).all())
    )


def own_positions(layout: Layout, last: int) -> list[int]:
    """Positions in the row of the sequence up to the token at position `last`: its segment's, and those before it."""
    stops = list(accumulate(segment.length for segment in layout.segments))
    number = bisect_right(stops, last)
    positions = list(range(stops[number] - layout.segments[number].length, last + 1))
    while (parent := layout.segments[number].parent) is not None:
        number = parent
        positions = [*range(stops[number] - layout.segments[number].length, stops[number]), *positions]
    return positions


def windows_named(config: Any) -> set[int]:
    """Sizes of windows and chunks in a configuration."""
    words, others = (
        ("window", "chunk", "local_attention"),
        ("layers", "pattern", "every", "num_", "feed_forward", "mamba"),
    )
    return {
        value
        for key, value in config.to_dict().items()
        if type(value) is int and value > 0 and any(w in key for w in words) and not any(o in key for o in others)
    }


def special_ids(config: Any) -> set[int]:
    """Ids of tokens that a model may treat specially: padding, images."""
    return {
        value
        for key, value in config.to_dict().items()
        if type(value) is int and key.endswith(("_token_id", "_token_index"))
    }


def context_advice(config: Any) -> str:
    """What to do about sequences beyond the original context."""
    name = "original_max_position_embeddings"
    named = (getattr(config, "rope_parameters", None) or {}).get(name) or getattr(config, name, None)
    context = named or getattr(config, "max_position_embeddings", None)
    return f"sequences of up to {context} tokens are fine: set max_length" if context else "shorten the sequences"
