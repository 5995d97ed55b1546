"""Attention over a shared-prefix row on a GPU: FlexAttention with the rule "i sees j if j ≤ i < reach[j]"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface

from regretless.modeling.layout import Segment, tokens_before

NAME = "regretless_flex"
VARIANTS = 64
"""How often FlexAttention may be compiled; torch's own limit is 8."""
BLOCK = 128
"""Block size of the attention matrix, for computing or skipping; a row's length is a multiple of it."""


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), all indices → whether the query sees the key."""


def padded_length(tokens: int) -> int:
    """Length of a row with this many tokens: whole blocks, two or more, for torch compiles one block separately."""
    return max(2 * BLOCK, tokens + -tokens % BLOCK)


class RowMask:
    """Visibility of positions in a padded row: one rule for shared prompts and beginnings, packing and padding.

    A token reaches to the end of all segments that continue its own, which lie directly behind it, and padding only
    itself.
    """

    def __init__(self, segments: Sequence[Segment], length: int, device: torch.device) -> None:
        """Rule of a row of `length` positions, a multiple of `BLOCK`, that starts with `segments`."""
        ends, positions = torch.arange(1, length + 1), torch.zeros(length, dtype=torch.long)
        stops = list(accumulate(segment.length for segment in segments))
        reach = stops.copy()
        for number, segment in reversed([*enumerate(segments)]):
            if segment.parent is not None:
                reach[segment.parent] = max(reach[segment.parent], reach[number])
        for segment, before, stop, end in zip(segments, tokens_before(segments), stops, reach, strict=True):
            ends[stop - segment.length : stop] = end
            positions[stop - segment.length : stop] = torch.arange(before, before + segment.length)
        self._ends, self._positions = ends, positions
        self._device = device
        self._masks: dict[int | None, BlockMask] = {}

    def blocks(self, window: int | None) -> BlockMask:
        """The mask for FlexAttention; `window` is a sliding window's number of positions."""
        if window not in self._masks:
            self._masks[window] = self._block_mask(window)
        return self._masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        reach, positions = self._ends.to(self._device), self._positions.to(self._device)
        sees = _sees(reach) if window is None else _sees_from(reach, positions, positions - (window - 1))

        # Which blocks are nonempty, and which are fully visible, follows from each block's extremes: the
        # (N, N) matrix itself, a quarter of a gigabyte for 16,384 tokens, is never built.
        ends = self._ends.view(-1, BLOCK)
        count = ends.shape[0]
        first = torch.arange(count) * BLOCK
        below = torch.ones(count, count, dtype=torch.bool).tril(-1)
        some = below & (ends.amax(1)[None, :] > first[:, None]) | torch.eye(count, dtype=torch.bool)
        full = below & (ends.amin(1)[None, :] >= first[:, None] + BLOCK)
        if window is not None:
            by_block = self._positions.view(-1, BLOCK)
            least, most = by_block.amin(1), by_block.amax(1)
            some &= least[:, None] - most[None, :] < window
            full &= most[:, None] - least[None, :] < window
        partial_count, partial_index = _indices((some & ~full).to(self._device))
        full_count, full_index = _indices(full.to(self._device))
        return BlockMask.from_kv_blocks(
            partial_count,
            partial_index,
            full_count,
            full_index,
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
        )


# A compiled function is compiled again for a rule with other code or other numbers in it, but not for other tensors:
# all that differs between rows is in tensors.


def _sees(reach: Tensor) -> Rule:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key])

    return sees


def _sees_from(reach: Tensor, positions: Tensor, first: Tensor) -> Rule:
    """`first`: (N,) the first position within each token's window."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < reach[key]) & (positions[key] >= first[query])

    return sees


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number (1, 1, Q) of true key blocks in each row of a (Q, K) matrix, and (1, 1, Q, K) their indices first."""
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], order[None, None]


def flex_grouped_attention(
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
    row_mask: RowMask | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`; query (1, H, N, D), key and value (1, H_kv, N, D).

    `row_mask` reaches it as an extra keyword of the model's forward. `s_aux` (H,) are attention sinks, as in
    `cpu_attention`. Returns (1, N, H, D).
    Raises ValueError if the model was called without `row_mask`, and for attention dropout: FlexAttention has none.
    """
    if row_mask is None:
        raise ValueError("grouped attention was called without `row_mask`; call the model through regretless.modeling")
    if dropout:
        raise ValueError(f"attention dropout is {dropout}, and FlexAttention has none: set attention_dropout to 0")
    for states in (query, key, value):
        # Only the length differs between rows. A number of heads that happens to be the number of a row's blocks would
        # otherwise be taken for the same quantity.
        torch._dynamo.mark_static(states, [0, 1, 3])
    options = {
        "score_mod": None if softcap is None else _soft_capped(softcap),
        "block_mask": row_mask.blocks(sliding_window),
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if s_aux is None:
        output = _flex(query.device.type)(query, key, value, **options)
    else:
        output, auxiliary = _flex(query.device.type)(query, key, value, **options, return_aux=AuxRequest(lse=True))
        # With a sink s, the softmax's denominator exp(lse) has one more summand: exp(lse) + exp(s).
        share = torch.sigmoid(auxiliary.lse - s_aux.to(auxiliary.lse.dtype)[None, :, None])
        output = output * share[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _flex(device: str) -> Callable[..., Any]:
    # On a CPU FlexAttention has no backward pass, so there this function is only used to check the rule.
    function: Callable[..., Any] = flex_attention
    return function if device == "cpu" else compiled()


def compiled(backend: Any = "inductor") -> Callable[..., Any]:
    """FlexAttention compiled once for rows of any length.

    It is compiled again for each type of numbers, with and without gradients, window or soft-capping. Beyond torch's
    limit of such variants it would run uncompiled, with a score for each pair of positions: with `fullgraph` it raises.
    """
    allow_variants()
    function: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    return function


def allow_variants() -> None:
    """Let torch compile a function more often than by default."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)


@cache
def _soft_capped(cap: float) -> Callable[..., Tensor]:
    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(value / cap) * cap

    return score


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(NAME, flex_grouped_attention)
