"""Arguments of `PreferenceTrainer`: those of transformers' Trainer, and the preference method's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments

from regretless.core.errors import reject
from regretless.core.run_folder import CACHE, processes
from regretless.training.argument_checks import argument_problems, given_arguments

UNUSED = {
    "label_smoothing_factor": "the loss is the objective's",
    "auto_find_batch_size": "max_tokens_per_microbatch bounds the memory, and a step's pairs are fixed",
    "dataloader_drop_last": "an epoch's last step has the remaining pairs",
    "train_sampling_strategy": "the order of the pairs is that of group_pairs and the seed",
    "fp16_full_eval": "evaluation computes as training does",
    "bf16_full_eval": "evaluation computes as training does; bf16=True is for both",
    "batch_eval_metrics": "metrics are those of the objective",
    "include_for_metrics": "metrics are those of the objective",
}
"""Arguments of the Trainer that would have no effect or only part of it, and why."""


@dataclass
class PreferenceConfig(TrainingArguments):
    """Training arguments with TRL's names where TRL has one.

    An optimizer step covers `per_device_train_batch_size * gradient_accumulation_steps` pairs per process, whatever
    into memory at a time: the step's pairs are packed into micro-batches of at most `max_tokens_per_microbatch`
    distinct tokens. The two numbers are therefore multiplied into the first; packing replaces accumulation.
    """

    objective: str = field(
        default="repo", metadata={"help": "Method: repo, repo_det, dpo, ipo, rpo, kto, tdpo, or sft on the chosen."}
    )
    beta: float | None = field(default=None, metadata={"help": "Inverse temperature; None takes the method's default."})
    objective_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "The method's other hyperparameters (`regretless objectives`)."}
    )
    learning_rate: float = field(default=5e-6, metadata={"help": "Peak learning rate (the paper's for RePO on math)."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between log lines."})
    max_length: int | None = field(
        default=2048, metadata={"help": "Longest prompt plus response, tokens; longer pairs are refused or cut."}
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longest prompt, tokens; pairs with a longer one are refused."}
    )
    truncation: Literal["refuse", "keep_start"] = field(
        default="refuse",
        metadata={"help": "`refuse` pairs longer than max_length, or `keep_start` of their responses (no EOS then)."},
    )
    max_tokens_per_microbatch: int | None = field(
        default=None, metadata={"help": "Distinct tokens computed at a time; None: 2048 on CPU, 16384 on a GPU."}
    )
    group_pairs: bool = field(
        default=True,
        metadata={"help": "Keep a prompt's pairs in one step, so that what they share is computed once."},
    )
    pairs_cache_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of tokenized pairs, read from there step by step; None: <output_dir>.cache."},
    )
    reference_cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of cached reference log-probabilities; None: <output_dir>.cache."}
    )
    model_init_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of from_pretrained when the model is given by name."}
    )
    ref_model_init_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of from_pretrained when ref_model is given by name."}
    )
    trained_dtype: Literal["float32", "bfloat16"] | None = field(
        default=None,
        metadata={
            "help": "Type of the trained weights. None: float32, or the dtype in model_init_kwargs, where all weights "
            "of a model given by name are trained. In bfloat16, rounding loses small updates."
        },
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept False: rows are read as a whole."})

    def __post_init__(self) -> None:
        # Without this, accelerate assigns one accelerator to each of several processes, even if there is none.
        if processes() > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        given = given_arguments(self)
        found = argument_problems(type(self), given)
        problems = [f"{name}: {problem}" for name, problem in found.items()]
        problems += [f"{name}: not used here: {UNUSED[name]}" for name in UNUSED if given.get(name)]
        if self.beta is not None and "beta" in self.objective_kwargs:
            problems.append("beta: set twice, as `beta` and inside `objective_kwargs`")
        reject("PreferenceConfig", problems)
        super().__post_init__()
        self.per_device_train_batch_size *= self.gradient_accumulation_steps  # type: ignore[has-type]
        self.gradient_accumulation_steps = 1

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The method's hyperparameters that were set."""
        return self.objective_kwargs if self.beta is None else {"beta": self.beta, **self.objective_kwargs}

    @property
    def cache_dir(self) -> Path:
        """Folder beside output_dir for data derived from the training data: uploads include all of output_dir."""
        output = Path(self.output_dir).resolve()
        return output.with_name(output.name + CACHE)
