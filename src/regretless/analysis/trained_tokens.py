"""The loss mask of pairs, part by part: trained tokens and context."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from regretless.core.terminal import FoldingTable, terminal
from regretless.data.codec import Codec
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.layout import Ids, as_context, is_context, read_ids

BETWEEN = "·"
"""Printed between tokens."""
NAMES = {True: "trained", False: "context"}


def parts_of(pair: TokenizedPair, codec: Codec) -> list[dict[str, Any]]:
    """The prompt, then the parts of each response in order, where a part ends as trained tokens turn into context.

    Of each part its `side`, `tokens` (their number), `trained` (whether an objective sees them), `text`, with special
    tokens, and `pieces`: each token by itself (`Codec.shown`).
    """
    parts = list(_parts(pair))
    texts = codec.decode([read_ids(ids) for _, ids in parts])
    return [
        {
            "side": side,
            "trained": not is_context(ids[0]),
            "tokens": len(ids),
            "text": text,
            "pieces": codec.shown(read_ids(ids)),
        }
        for (side, ids), text in zip(parts, texts, strict=True)
    ]


def _parts(pair: TokenizedPair) -> Iterator[tuple[str, Ids]]:
    yield "prompt", as_context(pair.prompt_ids)
    for name, side in zip(("chosen", "rejected"), pair.sides, strict=False):
        for _, part in groupby(side.ids, is_context):
            yield name, tuple(part)


def show_parts(shown: Sequence[Mapping[str, Any]]) -> None:
    """Print pairs token by token, each with its row as `source`, the `value` that they are sorted by, if any, and its
    `parts` as `parts_of` returns them."""
    for pair in shown:
        value = "" if pair["value"] is None else f" ({pair['value']:g})"
        terminal().print(
            f"{pair['source']}{value}", soft_wrap=True
        )  # a path; a table's title would be broken into lines
        table = FoldingTable("side", "", "tokens", "text, token by token")
        before = None
        for part in pair["parts"]:
            side = "" if part["side"] == before else part["side"]
            style = "bold" if part["trained"] else "dim"
            # Line breaks and control characters as escapes; the quotes of tool calls as they are.
            text = json.dumps(BETWEEN.join(part["pieces"]), ensure_ascii=False)[1:-1].replace('\\"', '"')
            table.add_row(side, NAMES[part["trained"]], str(part["tokens"]), text, style=style)
            before = part["side"]
        terminal().print(table)
