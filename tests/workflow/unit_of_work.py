"""A unit of work, and processes that are killed in it. Light to import, as the process that forks them is a new one."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

from killed import AtWrite
from regretless.core.files import write_text
from regretless.workflow.run_folder import RunFolder
from single_unit import do_unit


def write_rows(folder: Path, killed: AtWrite | None = None, seed: int = 1) -> None:
    """Do the work in a run folder; the process is killed where `killed` says."""
    if killed is not None:
        killed()
    run = RunFolder(folder)

    def work(output: Path) -> dict[str, Any]:
        write_text(output / "rows.jsonl", f"{seed}\n2\n")
        return {"rows": 2}

    with run.locked():
        do_unit(run, "unit", {"seed": seed}, work)


def kill_before_each_write(folder: Path, replacing: bool) -> None:
    """Kill the work before its first write, before its second, and so on, until it ends: each in a run folder of that
    number. replacing: the unit is done with seed 1 before, and the work with seed 2 is killed."""
    context = multiprocessing.get_context("fork")
    for number in itertools.count():
        run = folder / str(number)
        if replacing:
            write_rows(run)
        process = context.Process(target=write_rows, args=(run, AtWrite(run, number), 1 + replacing))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            sys.exit(process.exitcode)
