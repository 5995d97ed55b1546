"""Packs an optimizer step's pairs into as few rows as their lengths allow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from regretless.modeling.layout import Item, token_count
from regretless.modeling.rows import RowKind, row_length
from regretless.modeling.scoring import fill_rows


def pack_rows(units: Sequence[Sequence[Item]], max_tokens: int, kind: RowKind = "grouped") -> list[list[int]]:
    """Split units (the responses of one pair each) into rows of at most `max_tokens` distinct tokens.

    Neighboring units of one prompt stay together if they fit into a row. The longest are placed first, each in the
    first row with enough space; a unit larger than a row gets a row of its own. Plain rows are computed together by
    length, so that few are padded. Returns the units' indices by row.
    """
    if kind == "plain":
        order = sorted(range(len(units)), key=lambda index: -max(map(row_length, units[index])))
        packed = fill_rows([units[index] for index in order], max_tokens, kind)
        return [[order[place] for place in row] for row in packed]
    pieces: list[tuple[int, list[int]]] = []
    for _, run in groupby(range(len(units)), key=lambda index: units[index][0][0]):
        together = list(run)
        for row in fill_rows([units[index] for index in together], max_tokens):
            piece = [together[place] for place in row]
            pieces.append((token_count([item for index in piece for item in units[index]]), piece))
    rows: list[tuple[int, list[int]]] = []
    for size, piece in sorted(pieces, key=lambda entry: -entry[0]):
        fitting = next((number for number, (used, _) in enumerate(rows) if used + size <= max_tokens), None)
        if fitting is None:
            rows.append((size, piece))
        else:
            used, row = rows[fitting]
            rows[fitting] = (used + size, row + piece)
    return [row for _, row in rows]
