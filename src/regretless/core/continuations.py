"""Continuations of a response's beginnings by its writer, as bytes: 8 for each of their tokens, and 8 for each one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

HIGHEST_LOGP, LOWEST_LOGP = 1e-3, -1e9
"""Nats. As for the log-probabilities of responses: engines round those of certain tokens to a little above 0."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """What a writer drew behind the first tokens of a response."""

    start: int
    """Tokens of the response before it, one or more."""
    ids: NDArray[np.int32]
    """Its tokens (L,), one or more, the end of sequence included if it was drawn."""
    logps: NDArray[np.float32]
    """Log-probability of each (L,) under the writer, nats."""

    @property
    def end(self) -> int:
        """Tokens of the response that it makes: those before it and its own."""
        return self.start + len(self.ids)


def packed(continuations: Iterable[Continuation]) -> bytes:
    """What a column holds, in order of their starts: their number, the starts, lengths, ids (int32), nats (float32)."""
    given = sorted(continuations, key=lambda one: one.start)
    head = np.array([len(given), *(one.start for one in given), *(len(one.ids) for one in given)], np.int32)
    ids = [one.ids.astype(np.int32).tobytes() for one in given]
    logps = [one.logps.astype(np.float32).tobytes() for one in given]
    return b"".join((head.tobytes(), *ids, *logps))


def unpacked(data: bytes) -> list[Continuation]:
    """The continuations in a column; `continuation_problem` is None for it."""
    starts, lengths = _head(data)
    ends = np.cumsum(lengths)
    ids = np.frombuffer(data, np.int32, int(lengths.sum()), 4 * (1 + 2 * len(starts)))
    logps = np.frombuffer(data, np.float32, len(ids), len(data) - 4 * len(ids))
    bounds = zip(starts.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True)
    return [Continuation(start, ids[first:end], logps[first:end]) for start, first, end in bounds]


def _head(data: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Starts and lengths."""
    count = int(np.frombuffer(data, np.int32, 1)[0])
    starts, lengths = np.frombuffer(data, np.int32, 2 * count, 4).reshape(2, count)
    return starts, lengths


def continued_tokens(data: bytes | None) -> int:
    """Tokens of all continuations in a column."""
    return 0 if data is None else int(_head(data)[1].sum())


def cut(data: bytes | None, tokens: int) -> bytes | None:
    """The column of a response of which the first `tokens` are kept: continuations end there, too, or begin behind."""
    if data is None:
        return None
    kept = (one for one in unpacked(data) if one.start < tokens)
    return packed(
        replace(one, ids=one.ids[: tokens - one.start], logps=one.logps[: tokens - one.start]) for one in kept
    )


def behind(data: bytes | None, tokens: int) -> bytes | None:
    """The column of what follows the first `tokens` of a response, which are context: no unit ends before that."""
    if data is None:
        return None
    return packed(replace(one, start=one.start - tokens) for one in unpacked(data) if one.start > tokens)


def up_to(data: bytes | None, tokens: int) -> bytes | None:
    """The column with the contexts that units in the first `tokens` end in or before: up to the first at or behind."""
    if data is None:
        return None
    found = unpacked(data)
    last = min((one.start for one in found if one.start >= tokens), default=tokens)
    return packed(one for one in found if one.start <= last)


def continuation_problem(name: str, data: bytes, tokens: int) -> str | None:
    """The problem with the continuations of a response of so many tokens, in the column `name`, or None."""
    count = int(np.frombuffer(data, np.int32, 1)[0]) if len(data) >= 4 else -1
    if count < 0 or len(data) < 4 * (1 + 2 * count) or len(data) != 4 * (1 + 2 * count) + 8 * continued_tokens(data):
        return (
            f"{name}: expected the number of continuations, their starts, lengths, ids and log-probabilities, 4 bytes "
            f"each; got {len(data)} bytes that are not; write it with regretless.core.continuations.packed"
        )
    before = 0
    for number, one in enumerate(unpacked(data)):
        if not max(1, before) <= one.start < tokens or not len(one.ids):
            return (
                f"{name}: continuation {number} has {len(one.ids)} tokens behind {one.start}; expected one or more "
                f"behind 1 to {tokens - 1} of the response's {tokens}, in order"
            )
        before = one.start
        if one.ids.min() < 0 or not ((one.logps >= LOWEST_LOGP) & (one.logps <= HIGHEST_LOGP)).all():
            return (
                f"{name}: continuation {number} has ids from {one.ids.min()} and log-probabilities from "
                f"{one.logps.min():g} to {one.logps.max():g}; expected ids from 0, and nats, finite and up to 0"
            )
    return None
