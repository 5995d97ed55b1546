"""What a training was started with, kept in its checkpoints: another training is not resumed from them in silence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import TrainingArguments

from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_text
from regretless.core.hub import why
from regretless.core.terminal import print_note

START_FILE = "started_with.json"
"""File name in a checkpoint."""
OPTIMIZER = (
    *("learning_rate", "optim", "optim_args", "optim_target_modules", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs")
"""Arguments whose values a checkpoint's optimizer and schedule bring with them."""
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
"""Schedules whose rates do not depend on when training ends."""
IN_EFFECT = (
    *("max_grad_norm", "max_length", "max_prompt_length", "truncation", "group_pairs", "router_aux_loss_coef"),
    *("bf16", "fp16", "trained_dtype"),
)
"""Arguments that are in effect from the first step that they are set for."""


@dataclass(frozen=True)
class Start:
    """What a training is compared with when it resumes: some of it has to agree, differences in the rest are noted."""

    reference: str | None
    """Key of the reference (`ReferenceModel.key`); None if the objective reads none."""
    pairs_per_step: int
    """Pairs in an optimizer step, those of all processes together."""
    optimization: Mapping[str, Any]
    """Settings of the optimizer and of its learning rate (`optimization_of`)."""
    others: Mapping[str, Any]
    """Everything else, by name."""

    def write(self, checkpoint: Path) -> None:
        """Write it into a checkpoint's folder."""
        write_text(checkpoint / START_FILE, json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, default=str))

    def check(self, checkpoint: Path, *, same_bytes: bool, parts: int) -> None:
        """Compare with the start of the training that wrote a checkpoint; for other differences, print a note.

        Another number of pairs in a step raises ConfigError: other pairs than those behind the checkpoint would follow.
        `parts`: of a step, one for each process (or for those together that compute the same pairs). So do another
        optimizer and schedule: part of the settings would be those of the checkpoint, and part those of now. So does a
        different reference, unless not even an equal start has the `same_bytes` on every machine: then it is noted.
        """
        file = checkpoint / START_FILE
        if not file.is_file():
            print_note(
                f"note: {checkpoint} was written by another Trainer: it does not say whether it was trained with this "
                "run's pairs, objective, optimizer and schedule of the learning rate"
            )
            return
        before = read_json(file)
        now = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        pairs = before["pairs_per_step"]
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
        if before["optimization"] != now["optimization"]:
            different = _differences(before["optimization"] | before["others"], now["optimization"] | now["others"])
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was trained with another optimizer or schedule of the learning "
                f"rate, which it would partly go on with: {different}; set what was set then, or begin another "
                "training with the checkpoint's weights as its model"
            )
        if before["reference"] != now["reference"] and same_bytes:
            raise ConfigError(
                f"resume_from_checkpoint: {checkpoint} was trained with another reference: other weights, adapter, "
                "settings or precision; pass the model, or ref_model, that this training began with (not the "
                "checkpoint: its weights are read by themselves)"
            )
        before["others"]["reference"], now["others"]["reference"] = before["reference"], now["reference"]
        if different := _differences(before["others"], now["others"]):
            print_note(f"note: {checkpoint} was trained with other settings than those of the next steps: {different}")


def optimization_of(
    args: TrainingArguments, steps: int, optimizer: Mapping[str, Any], scheduler: str | None
) -> dict[str, Any]:
    """The settings of an optimizer and its schedule.

    steps: of the whole training. optimizer: settings of one that a script has made, or chosen, in place of those in
    `args`. scheduler: the kind of a schedule that a script has made.
    """
    settings = dict(optimizer) or {name: getattr(args, name) for name in OPTIMIZER}
    if scheduler is not None:
        return {**settings, "lr_scheduler": scheduler}
    settings |= {name: getattr(args, name) for name in SCHEDULE} | {"warmup_steps": args.get_warmup_steps(steps)}
    if (part := getattr(args, "schedule_part", None)) is not None:
        settings["schedule_part"] = "{} of {}".format(*part)
    is_endless = part is None and args.lr_scheduler_type in ENDLESS
    return settings if is_endless else {**settings, "steps of the whole training": steps}


def given_optimizer(optimizer: Any, kind_and_settings: tuple[type, Mapping[str, Any]] | None) -> dict[str, Any]:
    """The settings of an optimizer that a script has made, or whose kind it has chosen; empty without one."""
    if kind_and_settings is not None:
        kind, settings = kind_and_settings
        plain = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str | tuple)}
        return {"optimizer": kind.__name__, **plain}
    return {} if optimizer is None else {"optimizer": type(optimizer).__name__, **optimizer.defaults}


def note_skipped(problems: Sequence[str]) -> None:
    """Say which checkpoints are not used, and why."""
    for problem in problems:
        print_note(f"note: {problem}; it is not resumed from")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Each setting that differs, with both values."""
    flat_before, flat_now = dict(_flat(before)), dict(_flat(now))
    different = []
    for name in dict.fromkeys([*flat_before, *flat_now]):
        value_before, value_now = flat_before.get(name, "not set"), flat_now.get(name, "not set")
        if value_before != value_now:
            different.append(f"{name} {value_before} then and {value_now} now")
    return ", ".join(different)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested mappings and lists, each with its path as a name."""
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


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
