"""Arguments of `PreferenceTrainer`: those of transformers' Trainer, and the preference method's."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy

from regretless.core.errors import problems_of, reject
from regretless.core.ranks import processes
from regretless.core.secrets import without_secrets
from regretless.data.tokenization import MAX_LENGTH
from regretless.objectives import build
from regretless.training.argument_checks import argument_problems, given_arguments
from regretless.training.methods import DEFAULT_METHOD
from regretless.training.trl_arguments import (
    LOSSES,
    answering,
    hyperparameters_of,
    loss_problems,
    losses_of,
    objective_of,
)
from regretless.workflow.stage_folder import CACHE

UNUSED = {
    "label_smoothing_factor": "the loss is the objective's",
    "auto_find_batch_size": "max_tokens_per_microbatch bounds the memory, and a step's pairs are fixed",
    "dataloader_drop_last": "an epoch's last step has the remaining pairs",
    "deepspeed": "it takes an optimizer step after each backward pass, and a step has several passes here; to shard "
    "a model, use FSDP2 (docs/several_processes.md)",
    "train_sampling_strategy": "the order of the pairs is that of group_pairs and the seed",
    "fp16_full_eval": "evaluation computes as training does",
    "bf16_full_eval": "evaluation computes as training does; bf16=True is for both",
    "neftune_noise_alpha": "its noise depends on the length of a sequence, and several sequences share a row here",
    "label_names": "rows have no labels",
    "include_num_input_tokens_seen": "every log line has the number of tokens, as num_tokens",
    **dict.fromkeys(
        ("torch_empty_cache_steps", "eval_accumulation_steps"),
        "memory is bounded in another way; set max_tokens_per_microbatch",
    ),
    "prediction_loss_only": "evaluation keeps no logits in any case, and its metrics cost nothing more",
    "eval_do_concat_batches": "predictions are one array, with the rewards of each pair",
    "average_tokens_across_devices": "the loss is a mean over the pairs of all processes in any case",
    "batch_eval_metrics": "metrics are those of the objective",
    "include_for_metrics": "metrics are those of the objective",
    **dict.fromkeys(
        ("torch_compile", "torch_compile_backend", "torch_compile_mode"),
        "torch would compile the whole model again for each row's layout, for minutes, until it stops compiling; set "
        "compile_layers=True",
    ),
}
"""Arguments of the Trainer that are refused, because they would have no effect or the wrong one, and why."""
OF_OBJECTIVE = ("objective", "loss_type", "loss_weights", "label_smoothing", "ld_alpha", "beta")
"""Arguments, or beginnings of their names, that say which objective with which hyperparameters."""
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable by which accelerate turns DeepSpeed on in a process."""
READ_ONCE = ("objective", "loss_type", "loss_weights", "label_smoothing", "truncation_mode")
"""Arguments that decide about others at construction."""


def deepspeed_problems() -> list[str]:
    """Why not to train if accelerate's launcher, or an Accelerator of a script's own, has turned DeepSpeed on."""
    return [f"{DEEPSPEED}: not used here: {UNUSED['deepspeed']}"] if parse_flag_from_env(DEEPSPEED) else []


