"""Tokenized pairs on disk: written once in row order, read by index; a few bytes per pair in memory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from regretless.core.files import atomic_path
from regretless.core.text_cleaning import clean_text
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.layout import Ids, own_ids

RECORDS, INDEX = "records.bin", "index.npz"
FORMAT = 10
"""Format version of the two files; a table of another format is not read."""


class PairTable:
    """Tokenized pairs by index. In memory are each pair's offset, lengths and two hashes: 40 bytes per pair."""

    def __init__(
        self, records: BinaryIO, index: dict[str, NDArray[Any]], key: str | None = None, source: str | None = None
    ) -> None:
        """`records`: open file of the packed pairs; `index`: the arrays beside it; `key`: its cache key.

        source: what the rows are called now, if that may have changed since they were read.
        """
        self._records, self.key, self._source = records, key, source
        self._starts: NDArray[np.int64] = index["starts"]
        self.tokens: NDArray[np.int32] = index["tokens"]
        """(pairs,) tokens of prompt, responses and their continuations together."""
        self.continued: NDArray[np.int32] = index["continued"]
        """(pairs,) tokens of the continuations."""
        self.prompt_tokens: NDArray[np.int32] = index["prompt_tokens"]
        """(pairs,) tokens of the prompt."""
        self.response_tokens: NDArray[np.int32] = index["response_tokens"]
        """(pairs,) tokens of the longer response, or of the longest that a continuation makes."""
        self.prompts: NDArray[np.uint64] = index["prompts"]
        """(pairs,) hash of the prompt's tokens."""
        self.chosen: NDArray[np.uint64] = index["chosen"]
        """(pairs,) hash of the prompt's tokens and all of the chosen side."""

    @classmethod
    def write(cls, pairs: Iterable[TokenizedPair], folder: Path) -> PairTable:
        """Write pairs, one at a time in memory, to a folder; the index is written last and marks it as complete."""
        with atomic_path(folder / RECORDS) as temporary, temporary.open("wb") as handle:
            index = _pack_all(pairs, handle)
        with atomic_path(folder / INDEX) as temporary, temporary.open("wb") as handle:
            np.savez(handle, **index)  # type: ignore[arg-type]
        return cls.open(folder)

    @classmethod
    def temporary(cls, pairs: Iterable[TokenizedPair]) -> PairTable:
        """The same in an unnamed file, which disappears with the process."""
        handle: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        index = _pack_all(pairs, handle)
        handle.flush()
        return cls(handle, index)

    @classmethod
    def open(cls, folder: Path, source: str | None = None) -> PairTable:
        """The table that `write` wrote to a folder. Raises FileNotFoundError if there is none, or only part of one."""
        with np.load(folder / INDEX) as stored:
            index = {name: stored[name] for name in stored.files}
        return cls((folder / RECORDS).open("rb"), index, folder.name, source)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> TokenizedPair:
        if not 0 <= number < len(self):
            raise IndexError(f"pair {number}: expected 0 to {len(self) - 1}")
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        # Read, not mapped: pages of a mapped file would count as this process's memory.
        pair, of_earlier_file = _unpack(os.pread(self._records.fileno(), end - start, start))
        if self._source is None or of_earlier_file:
            return pair
        origin = f"{self._source}:{pair.source.rpartition(':')[2]}"
        return replace(pair, source=origin, pair_id=origin if pair.pair_id == pair.source else pair.pair_id)

    def __iter__(self) -> Iterator[TokenizedPair]:
        return (self[number] for number in range(len(self)))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._records.close()


