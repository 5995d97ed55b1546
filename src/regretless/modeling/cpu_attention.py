"""Attention over a shared-prefix row on CPUs and others: prompts causally, each response over its prompt and itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from regretless.modeling.layout import Segment

NAME = "regretless_grouped"
MASK_STEP = 1024
"""A mask's size grows in steps of this many positions, so that few masks are built."""


def grouped_attention(
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
    segments: tuple[Segment, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`; query (1, H, N, D), key and value (1, H_kv, N, D).

    `segments` reaches it as an extra keyword of the model's forward. Returns (1, N, H, D).
    Raises ValueError if the model was called without `segments`: a plain causal row would be silently wrong.
    """
    if segments is None:
        raise ValueError("grouped attention was called without `segments`; call the model through regretless.modeling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)

    # One split for the whole row: slicing part by part would make the backward pass fill a full-size zero tensor each.
    lengths = [length for segment in segments for length in (segment.prompt, *segment.responses)]
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs: list[Tensor] = []
    part = 0
    for segment in segments:
        prompt_key, prompt_value = keys[part], values[part]
        outputs.append(_attend(queries[part], prompt_key, prompt_value, scaling, dropout, sliding_window, softcap))
        for index in range(part + 1, part + 1 + len(segment.responses)):
            reach_key = torch.cat((prompt_key, keys[index]), dim=2)
            reach_value = torch.cat((prompt_value, values[index]), dim=2)
            outputs.append(_attend(queries[index], reach_key, reach_value, scaling, dropout, sliding_window, softcap))
        part += 1 + len(segment.responses)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of the last Q of K positions; query (1, H, Q, D), key and value (1, H_kv, K, D).

    With soft-capping H_kv is H.
    """
    rows, columns = query.shape[2], key.shape[2]
    shared = query.shape[1] != key.shape[1]
    window = None if sliding_window is None or columns <= sliding_window else sliding_window
    if softcap is None and rows == columns and window is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scaling, enable_gqa=shared
        )
    # Position K − Q + i sees up to itself, so that the mask of any Q and K is a part of one matrix.
    size = -(-columns // MASK_STEP) * MASK_STEP
    mask = _causal_mask(size, window, query.dtype, query.device)[columns - rows : columns, :columns]
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling, enable_gqa=shared)
    # SDPA has no soft-capping, so the full score matrix is computed.
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    precise = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    weights = F.dropout(scores.softmax(-1, dtype=precise).to(query.dtype), dropout)
    return weights @ value


@lru_cache(maxsize=4)
def _causal_mask(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size) numbers to add to scores: 0 where a position sees another one (within the window), else −∞.

    Numbers, because SDPA would convert a boolean mask in every call.
    """
    # A tensor made under `inference_mode` could not be used in training later.
    with torch.inference_mode(False):
        seen = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        seen = seen if window is None else seen.triu(1 - window)
        return torch.zeros(size, size, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(NAME, grouped_attention)
