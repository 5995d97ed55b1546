"""The checkpoint that training goes on from."""

from __future__ import annotations

from pathlib import Path

from regretless.trained import complete_checkpoints


def last_complete_checkpoint(folder: Path) -> str | None:
    """The checkpoint-N with the largest N that was written to its end, or None."""
    found = list(complete_checkpoints(folder).values())
    return str(found[-1]) if found else None
