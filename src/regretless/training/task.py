"""One training in this process, alone or as one of several; an interrupted one resumes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from regretless.core.errors import ConfigError, DataError, NonFiniteLossError, RegretlessError, reject
from regretless.core.files import atomic_path, write_jsonl
from regretless.core.progress import STEPS, bar
from regretless.core.ranks import processes
from regretless.core.terminal import console, print_note
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, weights_of
from regretless.objectives import build
from regretless.training.arguments import PreferenceConfig
from regretless.training.card_facts import stage_command
from regretless.training.data import Groups, PairDataset
from regretless.training.pair_reading import pair_table
from regretless.training.pair_store import PairTable
from regretless.training.resuming import note_skipped
from regretless.training.sharding import is_sharded, shard_model, writes_shards
from regretless.training.train_config import LoraSettings, TrainConfig
from regretless.training.trainer import PreferenceTrainer

OPTIMIZER = "optimizer.pt"
"""The file of a training that keeps its optimizer's state."""


def task_of(
    config: TrainConfig,
    objective: str,
    model: ModelConfig,
    pairs: Path | str,
    output: Path,
    template: str | None,
    reference: ModelConfig | None = None,
    optimizer: Path | None = None,
    keep_optimizer: bool = False,
) -> dict[str, Any]:
    """The arguments of `train.run` as JSON for another process, without secrets (`TrainConfig.environment`)."""
    # A model to pretrain has further settings, its data and its start: they are arguments here.
    others = set(type(config).model_fields) - set(TrainConfig.model_fields)
    return {
        "config": config.model_dump(mode="json", exclude_unset=True, exclude=others) | {"objective": objective},
        "model": model.model_dump(mode="json", exclude_unset=True),
        "pairs": str(pairs),
        "output": str(output),
        "template": template,
        "reference": reference and reference.model_dump(mode="json", exclude_unset=True),
        "optimizer": optimizer and str(optimizer),
        "keep_optimizer": keep_optimizer,
    }


