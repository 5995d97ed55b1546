"""Writes the log that `regretless watch` reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regretless.training.log import add, begin


class LiveLog(TrainerCallback):
    """Writes the training log on rank 0 into output_dir, line by line as the Trainer logs."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the log, with the lines up to the checkpoint that training resumes from."""
        if state.is_world_process_zero:
            self._folder, self._step = Path(args.output_dir), state.global_step
            objective = getattr(args, "objective", "")
            begin(self._folder, objective, state.global_step, state.max_steps, state.log_history)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add a line of training; evaluations and the final summary are not logged here."""
        self._step = state.global_step
        if self._folder is not None and logs is not None and "loss" in logs:
            add(self._folder, "log", {**logs, "step": state.global_step})

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Run training inside the block: its end, normal or by an error, is the log's last line."""
        try:
            yield
        except BaseException as error:
            self._end(failed=f"{type(error).__name__}: {error}")
            raise
        self._end()

    def _end(self, **more: str) -> None:
        if self._folder is not None:
            add(self._folder, "end", {"step": self._step, **more})
            self._folder = None
