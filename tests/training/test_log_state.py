"""A training that is killed and goes on ends as one that is not: weights, log and summary, wherever the kill comes."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from killed import AtWrite
from regretless.modeling.load import ModelConfig
from regretless.training import train as training
from regretless.training.metrics import RunningMeans
from regretless.training.train_config import LoraSettings, TrainConfig
from regretless.training.trainer import PreferenceTrainer
from regretless.workflow.run_folder import RunFolder
from run_contents import contents, differences
from single_unit import do_unit

STEPS = 8
EVERY_WRITE = int(os.environ.get("REGRETLESS_EVERY_WRITE", "10"))
# Checkpoints, log lines, evaluations and epochs (of 5 steps) fall on different steps; the last step ends no epoch.
# By epochs, an epoch has 3 steps.
BY_STEPS = {
    "max_steps": STEPS,
    "logging_steps": 3,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "eval_on_start": True,
    "save_total_limit": 2,
}
BY_EPOCHS = {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch", "save_steps": 1}
BY_EPOCHS |= {"pairs_per_step": 10}
COMMON = {"pairs_per_step": 6, "learning_rate": 1e-2, "eval_pairs": 9, "max_tokens_per_microbatch": 60}


def train(folder: Path, arguments: dict[str, Any], killed: Callable[[], None] | None = None) -> None:
    """Train as a unit of the run folder; `killed` plants a kill."""
    if killed is not None:
        killed()
    model = ModelConfig(name_or_path=str(folder.parent / "model"))
    config = TrainConfig(**{**COMMON, **arguments}, lora=LoraSettings(r=4, dropout=0.1))
    run = RunFolder(folder)
    with run.locked():
        pairs = folder.parent / "pairs.jsonl"
        do_unit(run, "train", arguments, lambda output: training.run(config, "dpo", model, pairs, output))


class AtStep:
    """A kill after some steps of this process, within the next one: its loss is computed, its update is not made."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self) -> None:
        step, count = PreferenceTrainer.training_step, itertools.count()

        def deadly(*args: Any, **options: Any) -> Any:
            found = step(*args, **options)
            if next(count) == self.steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        PreferenceTrainer.training_step = deadly  # type: ignore[method-assign]


def run(folder: Path, arguments: dict[str, Any], killed: Callable[[], None] | None = None) -> int | None:
    """Train in a process of its own; its exit code."""
    # Forked from a process that has imported everything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regretless.training.train", __name__, "regretless.workflow.fork_origin"])
    process = context.Process(target=train, args=(folder, arguments, killed))
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]) -> Path:
    """Run folder; a model and pairs lie beside it."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["w4", "w5", "w6", "w8", "w9"]
    sides = [" ".join(side) for side in itertools.product(words, repeat=3)]
    rows = [
        {"prompt": sides[number // 2], "chosen": f"{sides[-number]} w4", "rejected": sides[number]}
        for number in range(1, 40)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "run"


def ended(folder: Path) -> dict[str, Any]:
    found = contents(folder)
    shutil.rmtree(folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kills"),
    [(BY_STEPS, (0, 3, 0, 3, 0, 3, 0, 3)), pytest.param(BY_EPOCHS, (0, 1, 2, 0, 1, 2), marks=pytest.mark.everyday)],
    ids=["steps", "epochs"],
)
def test_training_when_killed_over_and_over_then_weights_log_and_summary_are_those_of_an_undisturbed_run(
    folder: Path, arguments: dict[str, Any], kills: tuple[int, ...]
) -> None:
    assert run(folder, arguments) == 0
    expected = ended(folder)
    # Each goes on from the last checkpoint of the one before and is killed after so many steps; the last reaches the
    # end first. Seven of eight steps are killed, and four of six.
    codes = [run(folder, arguments, AtStep(steps)) for steps in kills]
    assert codes == [-signal.SIGKILL] * (len(kills) - 1) + [0]
    assert not differences(expected, ended(folder))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_when_killed_between_writes_then_weights_log_and_summary_are_those_of_an_undisturbed_run(
    folder: Path,
) -> None:
    """Pairs, references, checkpoints half written, old ones half deleted, the model half published."""
    assert run(folder, BY_STEPS) == 0
    expected = ended(folder)
    # Each goes on where the one before was killed, and is killed later: from one checkpoint to the next is many writes.
    for number in itertools.count(0, EVERY_WRITE):
        killed = run(folder, BY_STEPS, AtWrite(folder, number))
        if killed == 0:
            break
        assert killed == -signal.SIGKILL
    assert number > 40
    assert not differences(expected, ended(folder))


def test_means_when_sums_are_infinite_of_both_signs_then_their_mean_is_no_number_and_others_stay() -> None:
    means = RunningMeans()
    for value in (math.inf, -math.inf):
        means.add({"loss": torch.tensor([value, 1.0]), "tokens": torch.tensor([2.0, 5.0])})
    found = means.take(Accelerator())
    assert math.isnan(found["loss"]) and found["tokens"] == 3.5