def run_task(task: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process, one of several that a launcher started, as `task_of` says; returns the summary."""
    config = TrainConfig.parse(task["config"], "train")
    model = ModelConfig.parse(task["model"], "model")
    return train_in_this_process(
        config,
        config.objectives[0],
        model,
        task["pairs"],
        Path(task["output"]),
        task["template"],
        task["reference"] and ModelConfig.parse(task["reference"], "reference"),
        task["optimizer"] and Path(task["optimizer"]),
        task["keep_optimizer"],
    )


def train_in_this_process(
    config: TrainConfig,
    objective: str,
    model: ModelConfig,
    pairs: Path | str,
    output: Path,
    template: str | None,
    reference: ModelConfig | None = None,
    optimizer: Path | None = None,
    keep_optimizer: bool = False,
) -> dict[str, Any]:
    """Train in this process, or in this one of several that a launcher started; returns the summary (`train.run`)."""
    count = processes()
    reject(f"train {objective}", config.division_problems(objective, count))
    if config.strategy == "fsdp2" and count > 1:
        shard_model()
    args = arguments_of(config, objective, output, count)
    tokenizer = load_tokenizer(model)
    train, held_out = read_data(config, args, tokenizer, pairs, template)
    if held_out is None and args.eval_strategy != "no":
        raise DataError(
            f"{pairs}: too few pairs to hold some out, and eval_strategy is {args.eval_strategy.value}; give more "
            "pairs, or set eval_strategy to no"
        )

    trainer = PreferenceTrainer(
        load_model(model, for_training=True, base_stays=config.lora is not None),
        None if reference is None else load_model(reference),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=lora_config(config.lora),
    )
    if trainer.accelerator.num_processes != count:
        # MPI's launcher, for one, is known to accelerate alone.
        raise ConfigError(
            f"train {objective}: a step was divided among {count} process(es), and accelerate found "
            f"{trainer.accelerator.num_processes} in the environment; start the processes with torchrun or accelerate "
            "launch, or leave them to the setting train.processes"
        )
    trainer.card.describe(
        data=str(pairs),
        start=model.adapter if model.name_or_path is None else weights_of(model).adapter,
        command=stage_command(
            objective,
            config.result_settings(objective, count),
            None if config.lora is None else config.lora.model_dump(exclude_none=True),
            config.holding_out,
            model,
            str(pairs),
        ),
    )
    checkpoint = _checkpoint(trainer, objective)
    with _ProgressBar(f"train {objective}") as progress:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(progress)
        if optimizer is not None and checkpoint is None:
            trainer.add_callback(_CarriedOptimizer(optimizer))
        try:
            result = trainer.train(resume_from_checkpoint=checkpoint)
        except torch.OutOfMemoryError as error:
            said = str(error).partition(". ")[0]
            raise RegretlessError(f"train {objective}: {'; '.join([said, *error.__notes__])}") from error
    summary: dict[str, Any] = {
        "pairs": len(train.numbers),
        "held_out_pairs": 0 if held_out is None else len(held_out.numbers),
        "steps": result.global_step,
        "loss": result.training_loss,
        "tokens": result.metrics["num_tokens"],
    }
    if held_out is not None:
        trainer.card.measured_at_the_end = _evaluate(trainer, held_out, output)
        summary |= trainer.card.measured_at_the_end
    if keep_optimizer and trainer.is_world_process_zero():
        # To a handle: torch keeps a path's name in the file, and this one is drawn at random.
        with atomic_path(output / OPTIMIZER) as temporary, temporary.open("wb") as handle:
            torch.save(trainer.optimizer.state_dict()["state"], handle)
    _publish(trainer, output)
    return summary


def _checkpoint(trainer: PreferenceTrainer, objective: str) -> str | None:
    """The checkpoint to resume from; which one, and why later ones are of no use, is said.

    Raises ConfigError for one that this trainer's processes cannot read.
    """
    checkpoint, problems = trainer.last_complete_checkpoint()
    if checkpoint is None:
        note_skipped(problems)
        if trainer.is_world_process_zero():
            for useless in Path(trainer.args.output_dir).glob("checkpoint-*"):
                shutil.rmtree(useless)
            if problems:
                print_note(f"train {objective}: starts over, without a complete checkpoint")
        return None
    sharded = is_sharded(Path(checkpoint))
    if sharded != writes_shards(trainer.accelerator):
        was = "strategy=fsdp2 and several processes" if sharded else "strategy=ddp"
        raise ConfigError(
            f"strategy: {checkpoint} was written with {was}, and can be read only so; resume with these settings, or "
            "delete the checkpoints to start over"
        )
    if trainer.is_world_process_zero():
        console.print(f"train {objective}: resumes from {Path(checkpoint).name}", soft_wrap=True)
    return checkpoint


def arguments_of(config: TrainConfig, objective: str, output: Path, count: int) -> PreferenceConfig:
    """The trainer's arguments for one method on `count` processes.

    Raises ConfigError for ones that cannot work.
    """
    hyperparameters, arguments = config.split_for(objective)
    return PreferenceConfig(
        output_dir=str(output),
        objective=objective,
        objective_kwargs=hyperparameters,
        disable_tqdm=True,
        **({"report_to": "none"} | arguments | config.batch_arguments(objective, count)),
    )


def read_data(
    config: TrainConfig,
    args: PreferenceConfig,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Path | str,
    template: str | None = "plain",
) -> tuple[PairDataset, PairDataset | None]:
    """The pairs to train on, and those held out, if any; template: what text prompts are put into.

    Raises DataError if no pair can be used.
    """
    method = build(args.objective, **args.hyperparameters)
    table = pair_table(pairs, tokenizer, args, method, "pairs", template=template)
    mismatched = method.zero_point == "mismatched"
    train, held_out = (
        PairDataset(table, mismatched=mismatched, lists=method.lists, numbers=numbers) if len(numbers) else None
        for numbers in _hold_out(table, config.eval_pairs, args.seed, config.eval_by)
    )
    assert train is not None
    return train, held_out


def lora_config(settings: LoraSettings | None) -> LoraConfig | None:
    """The adapter to train, for peft; None for settings that train all weights."""
    if settings is None:
        return None
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha or 2 * settings.r,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        target_parameters=settings.target_parameters,
        task_type="CAUSAL_LM",
    )


def _hold_out(
    table: PairTable, count: int, seed: int, by: str = "prompt"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training pairs and of the held-out pairs: whole prompts, or topics, at random until `count` pairs.

    Raises DataError for topics where fewer than two are left after those with a common prompt are joined.
    """
    numbers = np.arange(len(table))
    if not count:
        return numbers, numbers[:0]
    groups = Groups(table.prompts if by == "prompt" else _topics(table))
    # In the order of their tokens, so that the order of the rows changes nothing: big-endian bytes sort as numbers do.
    prompts = [np.array(table[int(first)].prompt_ids, ">i4").tobytes() for first in groups.members[groups.bounds[:-1]]]
    by_tokens = np.array(sorted(range(len(groups)), key=prompts.__getitem__), np.int64)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).numpy()
    some = by_tokens[order[: len(groups) // 2]]
    before = np.cumsum(np.diff(groups.bounds)[some]) - np.diff(groups.bounds)[some]
    held = np.zeros(len(table), bool)
    for group in some[before < count].tolist():
        held[groups[group]] = True
    return numbers[~held], numbers[held]


def _topics(table: PairTable) -> NDArray[np.uint64]:
    """A number for each pair, equal for pairs of one topic or one prompt, and for all that these connect."""
    prompts = np.unique(table.prompts, return_inverse=True)[1]
    # A pair without a topic goes with its prompt alone.
    names = [
        f"prompt {prompt}" if pair.topic is None else f"topic {pair.topic}"
        for prompt, pair in zip(prompts, table, strict=True)
    ]
    topics = np.unique(names, return_inverse=True)[1] + len(table)
    edges = coo_array((np.ones(len(table)), (prompts, topics)), shape=(2 * len(table), 2 * len(table)))
    joined = connected_components(edges, directed=False)[1][prompts]
    if len(np.unique(joined)) < 2:
        raise DataError(
            f"eval_by: all {len(table)} pairs have one topic (column topic; topics with a prompt in common count as "
            "one), so that none can be held out; set eval_by=prompt"
        )
    return joined.astype(np.uint64)


def _evaluate(trainer: PreferenceTrainer, held_out: PairDataset, output: Path) -> dict[str, float]:
    loader = trainer.get_eval_dataloader()
    result = trainer.evaluation_loop(loader, "held-out pairs")
    if result.predictions is not None and trainer.is_world_process_zero():
        write_jsonl(
            output / "pair_scores.jsonl",
            (
                {"pair_id": pair.pair_id, "chosen_reward": float(chosen), "rejected_reward": float(rejected)}
                for pair, (chosen, rejected) in zip(
                    (pair for index in range(len(held_out)) for pair in held_out[index].pairs),
                    result.predictions,
                    strict=True,
                )
            ),
        )
    metrics: dict[str, float] = dict(result.metrics or {})
    if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
        checkpoint, _ = trainer.last_complete_checkpoint()
        kept = f" The model is in {Path(checkpoint).name}." if checkpoint else ""
        raise NonFiniteLossError(
            f"held-out pairs: {', '.join(bad)} not finite after training.{kept} Check these pairs' log-probabilities, "
            "and `compute` of an objective of your own, or lower learning_rate"
        )
    return metrics


def _publish(trainer: PreferenceTrainer, output: Path) -> None:
    """Final model, tokenizer and log at the root of `output`: written to a folder in it first, then moved."""
    # With push_to_hub the Trainer uploads while it saves, and leaves out what begins with an underscore.
    staging, accelerator = output / "_final", trainer.accelerator
    if accelerator.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)
    accelerator.wait_for_everyone()
    trainer.save_model(str(staging))  # sharded weights are gathered: every process takes part
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    trainer.state.save_to_json(str(staging / "trainer_state.json"))
    for file in staging.iterdir():
        if (output / file.name).is_dir():  # of an earlier training: a folder replaces only an empty one
            shutil.rmtree(output / file.name)
        file.replace(output / file.name)
    staging.rmdir()


class _CarriedOptimizer(TrainerCallback):
    """Gives a new optimizer the state of an earlier one; its learning rate and other settings stay those of now."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer, kept = kwargs["optimizer"], torch.load(self.file, map_location="cpu", weights_only=True)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})


class _ProgressBar(TrainerCallback):
    """One progress bar for the whole training, on this package's console."""

    def __init__(self, description: str) -> None:
        self.description = description
        self._context: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._context = bar(self.description, state.max_steps, done=state.global_step, unit=STEPS)
            self._advance = self._context.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._context is not None:
            self._advance(1)