def _pack_all(pairs: Iterable[TokenizedPair], handle: BinaryIO) -> dict[str, NDArray[Any]]:
    starts, prompts, chosen = array("q", [0]), array("Q"), array("Q")
    tokens, continued, prompt_tokens, response_tokens = array("i"), array("i"), array("i"), array("i")
    for pair in pairs:
        data = _pack(pair)
        handle.write(data)
        starts.append(starts[-1] + len(data))
        continued.append(sum(side.continued for side in pair.sides))
        tokens.append(len(pair.prompt_ids) + sum(len(side.ids) for side in pair.sides) + continued[-1])
        prompt_tokens.append(len(pair.prompt_ids))
        response_tokens.append(max(side.longest for side in pair.sides))
        prompts.append(prompt_hash(pair.prompt_ids))
        # Without its rejected side and what names the row: equal for pairs of one prompt and chosen response.
        chosen.append(xxhash.xxh3_64_intdigest(_pack(_chosen_alone(pair))))
    return {
        "starts": np.array(starts, np.int64),
        "tokens": np.array(tokens, np.int32),
        "continued": np.array(continued, np.int32),
        "prompt_tokens": np.array(prompt_tokens, np.int32),
        "response_tokens": np.array(response_tokens, np.int32),
        "prompts": np.array(prompts, np.uint64),
        "chosen": np.array(chosen, np.uint64),
    }


def _chosen_alone(pair: TokenizedPair) -> TokenizedPair:
    return TokenizedPair("", pair.prompt_ids, pair.chosen, rejected=None, source="", kind="original")


def prompt_hash(prompt: Ids) -> int:
    """64-bit hash of a prompt's tokens: enough to group pairs by prompt."""
    return int(xxhash.xxh3_64_intdigest(np.array(prompt, np.int32).tobytes()))


def _pack(pair: TokenizedPair) -> bytes:
    """Lengths, ids, values, lists and continuations, and the rest as JSON with the names of those values."""
    sides = pair.sides
    head = np.array([len(pair.prompt_ids), len(sides), *(len(side.ids) for side in sides)], np.int32)
    ids = np.array([*pair.prompt_ids, *chain.from_iterable(side.ids for side in sides)], np.int32)
    values = np.array(list(chain.from_iterable(row for side in sides for row in side.values.values())), np.float32)
    packed = [(side.top or b"", side.continuations or b"") for side in sides]
    names = [[list(side.values), *map(len, of_side)] for side, of_side in zip(sides, packed, strict=True)]
    of_earlier_file = pair.row is not None and pair.row.source_row is not None
    of_pair = [pair.pair_id, pair.source, pair.kind, pair.logps_dropped, pair.topic, pair.preference_probability]
    rest = [*of_pair, names, of_earlier_file]
    text = clean_text(json.dumps(rest, ensure_ascii=False)).encode()
    return (
        head.tobytes()
        + ids.tobytes()
        + values.tobytes()
        + b"".join(chain(*packed))
        + text
        + np.int32(len(text)).tobytes()
    )


def _unpack(data: bytes) -> tuple[TokenizedPair, bool]:
    """A pair, and whether its `source` is not a row of the table's own source (`Pair.source_row`)."""
    offset = 0

    def take(count: int, kind: type[np.int32] | type[np.float32] = np.int32) -> tuple[Any, ...]:
        nonlocal offset
        values = np.frombuffer(data, kind, count, offset).tolist()
        offset += 4 * count
        return tuple(values)

    of_rest = int(np.frombuffer(data[-4:], np.int32)[0])
    pair_id, source, kind, dropped, topic, probability, names, of_earlier_file = json.loads(data[-4 - of_rest : -4])
    prompt, count = take(2)
    lengths = take(count)
    prompt_ids, *ids = [take(length) for length in (prompt, *lengths)]
    sides = [
        TokenizedSide(response, {name: take(len(own_ids(response)), np.float32) for name in names_of_side})
        for response, (names_of_side, *_) in zip(ids, names, strict=True)
    ]
    for number, (_, of_top, of_continuations) in enumerate(names):
        middle, end = offset + of_top, offset + of_top + of_continuations
        sides[number] = replace(sides[number], top=data[offset:middle] or None, continuations=data[middle:end] or None)
        offset = end
    pair = TokenizedPair(
        pair_id=pair_id,
        prompt_ids=prompt_ids,
        chosen=sides[0],
        rejected=sides[1] if len(sides) == 2 else None,
        source=source,
        kind=kind,
        logps_dropped=dropped,
        topic=topic,
        preference_probability=probability,
    )
    return pair, of_earlier_file
