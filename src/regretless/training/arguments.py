"""Arguments of `PreferenceTrainer`: those of transformers' Trainer, and the preference method's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from regretless.core.errors import reject
from regretless.core.run_folder import processes
from regretless.core.stage_folder import CACHE
from regretless.training.argument_checks import argument_problems, given_arguments
from regretless.training.methods import DEFAULT_METHOD

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
        default=DEFAULT_METHOD,
        metadata={"help": "Objective: repo, repo_det, dpo, ipo, rpo, kto, tdpo, sft, or a plug-in's name."},
    )
    beta: float | None = field(
        default=None, metadata={"help": "Hyperparameter β of the objective; by default the objective's own default."}
    )
    objective_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Hyperparameters of the objective besides beta; `regretless objectives` lists them."},
    )
    learning_rate: float = field(
        default=5e-6, metadata={"help": "Peak learning rate. The default is the paper's for RePO on math."}
    )
    logging_steps: float = field(
        default=10,
        metadata={"help": "Number of optimizer steps between two log entries; below 1, a share of all steps."},
    )
    max_length: int | None = field(
        default=2048,
        metadata={
            "help": "Most tokens in prompt and response together; `truncation` says what happens to longer pairs."
        },
    )
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Most tokens in a prompt; pairs with a longer one are rejected."}
    )
    truncation: Literal["refuse", "keep_start"] = field(
        default="refuse",
        metadata={
            "help": "What happens to pairs longer than max_length: `refuse` rejects them, `keep_start` cuts the end of "
            "their responses, which then have no end-of-sequence token."
        },
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Most distinct tokens computed at a time, which bounds memory and does not change results. By "
            "default 2048 on a CPU and 16384 on a GPU."
        },
    )
    group_pairs: bool = field(
        default=True,
        metadata={
            "help": "Whether pairs of one prompt go into the same step, so that shared tokens are computed once."
        },
    )
    pairs_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for the tokenized pairs, from which each step is read; by default "
            "`<output_dir>.cache/pairs`."
        },
    )
    reference_cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for cached log-probabilities of the reference; by default `<output_dir>.cache/reference`."
        },
    )
    model_init_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of from_pretrained for a model that is given by name."}
    )
    ref_model_init_kwargs: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Arguments of from_pretrained for a ref_model that is given by name."}
    )
    trained_dtype: Literal["float32", "bfloat16"] | None = field(
        default=None,
        metadata={
            "help": "Data type of the trained weights; by default float32 (in Python: the dtype in model_init_kwargs, "
            "if all weights of a model given by name are trained). In bfloat16, small updates are lost to rounding."
        },
    )
    log_completions_steps: int | None = field(
        default=None,
        metadata={
            "help": "Number of optimizer steps between two tables of prompts with the chosen, the rejected and the "
            "model's own greedy response, in the trackers of `report_to` (wandb, trackio, tensorboard), which thus "
            "receive texts of the data; none by default."
        },
    )
    log_completions_prompts: int = field(
        default=4, metadata={"help": "Number of prompts in these tables: of held-out pairs, else of training pairs."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Always False, because rows are read as a whole."}
    )

    def __post_init__(self) -> None:
        # Without this, accelerate assigns one accelerator to each of several processes, even if there is none.
        if processes() > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        given = given_arguments(self)
        found = argument_problems(type(self), given)
        problems = [f"{name}: {problem}" for name, problem in found.items()]
        problems += [f"{name}: not used here: {UNUSED[name]}" for name in UNUSED if given.get(name)]
        if self.hub_strategy == HubStrategy.CHECKPOINT:
            problems.append("hub_strategy: optimizer states are not uploaded, so nothing could resume; use every_save")
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
