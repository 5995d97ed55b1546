"""One job of a study, in a process of its own: some stages of one recipe, with the units that other jobs have done."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regretless.core.errors import RegretlessError, storage_error
from regretless.core.secrets import hide
from regretless.core.terminal import console
from regretless.modeling.load import quiet_libraries
from regretless.runs import pipeline
from regretless.runs.miniature import surroundings
from regretless.runs.recipe import Recipe
from regretless.workflow.run_folder import RunFolder
from regretless.workflow.unit_store import UnitStore

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOG = "output.log"
"""The file in a job's folder with its messages."""


@dataclass(frozen=True)
class Job:
    """Stages of a recipe, in the run folder that it names."""

    name: str
    recipe: Recipe
    """Its run folder is locked by whoever starts the job, and other jobs may be at work on other units of it."""
    stages: Sequence[str] | None
    """Those that run; None for all, which also moves aside what an earlier recipe left."""
    folder: Path
    """Where its messages are written."""
    store: Path
    smoke: bool = False
    gpus: Sequence[int] | None = None
    """Numbers of the devices that it may use, among those that the study sees; None for all."""
    needs: Sequence[str] = ()
    """Names of the jobs that have to succeed before."""
    after: Sequence[str] = ()
    """Names of the jobs that have to end before, however they do."""


def devices(numbers: Sequence[int]) -> str:
    """The devices with these numbers as a value of `VISIBLE`, which may already restrict what this process sees."""
    seen = os.environ.get(VISIBLE)
    names = seen.split(",") if seen else None
    return ",".join(str(number) if names is None else names[number].strip() for number in numbers)


def run_job(job: Job, threads: int) -> None:
    """Run a job in this process, made for it. Raises what its stages raise, which is also the end of its messages."""
    if job.gpus is not None:
        os.environ[VISIBLE] = devices(job.gpus)
    quiet_libraries()
    recipe, folder = job.recipe, RunFolder(job.recipe.run_dir, store=UnitStore(job.store))
    try:
        with (
            folder.joined(),
            surroundings(recipe) if job.smoke else contextlib.nullcontext(),
            pipeline.threads(recipe.threads or threads),
        ):
            pipeline.do_stages(recipe, folder, job.stages or ())
    except Exception as raised:
        error = raised if isinstance(raised, RegretlessError) else storage_error(raised)
        console.print(hide(str(error or traceback.format_exc())), soft_wrap=True)
        raise error or raised from None