@answering
@dataclass
class PreferenceConfig(TrainingArguments):
    """Training arguments with TRL's names where TRL has one.

    An optimizer step covers `per_device_train_batch_size * gradient_accumulation_steps` pairs per process, whatever
    fits into memory at a time: the step's pairs are packed into micro-batches of at most `max_tokens_per_microbatch`
    distinct tokens. The two numbers are therefore multiplied into the first; packing replaces accumulation.

    Arguments of TRL's DPOConfig have TRL's meaning. Those that mean nothing here are refused with what to do instead
    (docs/from_trl.md). Raises ConfigError that lists all problems.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        *("model_init_kwargs", "ref_model_init_kwargs", "objective_kwargs"),
    ]

    objective: str = field(
        default="",
        metadata={
            "help": "Objective, one that `regretless objectives` lists; by default that of `loss_type`, else "
            f"{DEFAULT_METHOD}."
        },
    )
    # A text is taken, too; with that in the type, HfArgumentParser would not read a list.
    loss_type: list[str] | None = field(
        default=None,
        metadata={
            "help": f"TRL's name of the objective, or a list to add up: {', '.join(LOSSES)}, the same losses as in TRL."
        },
    )
    loss_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each loss in `loss_type`; by default 1."}
    )
    label_smoothing: float = field(
        default=0.0,
        metadata={"help": "Share of flipped preferences in robust DPO, below 0.5; for objective dpo only."},
    )
    ld_alpha: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the tokens of a response beyond the length of the pair's other response (LD-DPO); by "
            "default 1. A modifier of any objective."
        },
    )
    beta: float | None = field(
        default=None, metadata={"help": "Hyperparameter β of the objective; by default the objective's own default."}
    )
    objective_kwargs: dict[str, Any] | str | None = field(
        default_factory=dict,
        metadata={"help": "Hyperparameters of the objective besides beta; `regretless objectives` lists them."},
    )
    learning_rate: float = field(
        default=5e-6, metadata={"help": "Peak learning rate. The default is the paper's for RePO on math."}
    )
    seed: int = field(
        default=0,
        metadata={"help": "Random seed of the order of the pairs, of an adapter's first weights and of dropout."},
    )
    logging_steps: float = field(
        default=10,
        metadata={"help": "Number of optimizer steps between two log entries; below 1, a share of all steps."},
    )
    max_length: int | None = field(
        default=MAX_LENGTH,
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
    truncation_mode: Literal["keep_start"] | None = field(
        default=None, metadata={"help": "TRL's name of `truncation`, which has another default."}
    )
    max_tokens_per_microbatch: int | None = field(
        default=None,
        metadata={
            "help": "Most distinct tokens computed at a time, which bounds memory and does not change results. By "
            "default 16384 on a GPU, and on a CPU 4096 for one prompt, 1024 to 2048 for several together."
        },
    )
    group_pairs: bool = field(
        default=True,
        metadata={
            "help": "Whether pairs of one prompt go into the same step, so that shared tokens are computed once."
        },
    )
    rows: Literal["auto", "grouped", "plain"] = field(
        default="auto",
        metadata={
            "help": "How sequences are laid out: `grouped` computes the tokens that pairs share once and refuses a "
            "model for which that is not correct; `plain` gives each sequence a row of its own; `auto` takes the first "
            "where it is correct for the model, else the second. Results are the same."
        },
    )
    sequence_parallel_size: int = field(
        default=1,
        metadata={
            "help": "Number of processes that compute each row together, for sequences that are too long for one: each "
            "has a part of the tokens, and in attention of the heads. A divisor of the number of processes and of the "
            "model's attention heads. Results are the same."
        },
    )
    compile_layers: bool = field(
        default=False,
        metadata={
            "help": "Whether torch compiles the model's layers for shared rows. One compilation serves rows of all "
            "lengths. Not with checkpointing, FSDP, recurrent layers or experts."
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
    precompute_ref_log_probs: bool = field(
        default=True,
        metadata={"help": "True or false, as in TRL: the reference is computed once and cached in any case."},
    )
    dataset_num_proc: int | None = field(
        default=None,
        metadata={"help": "As in TRL, but without an effect: one process uses all cores."},
    )
    model_init_kwargs: dict[str, Any] | str | None = field(
        default_factory=dict,
        metadata={
            "help": "Arguments of from_pretrained for a model that is given by name; its tokenizer has the same "
            "`revision`."
        },
    )
    ref_model_init_kwargs: dict[str, Any] | str | None = field(
        default_factory=dict, metadata={"help": "Arguments of from_pretrained for a ref_model that is given by name."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether code that comes with a model or tokenizer by name may run."}
    )
    pad_token: str | None = field(
        default=None,
        metadata={"help": "The tokenizer's padding token, saved with the model; training itself pads nothing."},
    )
    router_aux_loss_coef: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the load-balancing loss of a mixture of experts, which is added to the loss; by default "
            "`router_aux_loss_coef` of the model's configuration if that says `output_router_logits: true`, else 0."
        },
    )
    disable_dropout: bool = field(
        default=False,
        metadata={
            "help": "Whether dropout is off in the model, its adapter and the reference. The probabilities in the "
            "model's configuration become 0, and are saved so, because layers of some models read them there."
        },
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
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        given = given_arguments(self)
        found = argument_problems(type(self), given)
        problems = [f"{name}: {problem}" for name, problem in found.items()]
        # A switch that is on by default asks for something when it is off.
        asked = [name for name, value in given.items() if value or getattr(TrainingArguments, name, None) is True]
        problems += [f"{name}: not used here: {UNUSED[name]}" for name in UNUSED if name in asked]
        problems += deepspeed_problems()
        if self.hub_strategy == HubStrategy.CHECKPOINT:
            problems.append("hub_strategy: optimizer states are not uploaded, so nothing could resume; use every_save")
        problems += self._read_mappings(known=found)
        assert isinstance(self.objective_kwargs, dict)
        if not {"loss_type", "loss_weights", "objective"} & found.keys():
            smoothing = 0.0 if "label_smoothing" in found else self.label_smoothing
            problems += loss_problems(self.loss_type, self.loss_weights, self.objective, smoothing)
        problems += [
            f"{name}: set twice, as `{name}` and inside `objective_kwargs`"
            for name in ("beta", "label_smoothing", "ld_alpha")
            if given.get(name) is not None and name in (self.objective_kwargs or {})
        ]
        if given.get("compile_layers") is True:
            # The newer of the two names is not in every version of transformers.
            others = ("gradient_checkpointing", "activation_checkpointing", "fsdp")
            problems += [
                f"compile_layers: not together with {name}, which computes layers in a way of its own; remove one"
                for name in others
                if given.get(name)
            ]
            if given.get("rows") == "plain":
                problems.append("compile_layers: the compiled layers compute shared rows, not plain ones; remove one")
        if "sequence_parallel_size" not in found and self.sequence_parallel_size > 1:
            problems += [
                f"sequence_parallel_size: not together with {name}: it divides shared rows, and does not work with "
                "compiled layers; remove one"
                for name, value in (("rows", "plain"), ("compile_layers", True))
                if given.get(name) == value
            ]
        if not any(problem.startswith(OF_OBJECTIVE) for problem in problems):
            losses = losses_of(self.loss_type)
            self.objective = self.objective or objective_of(losses, self.loss_weights) or DEFAULT_METHOD
            for problem in problems_of(lambda: build(self.objective, **self.hyperparameters)):
                inside = problem.split(":")[0].split(".")[0] in self.objective_kwargs
                # In the terms that several losses make, hyperparameters are arguments.
                line = f"objective_kwargs.{problem}" if inside else re.sub(r"^terms\.\d+\.", "", problem)
                if line not in problems:
                    problems.append(line)
        reject("PreferenceConfig", problems)
        super().__post_init__()
        self.truncation = self.truncation_mode or self.truncation
        self._constructed = {name: getattr(self, name) for name in READ_ONCE}
        self.settle()

    def _read_mappings(self, known: Collection[str]) -> list[str]:
        """Read arguments that are JSON, as command lines give them; `known`: arguments with problems."""
        problems = []
        for name in ("model_init_kwargs", "ref_model_init_kwargs", "objective_kwargs"):
            given = value = getattr(self, name)
            if isinstance(given, str):
                with contextlib.suppress(json.JSONDecodeError):
                    value = json.loads(given)
            if isinstance(value, dict | None):
                setattr(self, name, value or {})
                continue
            setattr(self, name, {})
            if name not in known:
                problems.append(f"{name}: expected a mapping, or JSON of one, got {given!r}")
        return problems

    def settle(self) -> None:
        """Multiply accumulation into the number of pairs; the trainer does it for what was set after construction.

        Raises ConfigError for changed arguments that only the construction reads.
        """
        kept, step = self._constructed, self.accelerator_config.gradient_accumulation_kwargs or {}
        problems = [
            f"{name}: it was {kept[name]!r} at construction, where it is read, and is {getattr(self, name)!r} now; "
            "construct another PreferenceConfig"
            for name in READ_ONCE
            if getattr(self, name) != kept[name]
        ]
        if step.get("num_steps", 1) != 1:
            problems.append("accelerator_config: not used here: num_steps; set gradient_accumulation_steps")
        reject("PreferenceConfig", problems)
        self.per_device_train_batch_size *= self.gradient_accumulation_steps  # type: ignore[has-type]
        self.gradient_accumulation_steps = 1

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The method's hyperparameters that were set, or that the loss of `loss_type` has."""
        losses = losses_of(self.loss_type)
        found = hyperparameters_of(losses, self.loss_weights, self.beta, self.label_smoothing)
        if self.ld_alpha is not None:
            found["ld_alpha"] = self.ld_alpha
        assert isinstance(self.objective_kwargs, dict)
        return found | self.objective_kwargs

    def loading(self, *, reference: bool = False) -> dict[str, Any]:
        """Arguments of from_pretrained for the model, or for the reference."""
        given = self.ref_model_init_kwargs if reference else self.model_init_kwargs
        assert isinstance(given, dict)
        return ({"trust_remote_code": True} if self.trust_remote_code else {}) | given

    def to_dict(self) -> dict[str, Any]:
        """The arguments by name; tokens for logging in are hidden, and a padding token is none of them."""
        return {**without_secrets(super().to_dict()), "pad_token": self.pad_token}

    def without_secrets(self) -> Self:
        """A copy that may be saved."""
        saved = copy.copy(self)
        saved.__dict__ = without_secrets(self.__dict__)
        return saved

    @property
    def cache_dir(self) -> Path:
        """Folder beside output_dir for data derived from the training data: uploads include all of output_dir."""
        output = Path(self.output_dir).resolve()
        return output.with_name(output.name + CACHE)
