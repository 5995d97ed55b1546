"""Tables of numbers on the terminal, in one style for all results of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regretless.core.terminal import FoldingTable, terminal


def show_table(title: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print one row per entry with its values in `columns`; nothing if no row has any of them.

    They are the result of `inspect` and `analyze`, and so go to standard output.
    """
    cells = {name: [values.get(column) for column in columns] for name, values in rows.items()}
    if all(cell is None for row in cells.values() for cell in row):
        return
    table = FoldingTable(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in cells.items():
        table.add_row(
            name, *("–" if cell is None else cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row)
        )
    terminal().print(table)


def with_error(estimate: Mapping[str, Any] | None) -> str | None:
    """An estimate as text, value ± standard error."""
    if estimate is None or estimate["value"] is None:
        return None
    error = estimate["standard_error"]
    return f"{estimate['value']:.3g}" + ("" if error is None else f" ± {error:.2g}")
