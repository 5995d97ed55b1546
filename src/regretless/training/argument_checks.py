"""Checks of training arguments, key by key: transformers checks few of them, and only when training starts."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Annotated, Any, Union

import torch
from pydantic import Field, TypeAdapter, ValidationError
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels
from transformers.utils import is_liger_kernel_available, is_torch_tf32_available

from regretless.core.errors import ConfigError
from regretless.core.paths import NOTHING
from regretless.core.settings import MOST_SEED, Unquoted

MOST_STEPS = 10**12
"""Steps, and passes over the data, that no training takes; their products still are whole numbers of 64 bits."""
BOUNDED: tuple[tuple[Mapping[str, float], tuple[str, ...]], ...] = (
    ({"gt": 0, "le": MOST_STEPS}, ("num_train_epochs",)),
    ({"gt": 0}, ("learning_rate", "adam_epsilon", "logging_steps", "save_steps", "eval_steps")),
    ({"ge": 0}, ("warmup_steps", "weight_decay", "max_grad_norm", "eval_delay")),
    ({"ge": 0, "le": MOST_SEED}, ("seed", "data_seed")),
    ({"ge": 0}, ("dataloader_num_workers",)),
    ({"ge": 1}, ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")),
    ({"ge": 1}, ("save_total_limit", "eval_accumulation_steps", "torch_empty_cache_steps", "ddp_timeout")),
    ({"ge": 1}, ("dataloader_prefetch_factor", "ddp_bucket_cap_mb")),
    ({"ge": 1}, ("max_length", "max_prompt_length", "max_tokens_per_microbatch", "sequence_parallel_size")),
    ({"ge": 1}, ("log_completions_steps", "log_completions_prompts")),
    ({"ge": 0, "lt": 1}, ("adam_beta1", "adam_beta2", "label_smoothing_factor")),
    ({"ge": 0, "lt": 0.5}, ("label_smoothing",)),
    ({"ge": 0, "le": 1}, ("ld_alpha",)),
    ({"ge": 1}, ("dataset_num_proc",)),
    ({"ge": 0}, ("router_aux_loss_coef",)),
)
BOUNDS: Mapping[str, Mapping[str, float]] = {name: bounds for bounds, names in BOUNDED for name in names}
"""Bounds of numbers, as pydantic's `Field` takes them."""
BOUND_TEXTS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optim": tuple(OptimizerNames),
    "lr_scheduler_type": tuple(SchedulerType),
    "logging_strategy": tuple(IntervalStrategy),
    "eval_strategy": tuple(IntervalStrategy),
    "save_strategy": tuple(SaveStrategy),
    "hub_strategy": tuple(HubStrategy),
    "log_level": tuple(trainer_log_levels),
    "log_level_replica": tuple(trainer_log_levels),
    "ddp_backend": ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
}
"""Text arguments with a fixed set of values."""
TYPES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}
CHOICES_NAMED = 8
"""Most choices in a message, the nearest first."""

_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def as_declared(kind: type[TrainingArguments], name: str, text: Unquoted) -> Any:
    """What a text without quotes in YAML is to the type of an argument: `no` is false where that is true or false."""
    hint = _hints(kind).get(name, str)
    if {*(typing.get_args(hint) or (hint,))} <= {bool, int, float, type(None)}:
        with suppress(ValidationError):
            return TypeAdapter(hint).validate_python(text)
    return str(text)


def argument_problems(kind: type[TrainingArguments], values: Mapping[str, Any]) -> dict[str, str]:
    """Problems of training arguments by themselves, by name; names that `kind` does not have are skipped.

    Types as `kind` declares them (without conversion: a text is no number, and none is empty), bounds, and names that
    are taken from a list. A package that `report_to` needs is looked for here too.
    """
    hints = _hints(kind)
    # HfArgumentParser makes None of the default of `debug`, and `dataclasses.replace` passes an object on.
    known = {
        name: value
        for name, value in values.items()
        if name in hints and (name, value) != ("debug", None) and not isinstance(value, AcceleratorConfig)
    }
    found = {name: _problem(hints[name], name, value) for name, value in known.items()}
    found |= {
        name: NOTHING
        for name, value in known.items()
        if isinstance(value, str) and not value.strip() and value != getattr(kind, name, None)
    }
    return {name: problem for name, problem in found.items() if problem is not None}


