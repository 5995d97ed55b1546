"""Arguments of training: the table of what holds for each, and `PreferenceConfig`, which declares this package's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import HubStrategy
from transformers.training_args import trainer_log_levels

from regretless.core.errors import ConfigError, problems_of, reject
from regretless.core.paths import page
from regretless.core.secrets import without_secrets
from regretless.core.settings import MOST_SEED
from regretless.core.terminal import print_note
from regretless.data.tokenization import MAX_LENGTH
from regretless.objectives import OBJECTIVES, build
from regretless.objectives.base import MODIFIERS
from regretless.training.argument_checks import ArgumentRule, argument_problems, changed_arguments
from regretless.training.methods import DEFAULT_METHOD
from regretless.training.trl_losses import LOSSES, hyperparameters_of, loss_problems, losses_of, objective_of
from regretless.workflow.stage_folder import CACHE

T = TypeVar("T")

MOST_STEPS = 10**12
"""Steps, and passes over the data, that no training takes; their products still are whole numbers of 64 bits."""
FIXED = "the reference is fixed, so that its log-probabilities can be cached"
MEMORY = "memory is bounded in another way; set max_tokens_per_microbatch"
SWITCH = "training has no such switch here"
COMPILE = (
    "torch would compile the whole model again for each row's layout, for minutes, until it stops compiling; set "
    "compile_layers=True"
)


def _steps_problem(value: Any) -> str | None:
    if type(value) is not int or value == -1 or 1 <= value <= MOST_STEPS:
        return None
    return f"expected 1 to {MOST_STEPS}, or -1 for as many as num_train_epochs takes, got {value}"


def _tracker_problem(value: Any) -> str | None:
    names = [value] if isinstance(value, str) else value
    if names is None or names in (["none"], ["all"]):
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return f"expected a tracker's name, or a list of them, got {value!r:.80}"
    trackers = tuple(INTEGRATION_TO_CALLBACK)
    if unknown := [name for name in names if name not in trackers]:
        return f"expected none, all, or of {', '.join(trackers)}, got {', '.join(map(repr, unknown))}"
    if absent := [name for name in names if name not in get_available_reporting_integrations()]:
        packages = ", ".join("tensorboard, or tensorboardX" if name == "tensorboard" else name for name in absent)
        return f"{', '.join(absent)} needs a package: install {packages}"
    return None


def _hub_problem(value: Any) -> str | None:
    if value != HubStrategy.CHECKPOINT:
        return None
    return "optimizer states are not uploaded, so nothing could resume; use every_save"


def _part_problem(value: Any) -> str | None:
    if value is None or (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(item) is int for item in value)
        and 1 <= value[0] <= value[1]
    ):
        return None
    return f"expected the number of a part and the number of parts, such as [2, 3], got {value!r:.80}"


def _parallelism_problem(value: Any) -> str | None:
    # An object has been checked by accelerate; from a file comes what the Trainer does not take.
    if not isinstance(value, Mapping | str):
        return None
    return f"expected null; sequence_parallel_size divides sequences ({page('large_models')}), got {value!r:.80}"


def refused(advice: str, *harmless: Any, **limits: Any) -> ArgumentRule:
    """A rule for an argument that would have no effect or the wrong one, but for values that are `harmless`."""
    return ArgumentRule("refused", advice, harmless, **limits)


def no_effect(advice: str, *harmless: Any, **limits: Any) -> ArgumentRule:
    """A rule for an argument that is taken with a note, but for values that are `harmless`."""
    return ArgumentRule("no effect", advice, harmless, **limits)


def in_python(advice: str) -> ArgumentRule:
    """A rule for an argument that the stage train sets itself, or that has no meaning there."""
    return ArgumentRule("taken in Python", advice)


ARGUMENTS: Mapping[str, ArgumentRule] = {
    # --- numbers
    "num_train_epochs": ArgumentRule(gt=0, le=MOST_STEPS),
    "max_steps": ArgumentRule(problem=_steps_problem),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "logging_steps", "save_steps", "eval_steps"), ArgumentRule(gt=0)),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "eval_delay"), ArgumentRule(ge=0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), ArgumentRule(ge=0, lt=1)),
    **dict.fromkeys(("seed", "data_seed"), ArgumentRule(ge=0, le=MOST_SEED)),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), ArgumentRule(ge=1)),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "ddp_timeout"), ArgumentRule(ge=1)),
    **dict.fromkeys(("dataloader_prefetch_factor", "ddp_bucket_cap_mb"), ArgumentRule(ge=1)),
    "dataloader_num_workers": ArgumentRule(ge=0),
    **dict.fromkeys(("max_length", "max_prompt_length", "max_tokens_per_microbatch"), ArgumentRule(ge=1)),
    **dict.fromkeys(("sequence_parallel_size", "log_completions_steps", "log_completions_prompts"), ArgumentRule(ge=1)),
    "router_aux_loss_coef": ArgumentRule(ge=0),
    "label_smoothing": ArgumentRule(ge=0, lt=0.5),
    "ld_alpha": ArgumentRule(ge=0, le=1),
    # --- other values
    "hub_strategy": ArgumentRule(problem=_hub_problem),
    "schedule_part": ArgumentRule(problem=_part_problem),
    "log_level": ArgumentRule(choices=tuple(trainer_log_levels)),
    "log_level_replica": ArgumentRule(choices=tuple(trainer_log_levels)),
    "ddp_backend": ArgumentRule(choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")),
    "report_to": ArgumentRule(problem=_tracker_problem),
    "debug": ArgumentRule(harmless=(None,)),  # what HfArgumentParser makes of the default
    "parallelism_config": ArgumentRule(problem=_parallelism_problem),
    # --- transformers' arguments that would have no effect, or the wrong one
    "label_smoothing_factor": refused("the loss is the objective's", ge=0, lt=1),
    "auto_find_batch_size": refused("max_tokens_per_microbatch bounds the memory, and a step's pairs are fixed"),
    "dataloader_drop_last": refused("an epoch's last step has the remaining pairs"),
    "deepspeed": refused(
        "it takes an optimizer step after each backward pass, and a step has several passes here; to shard a model, "
        f"use FSDP2 ({page('several_processes')})",
    ),
    "train_sampling_strategy": refused("the order of the pairs is that of group_pairs and the seed"),
    "fp16_full_eval": refused("evaluation computes as training does"),
    "bf16_full_eval": refused("evaluation computes as training does; bf16=True is for both"),
    "neftune_noise_alpha": refused(
        "its noise depends on the length of a sequence, and several sequences share a row here"
    ),
    "label_names": refused("rows have no labels"),
    "include_num_input_tokens_seen": refused(
        "every log line has the number of tokens, as num_tokens", choices=("all", "non_padding", "no")
    ),
    **dict.fromkeys(("torch_empty_cache_steps", "eval_accumulation_steps"), refused(MEMORY, ge=1)),
    "prediction_loss_only": refused("evaluation keeps no logits in any case, and its metrics cost nothing more"),
    "eval_do_concat_batches": refused("predictions are one array, with the rewards of each pair"),
    "average_tokens_across_devices": refused("the loss is a mean over the pairs of all processes in any case"),
    **dict.fromkeys(("batch_eval_metrics", "include_for_metrics"), refused("metrics are those of the objective")),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), refused(COMPILE)),
    # --- TRL's arguments that are not taken; docs/from_trl.md has all of TRL's, and names of earlier releases
    "f_divergence_type": refused("the divergence is the reverse KL", "reverse_kl"),
    "f_alpha_divergence_coef": refused("the reverse KL has no coefficient", 0.5),
    "use_weighting": refused("set objective_kwargs={'importance': 'mean'}", False),
    "discopop_tau": refused("the loss discopop is not implemented", 0.05),
    "activation_offloading": refused("set gradient_checkpointing_kwargs={'offload': True}", False),
    "sync_ref_model": refused(FIXED, False),
    "ref_model_mixup_alpha": refused(FIXED, 0.6),
    "ref_model_sync_steps": refused(FIXED, 512),
    "dataset_num_proc": no_effect("the tokenizer uses all cores in one process", None, 1, ge=1),
    "precompute_ref_batch_size": no_effect("max_tokens_per_microbatch bounds these batches, too", None),
    "padding_free": no_effect("rows have no padding", False, True),
    "pad_to_multiple_of": no_effect("rows are padded as the attention kernel needs it", "auto", None),
    # --- arguments that the stage train sets itself, or that have no meaning for it
    "objective_kwargs": in_python("set hyperparameters by their own names, without it"),
    "loss_type": in_python("set objective"),
    "loss_weights": in_python("set objective: weighted_sum, and its terms"),
    "truncation_mode": in_python("set truncation"),
    "trust_remote_code": in_python("set model.trust_remote_code"),
    "precompute_ref_log_probs": in_python("the reference is computed once and cached in any case"),
    "model_init_kwargs": in_python("`model` defines how the model is loaded"),
    "ref_model_init_kwargs": in_python("the reference is `model`, as it is before training"),
    "disable_tqdm": in_python("this package has its own progress bar"),
    "resume_from_checkpoint": in_python("the same command resumes from the last checkpoint automatically"),
    "do_train": in_python(SWITCH),
    **dict.fromkeys(("do_eval", "do_predict"), in_python(f"{SWITCH}; set eval_pairs")),
}
"""Every argument of the Trainer, of TRL's DPOConfig and of `PreferenceConfig` that has a rule beyond its type."""
NOT_IN_RECIPES = frozenset(name for name, rule in ARGUMENTS.items() if rule.verdict in ("taken in Python", "no effect"))
"""Arguments that the stage `train` refuses with any value."""
OF_OBJECTIVE = ("objective", "loss_type", "loss_weights", "label_smoothing", "ld_alpha", "beta")
"""Arguments, or beginnings of their names, that say which objective with which hyperparameters."""
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
"""Environment variable by which accelerate turns DeepSpeed on in a process."""
READ_ONCE = ("objective", "loss_type", "loss_weights", "label_smoothing", "truncation_mode")
"""Arguments that decide about others at construction."""


