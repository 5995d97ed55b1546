"""Pairs written as their flat columns, as files have them: `chosen`, `chosen_logps`, … instead of two sides."""

from __future__ import annotations

from typing import Any

from regretless.data.columns import SIDES, Pair, Side
from regretless.data.rows import pair_row


def pair_of(**columns: Any) -> Pair:
    """The pair with these columns."""
    values = {name: value for name, value in columns.items() if not name.startswith(SIDES)}
    for side in SIDES:
        fields = {
            name.removeprefix(f"{side}_"): value for name, value in columns.items() if name.startswith(f"{side}_")
        }
        if columns.get(side) is not None:
            values[side] = Side(text=columns[side], **fields)
    return Pair(**values)


def changed(pair: Pair, **columns: Any) -> Pair:
    """The pair with other values in some of its columns."""
    row = pair_row(pair) | columns
    if row["rejected"] is None:
        row = {name: value for name, value in row.items() if not name.startswith("rejected_")}
    return pair_of(**row, **({} if "origin" in columns else {"origin": pair.origin}))
