"""Readers of preference data: this package's files, TRL and hub data sets, and the RePO authors' released JSONL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from regretless.core.text_cleaning import whole_row
from regretless.data.columns import Pair, Side, SideName, Text, text_key
from regretless.data.labeled_pairs import from_labeled
from regretless.data.messages import read_template_arguments
from regretless.data.preference_formats import (
    EQUAL,
    Keys,
    check_cuts,
    check_no_repetition,
    from_openai,
    read_side,
    read_texts,
)
from regretless.data.rejected_rows import Refusal, of_one_kind, other_kind
from regretless.data.rows import read_rows
from regretless.data.schema import PAIR, Unusable, name_or
from regretless.data.sources import open_source

MEDIA = ("image", "images", "video", "videos", "audio", "pixel_values")
"""Columns of data for models that read more than text."""
ROW = re.compile(r".+:\d+", re.DOTALL)
"""A file and a line in it."""
ROWS_AT_ONCE = 512
"""Rows in memory at a time if not all of them fit: several hundred megabytes for responses of a thousand tokens."""


def read_pairs(
    source: str | Path,
    *,
    split: str = "train",
    subset: str | None = None,
    need_rejected: bool = True,
    prompt_key: str | None = None,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
) -> tuple[list[Pair], list[Refusal]]:
    """Pairs of a local file (.parquet, .jsonl, .json, .csv), a folder or a hub data set, and the rejected rows, in file
    order.

    Accepted: this package's pairs; TRL's preference columns, strings or messages, with an explicit or
    implicit prompt (the common beginning of both sides); OpenAI's preference format; ShareGPT's; Alpaca-style
    `instruction`/`input`; and `chosen_logprob_with_token` `{tokens, logprobs}` of the RePO authors' release.
    Log-probabilities are in nats, one per token. `prompt_key` may name several columns, separated by commas: their
    non-empty texts are joined with a line break. With `need_rejected=False` (supervised training) the
    rejected side is neither required nor returned.

    Raises DataError if the source is missing or of an unknown kind. The caller checks for an empty result, see
    `check_some_left`.
    """
    keys = Keys(prompt_key, chosen_key, rejected_key, need_rejected)
    return _parse(_numbered(open_source(source, split, subset)), keys, str(source))


def parse_pairs(
    rows: Iterable[Any], *, source: str = "rows", need_rejected: bool = True
) -> tuple[list[Pair], list[Refusal]]:
    """Pairs of rows in memory (mappings with the columns that `read_pairs` reads), and the rejected rows.

    `source` names the rows in messages, with their 1-based number.
    """
    return _parse(_numbered(rows), Keys(None, "chosen", "rejected", need_rejected), source)


def pair_chunks(
    rows: Path | Iterable[Any], *, source: str, need_rejected: bool = True
) -> Iterator[tuple[list[Pair], list[Refusal]]]:
    """`parse_pairs` of a file or of rows, in order, `ROWS_AT_ONCE` rows at a time: for data that exceeds the memory."""
    keys, numbered = Keys(None, "chosen", "rejected", need_rejected), _numbered(rows)
    while chunk := list(islice(numbered, ROWS_AT_ONCE)):
        yield _parse(chunk, keys, source)


def _parse(rows: Iterable[tuple[int, Any]], keys: Keys, source: str) -> tuple[list[Pair], list[Refusal]]:
    pairs: list[Pair] = []
    refused: list[Refusal] = []
    responses: dict[str, Side] = {}
    for number, row in rows:
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        try:
            pairs.append(_pair(row, keys, origin := _origin(row, source, number), number, responses))
        except Unusable as reason:
            refused.append(Refusal.at(origin, str(reason), row if isinstance(row, dict) else None))
    return pairs, refused


def _origin(row: Any, source: str, number: int) -> str:
    """Where a row comes from: the row of the user's file that an earlier stage has read, or this one."""
    said = row.get("source_row") if isinstance(row, Mapping) else None
    return said if isinstance(said, str) and ROW.fullmatch(said) else f"{source}:{number}"


