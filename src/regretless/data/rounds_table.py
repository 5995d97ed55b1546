"""The table of what was measured of rounds, and the folder of each round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROUNDS, TABLE = "rounds", "rounds.jsonl"


def folder_of(number: int, method: str | None) -> str:
    """Folder of a method's round in the run folder; all methods share that of the first round."""
    return f"{ROUNDS}/1" if number == 1 else f"{ROUNDS}/{number}/{method}"


def measured_rounds(run: Path) -> list[dict[str, Any]]:
    """Rows of `rounds.jsonl` of a run, in their order; none without rounds."""
    from regretless.data.rows import read_rows  # it imports pyarrow, and the command line asks for names alone

    path = run / ROUNDS / TABLE
    return [row for _, row in read_rows(path) if isinstance(row, dict)] if path.is_file() else []