def given_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments whose values are not the defaults."""
    values = {field.name: (field, getattr(args, field.name)) for field in dataclasses.fields(args) if field.init}
    return {
        name: value
        for name, (field, value) in values.items()
        if not (value is field.default or (type(value) is type(field.default) and value == field.default))
    }


def _problem(hint: Any, name: str, value: Any) -> str | None:
    if name == "report_to":
        return _tracker_problem(value)
    if name in CHOICES and isinstance(value, str) and not isinstance(value, Enum):
        return None if value in CHOICES[name] else f"expected {_choices(CHOICES[name], value)}, got {value!r}"
    if name == "max_steps" and type(value) is int and not 1 <= value <= MOST_STEPS and value != -1:
        return f"expected 1 to {MOST_STEPS}, or -1 for as many as num_train_epochs takes, got {value}"
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not all(_is_plain(option) for option in options):
        # An object of some library's own; this one also has a form in files, which the Trainer does not take.
        written = name == "parallelism_config" and isinstance(value, Mapping | str)
        return (
            f"expected null; sequence_parallel_size divides sequences (docs/large_models.md), got {value!r:.80}"
            if written
            else None
        )
    try:
        typed, bounded = _checkers(hint, float in options, name)
        typed.validate_python(_plain(value), strict=True)
        if value is not None and bounded is not None:
            bounded.validate_python(value)
    except ValidationError:
        return f"expected {_expected(options, name)}, got {value!r:.80}"
    return None


@functools.cache
def _checkers(hint: Any, is_float: bool, name: str) -> tuple[TypeAdapter[Any], TypeAdapter[float] | None]:
    """Checks of an argument's type and of its bounds; to make one takes far longer than to use it."""
    bounds: dict[str, Any] = dict(BOUNDS.get(name, {}))
    typed: Any = Annotated[hint, Field(allow_inf_nan=False)] if is_float else hint
    return TypeAdapter(typed), TypeAdapter(Annotated[float, Field(**bounds)]) if bounds else None


def _is_plain(option: Any) -> bool:
    base = typing.get_origin(option) or option
    return base in (*TYPES, typing.Literal) or (isinstance(base, type) and issubclass(base, Enum))


def _plain(value: Any) -> Any:
    """A path as a text, a tuple as a list and NumPy's numbers as Python's: all of them are valid."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple):
        return list(value)
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


def _expected(options: tuple[Any, ...], name: str) -> str:
    names = []
    for option in options:
        base = typing.get_origin(option) or option
        if base is typing.Literal:
            names += [repr(one) for one in typing.get_args(option)]
        elif base in TYPES:
            limits = [f"{BOUND_TEXTS[key]} {limit}" for key, limit in BOUNDS.get(name, {}).items()]
            names.append(" ".join([TYPES[base], " and ".join(limits)]).strip() if base in (int, float) else TYPES[base])
    return " or ".join(names)


def _choices(known: tuple[str, ...], value: str) -> str:
    texts = [str(getattr(one, "value", one)) for one in known]
    near = difflib.get_close_matches(value, texts, CHOICES_NAMED, cutoff=0.0 if len(texts) > CHOICES_NAMED else 1.0)
    return f"one of {', '.join(near or texts)}" + (", …" if len(near or texts) < len(texts) else "")


def _tracker_problem(value: Any) -> str | None:
    names = [value] if isinstance(value, str) else value
    if names is None or names in (["none"], ["all"]):
        return None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return f"expected a tracker's name, or a list of them, got {value!r:.80}"
    known = tuple(INTEGRATION_TO_CALLBACK)
    if unknown := [name for name in names if name not in known]:
        return f"expected none, all, or of {', '.join(known)}, got {', '.join(map(repr, unknown))}"
    if absent := [name for name in names if name not in get_available_reporting_integrations()]:
        packages = ", ".join("tensorboard, or tensorboardX" if name == "tensorboard" else name for name in absent)
        return f"{', '.join(absent)} needs a package: install {packages}"
    return None


def argument_problems_here(kind: type[TrainingArguments], values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Why training cannot start on this machine with these arguments, each right by itself, as (argument, reason).

    All that `kind` reports itself, but only the first that transformers, its optimizers and its schedulers raise.
    """
    # This changes how this process computes from now on, where it can be had.
    lasting = {"tf32"} if is_torch_tf32_available() else set()
    try:
        with _same_environment():
            args = kind(**{name: value for name, value in values.items() if name not in lasting})
            check_schedule(args)
        check_liger(args)
    except ConfigError as error:
        parts = [problem.partition(": ") for problem in error.problems]
        return [(name, text) if text else ("", name) for name, _, text in parts]
    # Whatever a library raises for arguments that do not go together, or for a package or device that is not there.
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        named = (name for name in sorted(values, key=len, reverse=True) if re.search(rf"\b{name}\b", text))
        return [(next(named, ""), text)]
    return []


def check_schedule(args: TrainingArguments) -> None:
    """Raise ConfigError if transformers cannot make this optimizer, or this schedule of the learning rate."""
    place = "optim"
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(1, 1))
        place = "lr_scheduler_kwargs" if args.lr_scheduler_kwargs else "lr_scheduler_type"
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        kwargs = dict(args.lr_scheduler_kwargs or {})
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=kwargs)
    except Exception as error:  # what is raised depends on the optimizer's package
        raise ConfigError(f"{place}: {' '.join(str(error).split()) or type(error).__name__}") from error


def check_liger(args: TrainingArguments) -> None:
    """Raise ConfigError if Liger's kernels are asked for and not installed."""
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ConfigError("use_liger_kernel: needs a GPU and a package: install liger-kernel")


@contextmanager
def _same_environment() -> Iterator[None]:
    """Restore environment variables after the block: building training arguments sets some."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
