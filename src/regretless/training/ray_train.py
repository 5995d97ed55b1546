"""Trains over a Ray cluster: Ray Train's workers do what the processes on one machine do (`training/processes.py`)."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_json
from regretless.core.progress import STEPS, Advance, bar
from regretless.core.ranks import is_first_process
from regretless.core.secrets import Secret, revealed
from regretless.core.terminal import print_note
from regretless.training import log
from regretless.training.processes import RESULT_FILE, failure_in, is_explained, write_failure
from regretless.training.resuming import note_skipped
from regretless.workflow.cluster import WorkersConfig

STARTED = "started-{number}.json"
"""Where each start of the workers began; in the folder that they and the driver share."""
SECONDS_BETWEEN_REPORTS = 0.5
ONE_NUMBER = "expected one number: a training has as many workers at its end as at its start"


@dataclass(frozen=True)
class RayWorkers:
    """The workers of one training in a cluster that `ray.init` has connected to."""

    count: int
    gpus: float = 0
    """GPUs for each worker."""
    cpus: float = 1
    """CPUs for each worker."""
    max_failures: int = 3
    """How many losses of a worker or a node training survives."""


def workers_of(settings: WorkersConfig, processes: int | Literal["auto"]) -> RayWorkers | None:
    """The workers that the settings of a cluster ask for, by default `processes`; `auto` is one for each of its GPUs.

    None if one process without a GPU suffices, which needs no cluster.
    """
    import ray

    there = int(ray.cluster_resources().get("GPU", 0))
    gpus = settings.gpus if settings.gpus is not None else float(there > 0)
    if isinstance(settings.workers, tuple):
        raise ConfigError(f"cluster.train.workers: {ONE_NUMBER}")
    fitting = max(1, int(there / gpus)) if gpus else 1
    count = settings.workers or (fitting if processes == "auto" else processes)
    return None if count == 1 and not gpus else RayWorkers(count, gpus, settings.cpus)


def train_on_ray(
    task: Mapping[str, Any], workers: RayWorkers, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a task (`task.run_task`) on workers of a Ray cluster; returns its summary.

    When a worker or its node is lost, all start again and resume from the last checkpoint, which is said.

    folder: an own folder for files that workers and driver exchange, emptied first, gone after a success; like the
    task's files and folders, all nodes must see it under the same path.
    environment: variables for the workers.
    Raises what a worker raised; ray.train's error if there were too many losses.
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shared = str(folder.resolve())
    trainer = TorchTrainer(
        _worker,
        # Ray gives each worker a working directory of its own: relative paths start here.
        train_loop_config={
            "task": dict(task),
            "folder": shared,
            "directory": str(Path.cwd()),
            "environment": {name: Secret(value) for name, value in environment.items()},
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers.count,
            use_gpu=workers.gpus > 0,
            resources_per_worker={"CPU": workers.cpus, **({"GPU": workers.gpus} if workers.gpus else {})},
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=shared,
            failure_config=ray.train.FailureConfig(max_failures=workers.max_failures),
        ),
    )
    # In a thread, because in the main one Ray replaces what Ctrl-C does here: it ends this process, and the workers of
    # a driver that is gone end too.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        training = thread.submit(trainer.fit)
        _report(training, folder, Path(task["output"]) / log.LOG_FILE)
    if (folder / RESULT_FILE).is_file():
        result = dict(read_json(folder / RESULT_FILE))
        shutil.rmtree(folder)
        return result
    if is_explained(folder) or training.exception() is None:
        raise failure_in(folder, workers.count)
    training.result()
    raise AssertionError("unreachable: training has an exception")


def _report(training: concurrent.futures.Future[Any], folder: Path, file: Path) -> None:
    """Show the progress in training's log, and say it when the workers start again, until training ends."""
    number = done = 0
    advance: Advance | None = None
    with contextlib.ExitStack() as stack:
        while True:
            ended = training.done()
            number = _report_starts(folder, number)
            # Before the first start, the log is that of an earlier run.
            if number and (progress := log.read(file)) is not None:
                if advance is None:
                    name = f"train {progress.start['objective']}"
                    advance = stack.enter_context(bar(name, progress.steps, unit=STEPS))
                advance(progress.step - done)
                done = progress.step
            if ended:
                return
            concurrent.futures.wait([training], timeout=SECONDS_BETWEEN_REPORTS)


def _report_starts(folder: Path, number: int) -> int:
    """Say which starts of the workers came after the first `number`; returns how many there are now."""
    while (file := folder / STARTED.format(number=number)).is_file():
        start = read_json(file)
        note_skipped(start["problems"])
        if number:
            checkpoint = start["checkpoint"]
            where = f"resumes from {checkpoint}" if checkpoint else "starts over: there was no complete checkpoint"
            print_note(f"a training worker or its node was lost; training {where}")
        number += 1
    return number


def _worker(config: dict[str, Any]) -> None:
    """The work of one worker, started by Ray Train, which sets the environment variables that torchrun sets."""
    from regretless.modeling.load import quiet_libraries
    from regretless.modeling.training_folder import last_complete_checkpoint
    from regretless.training.task import run_task

    folder = Path(config["folder"])
    # An error that would come again: the workers end without a word, and the driver raises it.
    if is_explained(folder):
        return
    os.environ |= revealed(config["environment"])
    if Path(config["directory"]).is_dir():
        os.chdir(config["directory"])
    quiet_libraries()
    if is_first_process():
        number = len(list(folder.glob(STARTED.format(number="*"))))
        checkpoint, problems = last_complete_checkpoint(Path(config["task"]["output"]))
        start = {"checkpoint": checkpoint, "problems": problems}
        write_json(folder / STARTED.format(number=number), start)
    try:
        summary = run_task(config["task"])
    except Exception as error:
        write_failure(folder, error, int(os.environ["RANK"]))
        raise
    if is_first_process():
        write_json(folder / RESULT_FILE, summary)
