"""What training has summed up since its last log line, kept in checkpoints, so that a resumed run logs the same.

The Trainer's checkpoints hold the log up to their step, and not the sums that its next line and its final loss are made
of. Those lie beside it here, of all processes in one file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regretless.core.files import read_json, write_text
from regretless.training.metrics import RunningMeans

FILE = "log_state.json"
"""Its name in a checkpoint."""


class LogState(TrainerCallback):
    """Writes a trainer's sums into its checkpoints, and reads them back when training goes on from one.

    A checkpoint at an epoch's last step is also written after what else the epoch's end logs: a run that goes on from
    there begins with the next epoch, and would leave those lines out.
    """

    def __init__(self, trainer: Trainer, means: RunningMeans) -> None:
        """`means`: the metrics' means since the last log line."""
        self._trainer, self._means = trainer, means
        self.checkpoint: Path | None = None
        """Where training goes on from."""
        self._first_step = 0
        self._postponed = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the sums of the checkpoint; one without them (of another Trainer) counts from its step."""
        file = None if self.checkpoint is None else self.checkpoint / FILE
        self._postponed = False
        if file is None or not file.is_file():
            self._first_step = state.global_step
            self._means.restore([])
            return
        found = read_json(file)
        trainer, process, parts = self._trainer, args.process_index, found["processes"]
        self._first_step = found["first_step"]
        trainer._total_loss_scalar = found["total_loss"]
        trainer._globalstep_last_logged = found["last_logged"]
        if len(parts) == args.world_size:
            loss, means = parts[process]["loss"], [parts[process]["means"]]
        else:  # Losses are averaged over the processes, and means are added up: other processes share them.
            loss = sum(part["loss"] for part in parts) / len(parts)
            means = [part["means"] for part in parts] if process == 0 else []
        trainer._tr_loss.fill_(loss)
        self._means.restore(means)

    def save(self, folder: Path) -> None:
        """Write the sums into a checkpoint's folder; every process has to call it."""
        trainer = self._trainer
        mine = {"loss": float(trainer._tr_loss), "means": self._means.state()}
        parts: Sequence[Mapping[str, Any]] = gather_object([mine]) if trainer.args.world_size > 1 else [mine]
        if not trainer.args.should_save:
            return
        sums = {
            "first_step": self._first_step,
            "last_logged": trainer._globalstep_last_logged,
            "total_loss": trainer._total_loss_scalar,
            "processes": parts,
        }
        write_text(folder / FILE, json.dumps(sums))  # NaN stays NaN, as in the log

    def mean_loss(self) -> float:
        """Mean loss of all steps up to now, those before the checkpoint included."""
        steps = self._trainer.state.global_step - self._first_step
        return float(self._trainer._total_loss_scalar) / max(steps, 0.001)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put off a checkpoint until the epoch's end has been logged, if it comes next."""
        ends_epoch = control.should_training_stop or control.should_epoch_stop or (state.epoch or 0.5) % 1 == 0
        self._postponed = control.should_save and ends_epoch
        control.should_save = control.should_save and not ends_epoch

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the checkpoint that was put off."""
        control.should_save = control.should_save or self._postponed
        self._postponed = False
