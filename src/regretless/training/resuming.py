"""What a training was started with, kept in its checkpoints: another training is not resumed from them in silence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_text
from regretless.core.hub import why
from regretless.core.terminal import print_note

FILE = "started_with.json"
"""File name in a checkpoint."""


@dataclass(frozen=True)
class Start:
    """What decides about a training, besides the settings that the Trainer's own checkpoints keep."""

    reference: str | None
    """Key of the reference (`ReferenceModel.key`); None if the objective reads none."""
    objective: dict[str, Any]
    """Its name and hyperparameters."""
    data: list[Any]
    """Key (None: data without one) and number of the training pairs."""
    seeds: list[int | None]
    adapter: list[Any]
    """Settings of the trained adapters."""
    pairs_per_step: int
    """Pairs in an optimizer step, those of all processes together."""

    def write(self, checkpoint: Path) -> None:
        """Write it into a checkpoint's folder."""
        write_text(checkpoint / FILE, json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=str))

    def check(self, checkpoint: Path, *, same_bytes: bool, parts: int) -> None:
        """Compare with the start of the training that wrote a checkpoint, if it says so.

        Another number of pairs in a step raises ConfigError: other pairs than those behind the checkpoint would follow.
        `parts`: of a step, one for each process (or for those together that compute the same pairs). So does a
        different reference, unless not even an equal start has the `same_bytes` on every machine: for it, and for other
        differences, a note is printed.
        """
        file = checkpoint / FILE
        if not file.is_file():
            return
        before = read_json(file)
        now = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        pairs = before.setdefault("pairs_per_step", self.pairs_per_step)  # not in earlier checkpoints
        if pairs != self.pairs_per_step:
            instead = (
                f"set gradient_accumulation_steps × per_device_train_batch_size to {pairs // parts}"
                if pairs % parts == 0
                else f"resume on a number of processes that divides {pairs}"
            )
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was trained with {pairs} pairs in an optimizer step, and this "
                f"run has {self.pairs_per_step}, gradient_accumulation_steps × per_device_train_batch_size "
                f"{self.pairs_per_step // parts} × {parts} process(es), so that other pairs would follow; {instead}"
            )
        differ = [name for name, value in now.items() if before.get(name) != value]
        if "reference" in differ and same_bytes:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was trained with another reference: other weights, adapter, "
                "settings or precision; pass the model, or ref_model, that this training began with (not the "
                "checkpoint: its weights are read by themselves)"
            )
        if differ:
            print_note(f"note: {checkpoint} was trained with another start than this run's: {', '.join(differ)}")


@contextlib.contextmanager
def reading(checkpoint: str) -> Iterator[None]:
    """Turn a library's error while a checkpoint is loaded into a ConfigError that names it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise ConfigError(
            f"resume_from_checkpoint: {checkpoint} cannot be loaded into this model and optimizer: "
            f"{type(error).__name__}: {why(error, None)}; it is damaged, or was written with another model, adapter or "
            "optimizer: resume with the settings of then, or from another checkpoint"
        ) from error
