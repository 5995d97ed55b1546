"""How training arguments are checked, one by one: transformers checks few, and only when training starts."""

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
from dataclasses import dataclass
from enum import Enum, EnumType
from itertools import chain
from typing import Annotated, Any, Literal, Union

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_liger_kernel_available, is_torch_tf32_available

from regretless.core.errors import ConfigError
from regretless.core.paths import NOTHING
from regretless.core.settings import Unquoted

BOUND_TEXTS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
Verdict = Literal["taken", "taken in Python", "no effect", "refused"]


@dataclass(frozen=True)
class ArgumentRule:
    """What holds for one argument of training beyond its type."""

    verdict: Verdict = "taken"
    """`taken in Python`: the stage train sets it itself, or it has no meaning there. `no effect`: taken with a note."""
    advice: str = ""
    """What to do instead, or why there is nothing to do; for every verdict but `taken`."""
    harmless: tuple[Any, ...] = ()
    """Values that ask for what is done anyway; they are accepted without a word."""
    gt: float | None = None
    """Bounds of a number, as pydantic's `Field` takes them."""
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    """The values of a text, where no `Enum` of the argument's type says them."""
    problem: Callable[[Any], str | None] | None = None
    """What is wrong with a value of any type; None for one that type, bounds and choices decide about."""

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by their names."""
        return {name: limit for name in BOUND_TEXTS if (limit := getattr(self, name)) is not None}


NO_RULE = ArgumentRule()
"""The rule of an argument that only its type is checked of."""
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


def argument_problems(
    kind: type[TrainingArguments], values: Mapping[str, Any], rules: Mapping[str, ArgumentRule]
) -> dict[str, str]:
    """Problems of training arguments by themselves, by name; names that `kind` does not have are skipped.

    Types as `kind` declares them (without conversion: a text is no number, and none is empty), and what the rules say
    of values.
    """
    hints, problems = _hints(kind), {}
    for name, value in values.items():
        rule = rules.get(name, NO_RULE)
        # `dataclasses.replace` passes the object on that transformers has made of a mapping.
        if name not in hints or isinstance(value, AcceleratorConfig) or any(value is each for each in rule.harmless):
            continue
        if isinstance(value, str) and not value.strip() and value != getattr(kind, name, None):
            problems[name] = NOTHING
        elif (problem := _problem(hints[name], value, rule)) is not None:
            problems[name] = problem
    return problems


def changed_arguments(args: TrainingArguments) -> dict[str, Any]:
    """The arguments whose values are not the defaults."""
    values = {field.name: (field, getattr(args, field.name)) for field in dataclasses.fields(args) if field.init}
    return {
        name: value
        for name, (field, value) in values.items()
        if not (value is field.default or (type(value) is type(field.default) and value == field.default))
    }


def _problem(hint: Any, value: Any, rule: ArgumentRule) -> str | None:
    if rule.problem is not None and (problem := rule.problem(value)) is not None:
        return problem
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    choices = rule.choices or tuple(chain.from_iterable(option for option in options if isinstance(option, EnumType)))
    if choices and isinstance(value, str) and not isinstance(value, Enum):
        if value not in choices:
            return f"expected {_choices(choices, value)}, got {value!r}"
    # An argument that takes an object of a library has no type that could be checked.
    elif all(map(_is_plain, options)):
        typed, bounded = _checkers(hint, float in options, rule)
        try:
            typed.validate_python(_plain(value), strict=True)
            if value is not None and bounded is not None:
                bounded.validate_python(value)
        except ValidationError:
            return f"expected {_expected(options, rule)}, got {value!r:.80}"
    return None


@functools.cache
def _checkers(hint: Any, is_float: bool, rule: ArgumentRule) -> tuple[TypeAdapter[Any], TypeAdapter[float] | None]:
    """Checks of an argument's type and of its bounds; to make one takes far longer than to use it."""
    bounds: dict[str, Any] = rule.bounds
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


def _expected(options: tuple[Any, ...], rule: ArgumentRule) -> str:
    limits = " and ".join(f"{BOUND_TEXTS[name]} {limit}" for name, limit in rule.bounds.items())
    names = []
    for option in options:
        base = typing.get_origin(option) or option
        if base is typing.Literal:
            names += [repr(choice) for choice in typing.get_args(option)]
        elif base in TYPES:
            names.append(f"{TYPES[base]} {limits}".strip() if base in (int, float) else TYPES[base])
    return " or ".join(names)


def _choices(choices: tuple[str, ...], value: str) -> str:
    texts = [str(getattr(choice, "value", choice)) for choice in choices]
    near = difflib.get_close_matches(value, texts, CHOICES_NAMED, cutoff=0.0 if len(texts) > CHOICES_NAMED else 1.0)
    return f"one of {', '.join(near or texts)}" + (", …" if len(near or texts) < len(texts) else "")


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
    cause = "optim"
    try:
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(1, 1))
        cause = "lr_scheduler_kwargs" if args.lr_scheduler_kwargs else "lr_scheduler_type"
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        kwargs = dict(args.lr_scheduler_kwargs or {})
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, 1, 10, scheduler_specific_kwargs=kwargs)
    except Exception as error:  # what is raised depends on the optimizer's package
        raise ConfigError(f"{cause}: {' '.join(str(error).split()) or type(error).__name__}") from error
    if getattr(args, "schedule_part", None) is not None:
        behind(schedule, 0)


def behind(schedule: Any, steps: int) -> LambdaLR:
    """A schedule of the learning rate, as it is behind so many of its steps.

    Raises ConfigError for one that does not follow from the number of steps alone.
    """
    if not isinstance(schedule, LambdaLR):
        raise ConfigError(
            f"schedule_part: {type(schedule).__name__} follows what is measured, not the number of steps, and has no "
            "parts; choose another lr_scheduler_type, such as linear or cosine, or leave schedule_part out"
        )
    return LambdaLR(schedule.optimizer, schedule.lr_lambdas, last_epoch=steps - 1)


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
