"""Tables of responses in a tracker: the chosen, the rejected and the model's own, as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regretless.core.errors import ConfigError
from regretless.core.terminal import print_note
from regretless.modeling.decoding import Row, why_not
from regretless.modeling.draws import Sampler
from regretless.modeling.forward import causal_model
from regretless.modeling.generation import responses
from regretless.modeling.layout import read_ids
from regretless.modeling.load import eos_token_ids
from regretless.training.data import PairDataset, TrainingPair

COLUMNS = ("step", "prompt", "chosen", "rejected", "model")
TABLE = "completions"
"""Name of the table in a tracker, as TRL has it."""
TRACKERS = ("WandbCallback", "TrackioCallback", "TensorBoardCallback")
"""transformers' callbacks of the trackers that show tables or text."""
MOST_ANSWER_TOKENS = 256


class CompletionTables(TrainerCallback):
    """Every `log_completions_steps` steps, answers the same prompts greedily and logs a table on rank 0.

    The prompts are the first of the held-out pairs, else of the training pairs. Greedy answers draw no random number,
    so that training is the same with and without tables.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._decodes: bool | None = None
        """Whether the model's rows can be decoded one by one; None before the first table."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log a table where one is due."""
        settings: Any = args
        every = settings.log_completions_steps
        if not state.is_world_process_zero or every is None or state.global_step % every:
            return
        rows = self._rows(state.global_step, settings.log_completions_prompts)
        for callback in self._trainer.callback_handler.callbacks:
            if type(callback).__name__ in TRACKERS:
                _log(callback, rows, state.global_step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say so if no tracker would show the tables. Raises ConfigError for a sharded model."""
        settings: Any = args
        if settings.log_completions_steps is not None and self._trainer.is_fsdp_enabled:
            raise ConfigError("log_completions_steps: a sharded model cannot answer on one process; leave it out")
        shown = any(type(callback).__name__ in TRACKERS for callback in self._trainer.callback_handler.callbacks)
        if settings.log_completions_steps is not None and not shown:
            print_note("note: log_completions_steps has no effect without report_to: wandb, trackio or tensorboard")

    def _rows(self, step: int, count: int) -> list[list[Any]]:
        """(step, prompt, chosen, rejected, own response) of each prompt."""
        pairs = self._pairs(count)
        model: Any = self._trainer.accelerator.unwrap_model(self._trainer.model)
        tokenizer: Any = self._trainer.processing_class
        was_training = model.training
        model.eval()
        try:
            with self._trainer.accelerator.autocast():
                answers = self._answers(model, tokenizer, pairs)
        finally:
            model.train(was_training)
        return [
            [
                step,
                tokenizer.decode(item.pair.prompt_ids),
                *(tokenizer.decode(read_ids(side.ids)) for side in item.pair.sides),
                *[""] * (2 - len(item.pair.sides)),
                answer,
            ]
            for item, answer in zip(pairs, answers, strict=True)
        ]

    def _pairs(self, count: int) -> Sequence[TrainingPair]:
        data: Any = self._trainer.eval_dataset
        if isinstance(data, dict):
            data = next(iter(data.values()), None)
        data = self._trainer.train_dataset if data is None else data
        assert isinstance(data, PairDataset)
        first: dict[tuple[int, ...], int] = {}
        for index in range(len(data)):
            first.setdefault(tuple(data[index].pair.prompt_ids), index)
            if len(first) == count:
                break
        return [data[index] for index in first.values()]

    def _answers(self, model: Any, tokenizer: Any, pairs: Sequence[TrainingPair]) -> list[str]:
        """The model's greedy answer to each pair's prompt, of at most twice the tokens of the longer response."""
        if self._decodes is None:
            self._decodes = why_not(model) is None
        ends = eos_token_ids(causal_model(model), tokenizer)
        limits = [min(MOST_ANSWER_TOKENS, 2 * max(len(side.ids) for side in item.pair.sides)) for item in pairs]

        def are_over(rows: Sequence[Row]) -> list[bool]:
            return [row.token_ids[-1] in ends or len(row.token_ids) == limits[row.number] for row in rows]

        prompts = [item.pair.prompt_ids for item in pairs]
        written = responses(
            model,
            prompts,
            [0] * len(prompts),
            Sampler(temperature=0),
            max(limits),
            are_over,
            slots=len(prompts),
            decodes=self._decodes,
            padding=tokenizer.pad_token_id,
        )
        texts = {row.number: tokenizer.decode(row.token_ids) for row in written}
        return [texts[number] for number in range(len(prompts))]


def _log(callback: Any, rows: Sequence[Sequence[Any]], step: int) -> None:
    """Give a table to one tracker; one that has not begun, or was switched off, is left alone."""
    kind = type(callback).__name__
    if kind == "WandbCallback" and callback._wandb is not None:
        table = callback._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        callback._wandb.log({TABLE: table, "train/global_step": step})
    elif kind == "TrackioCallback" and callback._initialized:
        import pandas

        table = callback._trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))
        callback._trackio.log({TABLE: table, "train/global_step": step})
    elif kind == "TensorBoardCallback" and callback.tb_writer is not None:
        callback.tb_writer.add_text(TABLE, _markdown(rows), step)
        callback.tb_writer.flush()


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """The table for TensorBoard, which shows Markdown; the texts as code blocks, in which nothing is markup."""
    parts = []
    for _, *texts in rows:
        for name, text in zip(COLUMNS[1:], texts, strict=True):
            block = "\n".join(f"    {line}" for line in str(text).splitlines())
            parts.append(f"**{name}**\n\n{block}\n")
    return "\n".join(parts)
