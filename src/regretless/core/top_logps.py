"""The most likely tokens at each position of a response, with their log-probabilities, as bytes: 8 for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ENTRY = np.dtype([("id", "<i4"), ("logp", "<f4")])
"""A listed token: its id, and its log-probability (nats), −∞ for one that cannot be drawn."""
ABOVE_ONE = 1e-3
"""By how much the listed probabilities may exceed 1: engines that compute in half precision round so."""


def packed(ids: NDArray[np.integer], logps: NDArray[np.floating]) -> NDArray[np.void]:
    """Entries (T, k) of ids and log-probabilities (T, k); `tobytes` of them, or of some rows, is what columns hold."""
    entries = np.empty(ids.shape, ENTRY)
    entries["id"], entries["logp"] = ids, logps
    return entries


def packed_top(listed: Sequence[Sequence[tuple[int, float]]]) -> bytes:
    """What a column holds of a response whose tokens each list equally many (id, log-probability)."""
    values = np.array(listed, np.float64)
    return packed(values[..., 0].astype(np.int64), np.minimum(values[..., 1], 0)).tobytes()


def unpacked(data: bytes, tokens: int) -> NDArray[np.void]:
    """Entries (T, k) of a response of so many tokens, from the bytes of a column; `top_problem` is None for them."""
    return np.frombuffer(data, ENTRY).reshape(tokens, -1)


def first_rows(data: bytes, count: int, tokens: int) -> bytes:
    """The bytes of the first `count` of a response's tokens."""
    return data[: len(data) // tokens * count]


def top_problem(name: str, data: bytes, tokens: int) -> str | None:
    """The problem with the lists of a response of so many tokens, in the column `name`, or None."""
    if not data or len(data) % (ENTRY.itemsize * tokens):
        return (
            f"{name}: expected {ENTRY.itemsize} bytes for each listed token, and equally many listed at each of "
            f"{tokens} tokens; got {len(data)} bytes"
        )
    entries = unpacked(data, tokens)
    ids = np.sort(entries["id"], axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        sums = np.exp(entries["logp"].astype(np.float64)).sum(axis=1)
    problems = {
        "ids from 0, each once": (ids[:, 0] < 0) | (ids[:, 1:] == ids[:, :-1]).any(axis=1),
        "log-probabilities in nats, whose probabilities sum up to at most 1": ~(sums <= 1 + ABOVE_ONE),
    }
    for expected, wrong in problems.items():
        if wrong.any():
            at = int(wrong.argmax())
            return f"{name}: token {at} lists {entries[at][:3].tolist()}…; expected {expected}"
    return None
