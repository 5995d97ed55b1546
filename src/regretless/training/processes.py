"""Starts the processes of one training on this machine, and waits for what they make of it.

Three kinds of process: this one, which holds the run folder's lock and writes the manifest; one that torch's elastic
launcher runs in (`training/launcher.py`); and those that train (`training/worker.py`). They exchange files in a folder.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from regretless.core import errors
from regretless.core.errors import ConfigError, RegretlessError, storage_error
from regretless.core.files import read_json, write_json
from regretless.core.secrets import hide
from regretless.workflow.python_process import run_module

TASK_FILE, RESULT_FILE, ENDED_FILE = "task.json", "result.json", "ended.json"
"""Files in the folder: what to train; what rank 0 returned; which process ended first when training failed."""
FAILURE_FILE = "failed-{rank}.json"
LOGS = "logs"
ERROR_KINDS: Mapping[str, type[RegretlessError]] = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RegretlessError)
}


def visible_gpus() -> int:
    """Number of GPUs that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def train_in_processes(
    task: Mapping[str, Any], count: int, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a task (`task.run_task`) in `count` new processes; returns its summary. Their messages are those of rank 0.

    folder: an own folder for the files that the processes exchange, emptied first; gone after a success.
    environment: variables for them, besides this process's.
    The processes end with this one, however it ends: also by SIGKILL, and by Ctrl-C.
    Raises what a process raised; RegretlessError for a process that ended without a word.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / TASK_FILE, task)
    _free_gpu_memory()
    # The processes read standard input until its end, which comes when this process closes it or is gone. A session of
    # their own keeps the terminal's Ctrl-C from them: this process answers it.
    with subprocess.Popen(
        run_module("regretless.training.launcher", str(folder), str(count)),
        stdin=subprocess.PIPE,
        env={**_environment(count), **environment},
        start_new_session=True,
    ) as launcher:
        code = launcher.wait()
    if code != 0 or not (folder / RESULT_FILE).is_file():
        raise failure_in(folder, count)
    result = dict(read_json(folder / RESULT_FILE))
    shutil.rmtree(folder)
    return result


def _environment(count: int) -> dict[str, str]:
    """This process's environment, with its CPU threads divided among the processes."""
    threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    # Below errors, torch's C++ code warns of what cannot be changed here (DDP: no unused parameters were found).
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | threads


def _free_gpu_memory() -> None:
    """Give memory back that models of earlier stages took: rank 0 uses the same GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def end_with_parent() -> None:
    """End this process as soon as the process that holds the other end of its standard input is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write_failure(folder: Path, error: Exception, rank: int) -> None:
    """Write why a process failed, for `train_in_processes` to raise."""
    explained = error if isinstance(error, RegretlessError) else storage_error(error)
    values = {
        "kind": None if explained is None else type(explained).__name__,
        "message": hide(str(explained or error)),
        "problems": list(map(hide, explained.problems)) if isinstance(explained, ConfigError) else [],
        "traceback": hide("".join(traceback.format_exception(error))),
    }
    write_json(folder / FAILURE_FILE.format(rank=rank), values)


class TrainingProcessError(Exception):
    """A bug, or a library's error, in a training process; the message has its traceback."""


def _reports(folder: Path) -> list[tuple[int, Any]]:
    """(rank, report) of each process that said why it failed."""
    files = {int(file.stem.rpartition("-")[2]): file for file in folder.glob(FAILURE_FILE.format(rank="*"))}
    return [(rank, read_json(files[rank])) for rank in sorted(files)]


def is_explained(folder: Path) -> bool:
    """True if a process failed with an error that the user can act on, and that another attempt would meet again."""
    return any(report["kind"] is not None for _, report in _reports(folder))


def failure_in(folder: Path, count: int) -> Exception:
    """The error of `count` processes: of one that says what the user can do, else of the one that failed first."""
    reports = _reports(folder)
    # When one process fails, the others' connections to it break.
    for _, report in reports:
        if report["kind"] is not None:
            return _known_error(report["kind"], report["message"], report["problems"])
    ended = read_json(folder / ENDED_FILE) if (folder / ENDED_FILE).is_file() else {}
    for rank, report in sorted(reports, key=lambda item: item[0] != ended.get("rank")):
        return TrainingProcessError(f"training process {rank} of {count} failed\n{report['traceback']}")
    if ended.get("exit_code", 0) < 0:
        name = signal.Signals(-ended["exit_code"]).name
        return RegretlessError(
            f"training process {ended['rank']} of {count} was ended by {name}"
            + (", which is often the operating system's answer to a lack of memory" if name == "SIGKILL" else "")
            + "; the same command resumes from the last checkpoint"
        )
    return RegretlessError(
        f"the {count} training processes ended without a result; their messages are above, and in {folder / LOGS}"
    )


def _known_error(kind: str, message: str, problems: Iterable[str]) -> RegretlessError:
    if kind == ConfigError.__name__:
        return ConfigError(message, list(problems))
    return ERROR_KINDS.get(kind, RegretlessError)(message)
