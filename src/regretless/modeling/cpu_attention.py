"""Attention over a shared-prefix row on CPUs and others: each segment over those that it continues and itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from regretless.modeling.layout import Segment

NAME = "regretless_grouped"
PER_HEAD = ("s_aux",)
"""Arguments of attention, on CPUs and on GPUs, with a value for each query head."""
MASK_STEP = 1024
"""A mask's size grows in steps of this many positions, so that few masks are built."""
BLOCK = 128
"""Queries in a block, or up to twice as many. Smaller blocks skip more masked keys, but products become too small."""


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
    s_aux: Tensor | None = None,
    segments: tuple[Segment, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`; query (1, H, N, D), key and value (1, H_kv, N, D).

    `segments` reaches it as an extra keyword of the model's forward. `s_aux` (H,) are attention sinks: a score of each
    head that takes part in the softmax and has no value. Returns (1, N, H, D).
    Raises ValueError if the model was called without `segments`: a plain causal row would be silently wrong; and for
    sinks together with soft-capping, which would cap them.
    """
    if segments is None:
        raise ValueError("grouped attention was called without `segments`; call the model through regretless.modeling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    size, sink = value.shape[-1], None
    if s_aux is not None:
        if softcap is not None:
            raise ValueError("attention sinks together with soft-capping are not known here")
        query, key, value, sink = _with_sink(query, key, value, s_aux, scaling)

    # One split for the whole row: slicing part by part would make the backward pass fill a full-size zero tensor each.
    lengths = [segment.length for segment in segments]
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    outputs: list[Tensor] = []
    how = (scaling, dropout, sliding_window, softcap, sink is not None)
    # The segments that the present one continues: their numbers, and keys and values from the prompt's first on.
    path: list[tuple[int, tuple[Tensor, Tensor]]] = []
    for number, segment in enumerate(segments):
        while path and path[-1][0] != segment.parent:
            path.pop()
        before = sink if segment.parent is None else path[-1][1]
        reach = keys[number], values[number]
        if before is not None:
            reach = torch.cat((before[0], reach[0]), dim=2), torch.cat((before[1], reach[1]), dim=2)
        outputs.append(_attend(queries[number], reach[0], reach[1], *how))
        path.append((number, reach))
    return torch.cat(outputs, dim=2)[..., :size].transpose(1, 2).contiguous(), None


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Query, key and value with one more dimension, and key and value (1, H_kv, 1, D + 1) of the sink.

    In that dimension every query is its head's sink, and every key 0 but that of the sink, which is zero elsewhere: its
    score is the head's sink, whatever the query, and its value nothing. So SDPA computes it, and the sink has its
    gradient.
    """
    sink_query = (s_aux / scaling).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key, value = F.pad(key, (0, 1)), F.pad(value, (0, 1))
    sink_key = torch.zeros_like(key[:, :, :1])
    sink_key[..., -1] = 1
    return torch.cat((query, sink_query), dim=3), key, value, (sink_key, torch.zeros_like(value[:, :, :1]))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    sink: bool,
) -> Tensor:
    """Causal attention of the last Q of K positions; query (1, H, Q, D), key and value (1, H_kv, K, D).

    With soft-capping H_kv is H. `sink`: the first of the K positions is one that all others see, however far away.
    """
    rows, columns = query.shape[2], key.shape[2]
    shared = query.shape[1] != key.shape[1]
    window = None if sliding_window is None or columns - sink <= sliding_window else sliding_window
    if softcap is None and rows == columns and window is None:
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scaling, enable_gqa=shared
        )
    # Position K − Q + i sees up to itself, so that the mask of any Q and K is a part of one matrix.
    size = -(-columns // MASK_STEP) * MASK_STEP
    whole = _causal_mask(size, window, sink and window is not None, query.dtype, query.device)
    if softcap is None:
        # The first of many queries do not see the keys of the last ones, and need no products with them.
        blocks, stop = [], columns - rows
        for part in torch.split(query, -(-rows // max(1, rows // BLOCK)), dim=2):
            start, stop = stop, stop + part.shape[2]
            first = 0 if window is None or sink else max(0, start + 1 - window)
            mask, seen = whole[start:stop, first:stop], (key[:, :, first:stop], value[:, :, first:stop])
            blocks.append(F.scaled_dot_product_attention(part, *seen, mask, dropout, scale=scaling, enable_gqa=shared))
        return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]
    mask = whole[columns - rows : columns, :columns]
    # SDPA has no soft-capping, so the full score matrix is computed.
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    precise = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    weights = F.dropout(scores.softmax(-1, dtype=precise).to(query.dtype), dropout)
    return weights @ value


@lru_cache(maxsize=4)
def _causal_mask(size: int, window: int | None, sink: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size) numbers to add to scores: 0 where a position sees another (within the window) or the sink, else −∞.

    Numbers, because SDPA would convert a boolean mask in every call.
    """
    # A tensor made under `inference_mode` could not be used in training later.
    with torch.inference_mode(False):
        seen = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        seen = seen if window is None else seen.triu(1 - window)
        seen[:, 0] |= sink
        return torch.zeros(size, size, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(NAME, grouped_attention)
