"""Trains over a Ray cluster: Ray Train's workers do what the processes on one machine do (`training/processes.py`)."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.core.files import read_json, write_json
from regretless.core.run_folder import is_first_process
from regretless.core.terminal import console
from regretless.training.processes import RESULT, failure_in, is_explained, write_failure

STARTED = "started-{number}.json"
"""Where each start of the workers began; in the folder that they and the driver share."""
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class RayWorkers:
    """The workers of one training in a cluster that `ray.init` has connected to."""

    count: int
    use_gpu: bool
    """Whether each worker needs a GPU."""
    cpus: float = 1
    """CPUs for each worker."""
    max_failures: int = 3
    """How many losses of a worker or a node training survives."""


def train_on_ray(task: Mapping[str, Any], workers: RayWorkers, folder: Path) -> dict[str, Any]:
    """Run a task (`train.run_task`) on workers of a Ray cluster; returns its summary.

    When a worker or its node is lost, all start again and resume from the last checkpoint, which is said.

    folder: an own folder for files that workers and driver exchange, emptied first, gone after a success; like the
    task's files and folders, all nodes must see it under the same path.
    Raises what a worker raised; ray.train's error if there were too many losses.
    """
    import ray.train
    from ray.train.torch import TorchTrainer

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = str(folder.resolve())
    trainer = TorchTrainer(
        _worker,
        # Ray gives each worker a working directory of its own: relative paths start here.
        train_loop_config={"task": dict(task), "folder": here, "directory": str(Path.cwd())},
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers.count,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus, **({"GPU": 1} if workers.use_gpu else {})},
        ),
        run_config=ray.train.RunConfig(
            name="ray",
            storage_path=here,
            failure_config=ray.train.FailureConfig(max_failures=workers.max_failures),
        ),
    )
    # In a thread, because in the main one Ray replaces what Ctrl-C does here: it ends this process, and the workers of
    # a driver that is gone end too.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        training = thread.submit(trainer.fit)
        _report_starts(training, folder)
    if (folder / RESULT).is_file():
        result = dict(read_json(folder / RESULT))
        shutil.rmtree(folder)
        return result
    if is_explained(folder) or training.exception() is None:
        raise failure_in(folder, workers.count)
    training.result()
    raise AssertionError("unreachable: training has an exception")


def _report_starts(training: concurrent.futures.Future[Any], folder: Path) -> None:
    """Say it when the workers start again, until training ends."""
    number = 0
    while True:
        ended = training.done()
        while (file := folder / STARTED.format(number=number)).is_file():
            if number:
                checkpoint = read_json(file)["checkpoint"]
                where = f"resumes from {checkpoint}" if checkpoint else "starts over: there was no checkpoint yet"
                console.print(f"a training worker or its node was lost; training {where}", style="yellow")
            number += 1
        if ended:
            return
        concurrent.futures.wait([training], timeout=SECONDS_BETWEEN_LOOKS)


def _worker(config: dict[str, Any]) -> None:
    """The work of one worker, started by Ray Train, which sets the environment variables that torchrun sets."""
    from regretless.modeling.load import quiet_libraries
    from regretless.modeling.training_folder import last_complete_checkpoint
    from regretless.training.train import run_task

    folder = Path(config["folder"])
    # An error that would come again: the workers end without a word, and the driver raises it.
    if is_explained(folder):
        return
    os.chdir(config["directory"])
    quiet_libraries()
    if is_first_process():
        number = len(list(folder.glob(STARTED.format(number="*"))))
        checkpoint = last_complete_checkpoint(Path(config["task"]["output"]))
        write_json(folder / STARTED.format(number=number), {"checkpoint": checkpoint})
    try:
        summary = run_task(config["task"])
    except Exception as error:
        write_failure(folder, error, int(os.environ["RANK"]))
        raise
    if is_first_process():
        write_json(folder / RESULT, summary)
