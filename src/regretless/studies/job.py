"""One job of a study, in a process of its own: some stages of one recipe, with the units that other jobs have done."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from regretless.core.errors import RegretlessError, storage_error
from regretless.core.files import write_json
from regretless.core.run_folder import RunFolder
from regretless.core.terminal import console, never_fail_to_print
from regretless.core.unit_store import UnitStore
from regretless.runs import pipeline
from regretless.runs.recipe import Recipe
from regretless.smoke.miniature import surroundings

OUTCOME, LOG = "outcome.json", "output.log"


@dataclass(frozen=True)
class Job:
    """Stages of a recipe, in the run folder that it names."""

    name: str
    recipe: Recipe
    """Its run folder is locked by whoever starts the job, and other jobs may be at work on other units of it."""
    stages: Sequence[str] | None
    """Those that run; None for all, which also moves aside what an earlier recipe left."""
    folder: Path
    """Where its messages and its outcome are written."""
    store: Path
    smoke: bool = False
    gpus: Sequence[int] | None = None
    """The devices that it may use; None for all."""
    needs: Sequence[str] = ()
    """Names of the jobs that have to succeed before."""
    after: Sequence[str] = ()
    """Names of the jobs that have to end before, however they do."""


def run_job(job: Job, parent: Connection, threads: int) -> None:
    """Run a job in this process, made for it; write its messages and its outcome into its folder."""
    if job.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpus))
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / LOG).open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    never_fail_to_print()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    started, error = time.monotonic(), None
    try:
        recipe, folder = job.recipe, RunFolder(job.recipe.run_dir, store=UnitStore(job.store))
        with (
            surroundings(recipe) if job.smoke else contextlib.nullcontext(),
            pipeline.threads(recipe.threads or threads),
        ):
            pipeline.do_stages(recipe, folder, job.stages or ())
    except Exception as raised:
        known = raised if isinstance(raised, RegretlessError) else storage_error(raised)
        error = str(known) if known is not None else f"{type(raised).__name__}: {raised}"
        console.print(error if known is not None else traceback.format_exc(), markup=False, soft_wrap=True)
    write_json(job.folder / OUTCOME, {"error": error, "seconds": round(time.monotonic() - started, 3)})
    sys.exit(error is not None)


def _end_with(parent: Connection) -> None:
    """End this process as soon as the one that started it is gone."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)
