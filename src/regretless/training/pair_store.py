"""Tokenized pairs on disk: written once in the order of their rows, read by number; a few bytes a pair in memory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from regretless.core.files import atomic_path
from regretless.core.text_gate import clean_text
from regretless.data.codec import Ids
from regretless.data.tokenization import TokenizedPair

RECORDS, INDEX = "records.bin", "index.npz"
CHOSEN_LOGPS, REJECTED_LOGPS = 1, 2
"""Flags of a record: which sides' log-probabilities it holds."""


class PairTable:
    """Tokenized pairs by number. In memory are where each begins, its size and its prompt's hash: 20 bytes a pair."""

    def __init__(self, records: BinaryIO, index: dict[str, NDArray[Any]], key: str | None = None) -> None:
        """`records`: open file of the packed pairs; `index`: the arrays beside it; `key`: what it is kept under."""
        self._records, self.key = records, key
        self._starts: NDArray[np.int64] = index["starts"]
        self.tokens: NDArray[np.int32] = index["tokens"]
        """(pairs,) tokens of prompt and responses together."""
        self.prompts: NDArray[np.uint64] = index["prompts"]
        """(pairs,) hash of the prompt's tokens."""

    @classmethod
    def write(cls, pairs: Iterable[TokenizedPair], folder: Path) -> PairTable:
        """Write pairs, of which one at a time is looked at, to a folder; the index, last, marks it as complete."""
        with atomic_path(folder / RECORDS) as temporary, temporary.open("wb") as handle:
            index = _pack_all(pairs, handle)
        with atomic_path(folder / INDEX) as temporary, temporary.open("wb") as handle:
            np.savez(handle, **index)  # type: ignore[arg-type]
        return cls.open(folder)

    @classmethod
    def temporary(cls, pairs: Iterable[TokenizedPair]) -> PairTable:
        """The same in a file without a name, that goes away with the process."""
        handle: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        index = _pack_all(pairs, handle)
        handle.flush()
        return cls(handle, index)

    @classmethod
    def open(cls, folder: Path) -> PairTable:
        """The table that `write` left in a folder. Raises FileNotFoundError when there is none, or not all of one."""
        with np.load(folder / INDEX) as stored:
            index = {name: stored[name] for name in stored.files}
        return cls((folder / RECORDS).open("rb"), index, folder.name)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> TokenizedPair:
        if not 0 <= number < len(self):
            raise IndexError(f"pair {number}: expected 0 to {len(self) - 1}")
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        # Read, not mapped: pages of a mapped file would count as this process's memory.
        return _unpack(os.pread(self._records.fileno(), end - start, start))

    def __iter__(self) -> Iterator[TokenizedPair]:
        return (self[number] for number in range(len(self)))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._records.close()


def _pack_all(pairs: Iterable[TokenizedPair], handle: BinaryIO) -> dict[str, NDArray[Any]]:
    starts, tokens, prompts = array("q", [0]), array("i"), array("Q")
    for pair in pairs:
        data = _pack(pair)
        handle.write(data)
        starts.append(starts[-1] + len(data))
        tokens.append(len(pair.prompt_ids) + len(pair.chosen_ids) + len(pair.rejected_ids or ()))
        prompts.append(prompt_hash(pair.prompt_ids))
    return {
        "starts": np.frombuffer(starts, np.int64),
        "tokens": np.frombuffer(tokens, np.int32) if tokens else np.empty(0, np.int32),
        "prompts": np.frombuffer(prompts, np.uint64) if prompts else np.empty(0, np.uint64),
    }


def prompt_hash(prompt: Ids) -> int:
    """64-bit hash of a prompt's tokens: enough to tell which pairs belong together."""
    return int(xxhash.xxh3_64_intdigest(np.array(prompt, np.int32).tobytes()))


def _pack(pair: TokenizedPair) -> bytes:
    """Lengths and flags, the ids, the log-probabilities, and the texts as JSON."""
    rejected = -1 if pair.rejected_ids is None else len(pair.rejected_ids)
    flags = (pair.chosen_logps is not None) * CHOSEN_LOGPS + (pair.rejected_logps is not None) * REJECTED_LOGPS
    head = np.array([len(pair.prompt_ids), len(pair.chosen_ids), rejected, flags], np.int32)
    ids = np.array([*pair.prompt_ids, *pair.chosen_ids, *(pair.rejected_ids or ())], np.int32)
    logps = np.array([*(pair.chosen_logps or ()), *(pair.rejected_logps or ())], np.float32)
    texts = json.dumps([pair.pair_id, pair.source, pair.kind, pair.logps_dropped], ensure_ascii=False)
    return head.tobytes() + ids.tobytes() + logps.tobytes() + clean_text(texts).encode()


def _unpack(data: bytes) -> TokenizedPair:
    prompt, chosen, rejected, flags = np.frombuffer(data, np.int32, 4).tolist()
    place = 16

    def take(count: int, kind: type[np.int32] | type[np.float32]) -> tuple[Any, ...]:
        nonlocal place
        values = np.frombuffer(data, kind, count, place).tolist()
        place += 4 * count
        return tuple(values)

    prompt_ids, chosen_ids = take(prompt, np.int32), take(chosen, np.int32)
    rejected_ids = None if rejected < 0 else take(rejected, np.int32)
    chosen_logps = take(chosen, np.float32) if flags & CHOSEN_LOGPS else None
    rejected_logps = take(rejected, np.float32) if flags & REJECTED_LOGPS else None
    pair_id, source, kind, dropped = json.loads(data[place:])
    return TokenizedPair(
        pair_id=pair_id,
        prompt_ids=prompt_ids,
        chosen_ids=chosen_ids,
        rejected_ids=rejected_ids,
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        source=source,
        kind=kind,
        logps_dropped=dropped,
    )
