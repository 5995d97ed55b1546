"""The matrix products that a training step needs at least, and how long this machine takes for them.

A perfect implementation computes each distinct token once, keeps what the backward pass needs, and does nothing but
matrix products. Its time is the limit that `train_vs_trl.py` compares with. docs/performance.md derives the products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pairs import Pair
from torch import Tensor

from regretless.modeling.layout import lay_out, tokens_before

ROWS = {"cpu": 2048, "cuda": 16384}
"""Tokens of a measured product at most, as in a micro-batch; more tokens take proportionally longer."""
CALLS = {"cpu": 1, "cuda": 20}
"""Calls between two readings of the clock: to wait for a GPU takes as long as a small product."""
OUTPUTS = 1 << 27
"""Elements of a measured product's result at most: a head's logits of 2,048 tokens would take gigabytes."""
SECONDS = 0.1
"""Time for which each product is repeated."""


@dataclass(frozen=True)
class Product:
    """A product of a (rows, inner) with a (inner, columns) matrix, and how often a step needs it."""

    part: str
    rows: int
    inner: int
    columns: int
    times: float
    heads: int = 1
    """Matrices in a batch of them."""
    sums_tokens: bool = False
    """The tokens are the inner dimension, not the rows."""

    @property
    def flops(self) -> float:
        """Operations of a step: a multiplication and an addition for each triple of indices."""
        return 2.0 * self.rows * self.inner * self.columns * self.heads * self.times


def products(shape: dict[str, Any], vocabulary: int, rank: int, pairs: Sequence[Pair]) -> list[Product]:
    """Products of a step on `pairs` with LoRA of this rank on all linear layers of the decoder, and a frozen head.

    shape: settings of a Qwen3 model. Each distinct token runs through every layer once.
    """
    sides = ("chosen_ids", "rejected_ids")
    layout, _ = lay_out([(tuple(pair["prompt_ids"]), tuple(pair[side])) for pair in pairs for side in sides])
    tokens, predicted, layers = layout.tokens, len(layout.targets), shape["num_hidden_layers"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, size = shape["num_attention_heads"], shape["head_dim"]
    queries, keys = heads * size, shape["num_key_value_heads"] * size
    found = []
    # The first layer's queries, keys and values are made from frozen embeddings, which need no gradient.
    linear = [(hidden, queries, layers - 1), (hidden, keys, layers - 1), (hidden, keys, layers - 1)]
    linear += [(queries, hidden, layers), (hidden, inner, layers), (hidden, inner, layers), (inner, hidden, layers)]
    for before, after, back in linear:
        found += [
            Product("frozen weights", tokens, before, after, layers),
            Product("frozen weights", tokens, after, before, back),
            Product("adapters", tokens, before, rank, layers),
            Product("adapters", tokens, rank, after, layers),
            Product("adapters", tokens, after, rank, layers),
            Product("adapters", tokens, rank, before, back),
            Product("adapters", rank, tokens, before, layers, sums_tokens=True),
            Product("adapters", after, tokens, rank, layers, sums_tokens=True),
        ]
    found += [
        Product("head", predicted, hidden, vocabulary, 1),
        Product("head", predicted, vocabulary, hidden, 1),
    ]
    # What a token sees: all before it in its sequences. Scores and values, and in the backward pass two products for
    # the gradients of each. Measured on the longest prefix that a token of mean length sees.
    seen, causal = 0, 0
    for segment, before in zip(layout.segments, tokens_before(layout.segments), strict=True):
        seen += segment.length * before + segment.length * (segment.length + 1) // 2
        causal += segment.length * (before + segment.length)
    sequences = len(layout.segments)
    rows = max(1, round(tokens / sequences))
    columns = max(1, round(causal / tokens))
    times = layers * seen / (rows * columns)
    found += [
        Product("attention", rows, size, columns, 2 * times, heads),
        Product("attention", rows, columns, size, 2 * times, heads),
        Product("attention", columns, rows, size, 2 * times, heads),
    ]
    return found


def seconds(
    needed: Sequence[Product], dtype: torch.dtype, device: str, threads: int, steps: float = 1
) -> dict[str, float]:
    """Time that torch takes for these products by part, each one measured at its shape; `threads` as for `clock`.

    steps: that the products are computed in. None is measured with more tokens than a step has.
    """
    known: dict[tuple[int, ...], float] = {}
    found: dict[str, float] = {}
    for product in needed:
        sizes = (product.heads, product.rows, product.inner, product.columns)
        if sizes not in known:
            known[sizes] = _seconds(product, dtype, device, threads, steps)
        found[product.part] = found.get(product.part, 0.0) + known[sizes] * product.times
    return found


def clock(device: str, threads: int) -> float:
    """Seconds: processor time where one thread computes, which other work on the machine changes least."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if device == "cpu" and threads == 1 else time.perf_counter()


def _seconds(product: Product, dtype: torch.dtype, device: str, threads: int, steps: float) -> float:
    """Least time of one product; of a part of its tokens where there are many, in proportion."""
    rows, inner, columns, scale = product.rows, product.inner, product.columns, 1.0
    if product.heads == 1:  # the tokens of attention's products are those of one sequence
        tokens = inner if product.sums_tokens else rows
        measured = min(ROWS[device], max(1, round(tokens / steps)))
        if product.sums_tokens:
            inner = measured
        else:
            rows = measured = min(measured, max(1, OUTPUTS // columns))
        scale = tokens / measured
    batch = () if product.heads == 1 else (product.heads,)
    left = torch.randn(*batch, rows, inner, device=device).to(dtype)
    right = torch.randn(*batch, inner, columns, device=device).to(dtype)
    out: Tensor = left @ right
    least = float("inf")
    end = time.perf_counter() + SECONDS
    while True:
        start = clock(device, threads)
        for _ in range(CALLS[device]):
            torch.matmul(left, right, out=out)
        least = min(least, (clock(device, threads) - start) / CALLS[device])
        if time.perf_counter() > end:
            return least * scale
