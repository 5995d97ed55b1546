"""A unit of work in a process of its own. Light to import, as each process imports it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from killed import AtWrite
from regretless.core.files import write_text
from regretless.workflow.run_folder import RunFolder


def write_rows(folder: Path, killed: AtWrite | None = None, seed: int = 1) -> None:
    """Do the work in a run folder; the process is killed where `killed` says."""
    if killed is not None:
        killed()
    run = RunFolder(folder)

    def work(output: Path) -> dict[str, Any]:
        write_text(output / "rows.jsonl", f"{seed}\n2\n")
        return {"rows": 2}

    with run.locked():
        run.do("unit", {"seed": seed}, work)
