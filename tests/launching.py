"""Trainings in processes of their own, for tests that compare several processes with one. Not a test by itself."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forked import together
from launched import work
from regretless.training.sharding import FSDP2
from tiny_kinds import SIZES

PROJECT = Path(__file__).resolve().parents[1]
CONFIGURATIONS = PROJECT / "examples" / "accelerate"
MODEL = SIZES | {"tie_word_embeddings": False}
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "optim": "sgd",
    "num_train_epochs": 1,
    "logging_steps": 2,
    "eval_strategy": "epoch",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "max_tokens_per_microbatch": 50,
    "max_grad_norm": 1e9,
}
ALONE: list[str] = []
"""Instead of a command that launches: this process."""


def torchrun(count: int) -> list[str]:
    """Torch's launcher of so many processes."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]


def accelerate(configuration: str) -> list[str]:
    """The documented command on two processes without GPUs; 32 bits, for weights are compared."""
    file = str(CONFIGURATIONS / configuration)
    flags = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    return ["-m", "accelerate.commands.launch", "--config_file", file, *flags]


def launch(command: list[str]) -> None:
    """Run a Python command to its end. Fails with what it said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=500, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def train(
    folder: Path, launcher: list[str] | int, *, sharded: bool = False, **task: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights and log of a run: by a launcher's processes, or by so many that are forked; in this one if alone.

    sharded: the forked ones are told what the launcher of `fsdp2.yaml` tells its own.
    """
    folder.mkdir(exist_ok=True)
    (folder / "task.pickle").write_bytes(pickle.dumps({"model": MODEL, **task}))
    if isinstance(launcher, int):
        together(launcher, work, folder, **(FSDP2 if sharded else {}))
    elif launcher:
        launch([*launcher, str(Path(__file__).with_name("launched.py")), str(folder)])
    else:
        work(folder)
    weights = {
        name: value for file in (folder / "final").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert weights
    return weights, json.loads((folder / "log.json").read_text())


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights equal to rounding."""
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def assert_logged(
    log: list[dict[str, float]], expected: list[dict[str, float]], keys: Iterable[str], **tolerances: float
) -> None:
    """Every value that was logged under these keys, in order, equal within the tolerances of `pytest.approx`."""
    for key in keys:
        values = [entry[key] for entry in expected if key in entry]
        assert values, key
        assert [entry[key] for entry in log if key in entry] == pytest.approx(values, **tolerances), key
