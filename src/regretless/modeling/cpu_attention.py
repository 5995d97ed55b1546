"""Attention over a shared-prefix row on CPUs and others: each segment over those that it continues and itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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

    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if trained and query.device.type == "cpu" and not dropout and softcap is None and key.shape[-1] == value.shape[-1]:
        if torch.is_autocast_enabled("cpu"):  # SDPA would do that; its kernel does not
            query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
        result: Tensor = _Attention.apply(query, key, value, sink, segments, sliding_window, scaling)  # type: ignore[no-untyped-call]
        return result[..., :size].contiguous(), None
    # One split for the whole row: slicing part by part would make the backward pass fill a full-size zero tensor each.
    queries, keys, values = (_split(tensor, segments) for tensor in (query, key, value))
    outputs = []
    for path in _paths(segments):
        reach = _reach(keys, values, path, sink)
        outputs.append(_attend(queries[path[-1]], *reach, scaling, dropout, sliding_window, softcap, sink is not None))
    return torch.cat(outputs, dim=2)[..., :size].transpose(1, 2).contiguous(), None


class _Attention(torch.autograd.Function):
    """Attention (1, N, H, D) of a row by the kernel of SDPA; keeps queries, keys, values and the output, each once.

    Autograd would keep the output before and after its parts are joined, and for each response a copy of the keys and
    values that it continues: these are joined again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: tuple[Tensor, Tensor] | None,
        segments: tuple[Segment, ...],
        window: int | None,
        scaling: float,
    ) -> Tensor:
        result = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        queries, keys, values, outputs = (
            _split(each, segments) for each in (query, key, value, result.transpose(1, 2))
        )
        sums: list[Tensor] = []
        for path in _paths(segments):
            part, output = queries[path[-1]], outputs[path[-1]]
            reach = _reach(keys, values, path, sink)
            for rows, columns, mask in _blocks(part, reach[0].shape[2], window, sink is not None):
                seen = (part[:, :, rows], *(each[:, :, columns] for each in reach))
                output[:, :, rows], logs = _KERNEL(*seen, 0.0, mask is None, attn_mask=mask, scale=scaling)
                sums.append(logs)
        ctx.save_for_backward(query, key, value, result, *sums)
        ctx.row = sink, segments, window, scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *sums = ctx.saved_tensors
        sink, segments, window, scaling = ctx.row
        grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        inputs = (query, key, value, output.transpose(1, 2), grad.transpose(1, 2), *grads)
        queries, keys, values, outputs, upstream, *totals = (_split(tensor, segments) for tensor in inputs)
        saved = iter(sums)
        for path in _paths(segments):
            last, reach = path[-1], _reach(keys, values, path, sink)
            of_reach = [torch.zeros_like(tensor) for tensor in reach]
            for rows, columns, mask in _blocks(queries[last], reach[0].shape[2], window, sink is not None):
                given, part, result = (each[last][:, :, rows] for each in (upstream, queries, outputs))
                seen = (tensor[:, :, columns] for tensor in reach)
                totals[0][last][:, :, rows], *terms = _KERNEL_BACKWARD(
                    given, part, *seen, result, next(saved), 0.0, mask is None, attn_mask=mask, scale=scaling
                )
                for total, term in zip(of_reach, terms, strict=True):
                    total[:, :, columns] += term
            for parts, whole in zip(totals[1:], of_reach, strict=True):
                of_path = torch.split(whole[:, :, sink is not None :], [segments[number].length for number in path], 2)
                for number, term in zip(path, of_path, strict=True):
                    parts[number].add_(term)
        return *grads, None, None, None, None


_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _split(tensor: Tensor, segments: Sequence[Segment]) -> tuple[Tensor, ...]:
    """The tokens (1, H, n, D) of each segment, of those of a row (1, H, N, D)."""
    return torch.split(tensor, [segment.length for segment in segments], dim=2)


def _paths(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """For each segment the numbers of those that it continues, the prompt first, and its own."""
    paths: list[tuple[int, ...]] = []
    for number, segment in enumerate(segments):
        paths.append((*(() if segment.parent is None else paths[segment.parent]), number))
    return paths


def _reach(
    keys: Sequence[Tensor], values: Sequence[Tensor], path: Sequence[int], sink: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Keys and values that the last segment of a path sees: the sink, then those of the path."""
    joined = []
    for parts, first in zip((keys, values), sink or (None, None), strict=True):
        every = [*(() if first is None else (first,)), *(parts[number] for number in path)]
        joined.append(torch.cat(every, dim=2) if len(every) > 1 else every[0])
    return joined[0], joined[1]


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
    if softcap is None:
        shared = query.shape[1] != key.shape[1]
        blocks = []
        for rows, columns, mask in _blocks(query, key.shape[2], sliding_window, sink):
            seen = (query[:, :, rows], key[:, :, columns], value[:, :, columns])
            blocks.append(
                F.scaled_dot_product_attention(*seen, mask, dropout, mask is None, scale=scaling, enable_gqa=shared)
            )
        return torch.cat(blocks, dim=2) if len(blocks) > 1 else blocks[0]
    # SDPA has no soft-capping, so the full score matrix is computed.
    mask = _mask(query, key.shape[2], sliding_window, sink)
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    precise = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else scores.dtype
    weights = F.dropout(scores.softmax(-1, dtype=precise).to(query.dtype), dropout)
    return weights @ value


def _blocks(query: Tensor, keys: int, window: int | None, sink: bool) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The calls that compute the last Q of K positions: their queries, keys and mask (None: causal, all of them)."""
    length = query.shape[2]
    if length == keys and (window is None or keys - sink <= window):
        yield slice(0, length), slice(0, keys), None
        return
    mask = _mask(query, keys, window, sink)
    # The first of many queries do not see the keys of the last ones, and need no products with them.
    before, step = keys - length, -(-length // max(1, length // BLOCK))
    for start in range(0, length, step):
        stop = min(length, start + step)
        first = 0 if window is None or sink else max(0, before + start + 1 - window)
        seen = slice(first, before + stop)
        yield slice(start, stop), seen, mask[start:stop, seen]


def _mask(query: Tensor, keys: int, window: int | None, sink: bool) -> Tensor:
    """(Q, K) numbers to add to scores of the last Q of K positions."""
    window = None if window is None or keys - sink <= window else window
    # Position K − Q + i sees up to itself, so that the mask of any Q and K is a part of one matrix.
    size = -(-keys // MASK_STEP) * MASK_STEP
    whole = _causal_mask(size, window, sink and window is not None, query.dtype, query.device)
    return whole[keys - query.shape[2] : keys, :keys]


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