def split_kinds(pairs: Sequence[Pair], refused: Sequence[Refusal]) -> tuple[list[Pair], list[Refusal]]:
    """Pairs that one table can hold, all of them texts or all of them conversations; the others are rejected too.

    Texts among conversations become conversations: the model has a chat template in any case.
    """
    if any(not isinstance(pair.prompt, str) for pair in pairs):
        pairs = [_as_conversation(pair) for pair in pairs]
    kept, others = of_one_kind(pairs, lambda pair: (isinstance(pair.prompt, str), isinstance(pair.chosen.text, str)))
    more = [Refusal.at(pair.origin, other_kind(pair.prompt), _texts(pair)) for pair in others]
    return kept, sorted([*refused, *more], key=lambda refusal: refusal.line)


def _as_conversation(pair: Pair) -> Pair:
    """A pair of texts as messages, without recorded tokens; any other as it is."""
    sides = pair.sides.values()
    if not isinstance(pair.prompt, str) or any(side.pieces or not isinstance(side.text, str) for side in sides):
        return pair
    answers: dict[str, Any] = {
        name: replace(side, text=[{"role": "assistant", "content": side.text}]) for name, side in pair.sides.items()
    }
    return replace(pair, prompt=[{"role": "user", "content": pair.prompt}], **answers)


def _texts(pair: Pair) -> dict[str, Text]:
    return {"prompt": pair.prompt, **{name: side.text for name, side in pair.sides.items()}}


def _numbered(rows: Path | Iterable[Any]) -> Iterator[tuple[int, Any]]:
    return read_rows(rows) if isinstance(rows, Path) else enumerate(map(_cleaned, rows), 1)


def _cleaned(row: Any) -> Any:
    """A row in memory with whole characters only; unchanged if it cannot be used anyway."""
    if not isinstance(row, Mapping):
        return row
    try:
        return whole_row(row)
    except ValueError as error:
        return error


def _pair(row: Any, keys: Keys, origin: str, number: int, responses: dict[str, Side]) -> Pair:
    if isinstance(row, ValueError):
        raise Unusable(str(row))
    if not isinstance(row, Mapping):
        raise Unusable(f"expected an object with columns, got {type(row).__name__}")
    for name in MEDIA:
        media = row.get(name)
        if media is not None and (not isinstance(media, Sequence | np.ndarray) or len(media)):
            raise Unusable(f"{name}: only text is read; remove the column if the texts do not need it")
    row = from_labeled(from_openai(row), keys.chosen, keys.prompt)
    prompt, chosen, rejected = read_texts(row, keys)
    columns = PAIR.check(row)
    masked = columns.pop("rejected_mask_len")
    kind = columns["kind"] or ("masked" if masked else "original")
    arguments = read_template_arguments(row)
    key = text_key(prompt if arguments is None else f"{text_key(prompt)} {arguments}")
    prompt_id = name_or(columns["prompt_id"], key)
    texts: dict[SideName, Text] = {"chosen": chosen} if rejected is None else {"chosen": chosen, "rejected": rejected}
    sides = {
        name: read_side(row, name, text, f"{prompt_id}-{text_key(text)}", responses) for name, text in texts.items()
    }
    check_cuts(sides, kind, columns["prefix_tokens"])
    if rejected is not None:
        check_no_repetition(prompt, sides)
        if chosen == rejected and kind != "masked":
            raise Unusable(EQUAL)
    columns |= {
        "pair_id": name_or(columns["pair_id"], f"row-{number}"),
        "prompt_id": prompt_id,
        "chat_template_kwargs": arguments,
        "kind": kind,
        # Of any type: a column of this name may be there for another purpose.
        "topic": None if row.get("topic") is None else str(row["topic"]),
        "origin": origin,
    }
    return Pair(prompt=prompt, chosen=sides["chosen"], rejected=sides.get("rejected"), **columns)
