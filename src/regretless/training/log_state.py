"""Sums since training's last log line, stored in checkpoints, so that a resumed run logs the same values.

The Trainer's checkpoints hold the log up to their step, but not the sums behind its next line and its final loss.
Those are stored beside it here, for all processes in one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regretless.core.files import read_json, write_text
from regretless.modeling.training_folder import LOG_STATE
from regretless.training.metrics import RunningMeans, TokenCount
from regretless.training.trainer_internals import HookedTrainer, LossSums


class LogState(TrainerCallback):
    """Writes a trainer's sums into its checkpoints, and reads them back when training resumes from one.

    A checkpoint at an epoch's last step is written after all log entries of the epoch's end: a run that resumes from
    there starts with the next epoch, and would miss those lines.
    """

    def __init__(self, trainer: HookedTrainer, means: RunningMeans, tokens: TokenCount) -> None:
        """`means`: the metrics' means since the last log line; `tokens`: those trained on since the beginning."""
        self._trainer, self._means, self._tokens = trainer, means, tokens
        self._first_step = 0
        self._postponed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the sums of the checkpoint; without them (another Trainer's checkpoint), sums start at its step."""
        checkpoint = self._trainer.resumed_from
        file = None if checkpoint is None else checkpoint / LOG_STATE
        self._postponed = False
        if file is None or not file.is_file():
            self._first_step = state.global_step
            self._means.restore([])
            self._tokens.mine = 0
            return
        sums = read_json(file)
        process, parts = args.process_index, sums["processes"]
        self._first_step = sums["first_step"]
        if len(parts) == args.world_size:
            loss, means, tokens = parts[process]["loss"], [parts[process]["means"]], parts[process]["tokens"]
        else:  # Losses are averaged over the processes, and means are added up: other processes share them.
            loss = sum(part["loss"] for part in parts) / len(parts)
            means = [part["means"] for part in parts] if process == 0 else []
            tokens = sum(part["tokens"] for part in parts) if process == 0 else 0
        exact = torch.tensor(loss, dtype=torch.float64)
        self._trainer.loss_sums = LossSums(exact, sums["total_loss"], sums["last_logged"])
        self._means.restore(means)
        self._tokens.mine = tokens

    def save(self, folder: Path) -> None:
        """Write the sums into a checkpoint's folder; every process has to call it."""
        args, sums = self._trainer.args, self._trainer.loss_sums
        mine = {"loss": float(sums.loss), "means": self._means.state(), "tokens": self._tokens.mine}
        parts: Sequence[Mapping[str, Any]] = gather_object([mine]) if args.world_size > 1 else [mine]
        if not args.should_save:
            return
        values = {
            "first_step": self._first_step,
            "last_logged": sums.last_logged,
            "total_loss": sums.total,
            "processes": parts,
        }
        write_text(folder / LOG_STATE, json.dumps(values))  # NaN stays NaN, as in the log

    def mean_loss(self) -> float:
        """Mean loss of all steps up to now, those before the checkpoint included; every process has to call it.

        For when training has ended: the Trainer has then added this process's losses since the last log line to the
        sum, in place of their mean over the processes.
        """
        trainer = self._trainer
        mine, total, _ = trainer.loss_sums
        if trainer.args.world_size > 1:
            total += float(trainer.accelerator.reduce(mine, "mean") - mine)
        return total / max(trainer.state.global_step - self._first_step, 0.001)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Postpone a checkpoint until the epoch's end has been logged, if that comes next."""
        ends_epoch = control.should_training_stop or control.should_epoch_stop or (state.epoch or 0.5) % 1 == 0
        self._postponed = control.should_save and ends_epoch
        control.should_save = control.should_save and not ends_epoch

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the postponed checkpoint."""
        control.should_save = control.should_save or self._postponed
        self._postponed = False
