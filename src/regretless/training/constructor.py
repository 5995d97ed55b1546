"""Arguments of `PreferenceTrainer` besides its data: checked before anything is loaded, none is silently ignored."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from regretless.core.errors import ConfigError, reject
from regretless.core.run_folder import is_first_process
from regretless.core.terminal import console

LOGITS = "evaluation has no logits; the rewards of each pair are in evaluation_loop(…).predictions, and a callback's "
INSTEAD = {
    "data_collator": "the trainer lays out pairs in shared rows itself; omit it",
    "compute_loss_func": "the loss is the objective's; to add one, see CONTRIBUTING.md under 'Adding an objective'",
    "compute_metrics": LOGITS + "on_evaluate sees all metrics",
    "preprocess_logits_for_metrics": LOGITS + "on_evaluate sees all metrics",
    "model_init": "pass the model or its name; a search over settings creates a trainer for each trial",
    "quantization_config": "for a model by name, set it in PreferenceConfig.model_init_kwargs; else load the "
    "model with it; both with a peft_config",
    "tokenizer": "it is called processing_class",
    "max_length": "it belongs to PreferenceConfig",
    "beta": "it belongs to PreferenceConfig",
}
"""Unsupported arguments of transformers' Trainer, and of other preference trainers, and what to use instead."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for unsupported or unknown arguments; one that is None counts as not set."""
    known = [name for name in inspect.signature(Trainer.__init__).parameters if name not in {"self", *INSTEAD}]
    problems = []
    for name, value in given.items():
        if name in INSTEAD and value is not None:
            problems.append(f"{name}: not used here: {INSTEAD[name]}")
        elif name not in INSTEAD and name not in known:
            close = difflib.get_close_matches(name, [*known, "ref_model", "peft_config"], 1)
            problems.append(f"{name}: unknown argument" + (f"; did you mean {close[0]}?" if close else ""))
    reject("PreferenceTrainer", problems)


def taken(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are passed on to transformers' Trainer."""
    return {name: value for name, value in given.items() if name not in INSTEAD}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise ConfigError if a passed optimizer would not update all trainable weights."""
    if optimizer is None:
        return
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    without = sum(id(weight) not in held for weight in trained)
    if without:
        raise ConfigError(
            f"optimizers: the optimizer lacks {without} of {len(trained)} trainable weights; with peft_config they are "
            "made here, so pass optimizer_cls_and_kwargs instead, or a model that has its adapter already"
        )


def check_quantized(model: nn.Module, *, adapter: bool) -> None:
    """Raise ConfigError for a quantized model without an adapter: its weights cannot be trained."""
    if isinstance(model, PreTrainedModel) and getattr(model, "is_quantized", False) and not adapter:
        raise ConfigError("model: its weights are quantized, which only an adapter can train; pass a peft_config")


def use_one_gpu(args: TrainingArguments) -> None:
    """Make one process train on one GPU, and print that: the Trainer would split each batch over copies of the model.

    A shared row cannot be split, and all of a step's pairs count for one process.
    """
    if args.n_gpu > 1:
        if is_first_process():
            console.print(
                f"note: {args.n_gpu} GPUs are visible, and one process trains on one: {args.device} is used. To train "
                f"on all: train.processes in a recipe; a script with torchrun --nproc-per-node {args.n_gpu}, or "
                "accelerate launch (docs/several_processes.md)",
                style="yellow",
                markup=False,
                soft_wrap=True,
            )
        args._n_gpu = 1
