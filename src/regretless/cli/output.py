"""What a command leaves on standard output: its result, as tables or as one JSON document, and nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regretless.core.ranks import is_first_process
from regretless.core.terminal import FoldingTable, console, print_json, terminal
from regretless.workflow.run_folder import Outcome, RunFolder

STDOUT, STDERR = 1, 2
"""File descriptors."""


@contextlib.contextmanager
def only_results() -> Iterator[None]:
    """A block of work whose prints, also those of libraries and of started processes, go to standard error.

    Standard output is then free for the result, which is printed after the block.
    """
    sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError):  # a closed descriptor has no reader whom prints could disturb
        kept = os.dup(STDOUT)
        os.dup2(STDERR, STDOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, STDOUT)
            os.close(kept)


def show_outcomes(folder: RunFolder, output: Path | str, *, as_json: bool) -> None:
    """Print what the stages of one command did: where the result is, and its numbers. Only rank 0 prints."""
    if not is_first_process():
        return
    if as_json:
        print_json({"output": str(output), "stages": stages_json(folder.outcomes)})
        return
    for name, outcome in folder.outcomes.items():
        table = FoldingTable(title=name, title_justify="left", show_header=False)
        table.add_column("name")
        table.add_column("value")
        for key, value in _shown(outcome.summary).items():
            table.add_row(key, value)
        if table.rows:
            terminal().print(table)
    console.print(f"wrote {output}", soft_wrap=True)


def stages_json(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The outcome of each unit of work, for programs."""
    return {
        name: {"ran": outcome.ran, "seconds": round(outcome.seconds, 3), "summary": outcome.summary}
        for name, outcome in outcomes.items()
    }


def _shown(summary: Mapping[str, Any]) -> dict[str, str]:
    """The plain numbers, texts and short counts of a summary."""
    shown: dict[str, str] = {}
    for key, value in summary.items():
        if isinstance(value, Mapping) and value and all(isinstance(number, int | float) for number in value.values()):
            shown[key] = ", ".join(f"{name} {_text(number)}" for name, number in value.items())
        elif isinstance(value, int | float | str):
            shown[key] = _text(value)
    return shown


def _text(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