def deepspeed_problems() -> list[str]:
    """Why not to train if accelerate's launcher, or an Accelerator of a script's own, has turned DeepSpeed on."""
    return [f"{DEEPSPEED}: not used here: {ARGUMENTS['deepspeed'].advice}"] if parse_flag_from_env(DEEPSPEED) else []


def answering(kind: type[T]) -> type[T]:
    """Make a dataclass of arguments answer names that are none of its fields; for use as a decorator.

    A value of TRL's that changes nothing is accepted, with a note if it asks for something. All others, and unknown
    arguments, are problems of one ConfigError, with the problems of the dataclass's own check.
    """
    build_fields = kind.__init__
    fields = tuple(field.name for field in dataclasses.fields(kind) if field.init)  # type: ignore[arg-type]

    @functools.wraps(build_fields)
    def initialize(self: T, *args: Any, **arguments: Any) -> None:
        problems = []
        for name, value in arguments.items():
            if name not in fields and (problem := _unknown_problem(name, value, fields)) is not None:
                problems.append(f"{name}: {problem}")
        try:
            build_fields(self, *args, **{name: value for name, value in arguments.items() if name in fields})
        except ConfigError as error:
            if not problems:
                raise
            problems = [*error.problems, *problems]
        reject(kind.__name__, problems)
        for name, value in arguments.items():
            rule = ARGUMENTS.get(name)
            if rule is not None and rule.verdict == "no effect" and value not in rule.harmless:
                print_note(f"note: {name}: has no effect here: {rule.advice}")

    kind.__init__ = initialize  # type: ignore[assignment, method-assign]
    return kind


def _unknown_problem(name: str, value: Any, fields: Collection[str]) -> str | None:
    """What is wrong with an argument that `PreferenceConfig` does not have."""
    if (rule := ARGUMENTS.get(name)) is not None:
        return f"not used here: {rule.advice}" if rule.verdict == "refused" and value not in rule.harmless else None
    methods = [method for method, objective in OBJECTIVES.usable()[0].items() if name in objective.model_fields]
    if methods:
        owner = "every method" if name in MODIFIERS else ", ".join(methods)
        return f"a hyperparameter of {owner}; set objective_kwargs={{{name!r}: {value!r}}}"
    close = difflib.get_close_matches(name, sorted(fields), 1)
    return "unknown argument; " + (f"did you mean {close[0]}?" if close else f"TRL's are in {page('from_trl')}")


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
    schedule_part: list[int] | None = field(
        default=None,
        metadata={
            "help": "Two numbers, such as 2 3, for the second of three equal parts of a schedule of the learning rate, "
            "warmup included, that several trainings have together. By default this training has a whole one."
        },
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
        # Without this, accelerate assigns one accelerator to each of several processes, even if there is none, and
        # transformers refuses bf16, with which a CPU computes faster, too.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        changed = changed_arguments(self)
        # Each argument by itself.
        wrong = argument_problems(type(self), changed, ARGUMENTS)
        problems = [f"{name}: {problem}" for name, problem in wrong.items()]
        # A switch that is on by default asks for something when it is off.
        asked = {name for name, value in changed.items() if value or getattr(TrainingArguments, name, None) is True}
        problems += [
            f"{name}: not used here: {rule.advice}"
            for name, rule in ARGUMENTS.items()
            if rule.verdict == "refused" and name in asked
        ]
        problems += deepspeed_problems()
        problems += self._read_mappings(without=wrong)
        # Several together.
        problems += self._loss_problems(changed, wrong) + self._row_problems(changed, wrong)
        # The objective, if it is clear which one it is.
        if not any(problem.startswith(OF_OBJECTIVE) for problem in problems):
            self.objective = (
                self.objective or objective_of(losses_of(self.loss_type), self.loss_weights) or DEFAULT_METHOD
            )
            for problem in self._objective_problems():
                if problem not in problems:  # several losses have the same one
                    problems.append(problem)
        reject("PreferenceConfig", problems)
        super().__post_init__()
        self.truncation = self.truncation_mode or self.truncation
        self._constructed = {name: getattr(self, name) for name in READ_ONCE}
        self.settle()

    def _read_mappings(self, without: Collection[str]) -> list[str]:
        """Read arguments that are JSON, as command lines give them; `without`: those that are wrong already."""
        problems = []
        for name in ("model_init_kwargs", "ref_model_init_kwargs", "objective_kwargs"):
            text = value = getattr(self, name)
            if isinstance(text, str):
                with contextlib.suppress(json.JSONDecodeError):
                    value = json.loads(text)
            if isinstance(value, dict | None):
                setattr(self, name, value or {})
                continue
            setattr(self, name, {})
            if name not in without:
                problems.append(f"{name}: expected a mapping, or JSON of one, got {text!r}")
        return problems

    def _loss_problems(self, changed: Mapping[str, Any], wrong: Collection[str]) -> list[str]:
        """Arguments that do not name one objective with its hyperparameters; `wrong`: those that are by themselves."""
        problems = []
        if not {"loss_type", "loss_weights", "objective"} & set(wrong):
            smoothing = 0.0 if "label_smoothing" in wrong else self.label_smoothing
            problems += loss_problems(self.loss_type, self.loss_weights, self.objective, smoothing)
        return problems + [
            f"{name}: set twice, as `{name}` and inside `objective_kwargs`"
            for name in ("beta", "label_smoothing", "ld_alpha")
            if changed.get(name) is not None and name in (self.objective_kwargs or {})
        ]

    def _row_problems(self, changed: Mapping[str, Any], wrong: Collection[str]) -> list[str]:
        """Arguments about the computation of rows that exclude each other."""
        problems = []
        if changed.get("compile_layers") is True:
            # The newer of the two names of checkpointing is not in every version of transformers.
            for name in ("gradient_checkpointing", "activation_checkpointing", "fsdp"):
                if changed.get(name):
                    problems.append(
                        f"compile_layers: not together with {name}, which computes layers in a way of its own; remove "
                        "one"
                    )
            if changed.get("rows") == "plain":
                problems.append("compile_layers: the compiled layers compute shared rows, not plain ones; remove one")
        if "sequence_parallel_size" not in wrong and self.sequence_parallel_size > 1:
            for name, value in (("rows", "plain"), ("compile_layers", True)):
                if changed.get(name) == value:
                    problems.append(
                        f"sequence_parallel_size: not together with {name}: it divides shared rows, and does not work "
                        "with compiled layers; remove one"
                    )
        return problems

    def _objective_problems(self) -> Iterator[str]:
        """Problems of the objective's hyperparameters, each under the name that it was set by."""
        for problem in problems_of(lambda: build(self.objective, **self.hyperparameters)):
            inside = problem.split(":")[0].split(".")[0] in (self.objective_kwargs or {})
            # In the terms that several losses make, hyperparameters are arguments.
            yield f"objective_kwargs.{problem}" if inside else re.sub(r"^terms\.\d+\.", "", problem)

    def settle(self) -> None:
        """Multiply accumulation into the number of pairs; the trainer does it for what was set after construction.

        Raises ConfigError for changed arguments that only the construction reads.
        """
        before, step = self._constructed, self.accelerator_config.gradient_accumulation_kwargs or {}
        problems = [
            f"{name}: it was {before[name]!r} at construction, where it is read, and is {getattr(self, name)!r} now; "
            "construct another PreferenceConfig"
            for name in READ_ONCE
            if getattr(self, name) != before[name]
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
        values = hyperparameters_of(losses, self.loss_weights, self.beta, self.label_smoothing)
        if self.ld_alpha is not None:
            values["ld_alpha"] = self.ld_alpha
        assert isinstance(self.objective_kwargs, dict)
        return values | self.objective_kwargs

    def loading(self, *, reference: bool = False) -> dict[str, Any]:
        """Arguments of from_pretrained for the model, or for the reference."""
        chosen = self.ref_model_init_kwargs if reference else self.model_init_kwargs
        assert isinstance(chosen, dict)
        return ({"trust_remote_code": True} if self.trust_remote_code else {}) | chosen

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
