"""Arguments of TRL's DPOConfig: losses by TRL's names, and what is answered to arguments that are not taken."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from regretless.core.errors import ConfigError, reject
from regretless.core.terminal import print_note
from regretless.objectives import OBJECTIVES
from regretless.objectives.base import MODIFIERS
from regretless.training.methods import DEFAULT_METHOD

T = TypeVar("T")


class Answer(NamedTuple):
    """What is answered to an argument that has no meaning here."""

    harmless: tuple[Any, ...]
    """Values that ask for what is done here anyway; they are accepted without a word."""
    advice: str
    refused: bool = True
    """True for an argument that would change what is trained; any other is accepted, with a note."""


FIXED = "the reference is fixed, so that its log-probabilities can be cached"
PADDED = "rows are padded as the attention kernel needs it"
NOT_TAKEN: Mapping[str, Answer] = {
    "f_divergence_type": Answer(("reverse_kl",), "the divergence is the reverse KL"),
    "f_alpha_divergence_coef": Answer((0.5,), "the reverse KL has no coefficient"),
    "use_weighting": Answer((False,), "set objective_kwargs={'importance': 'mean'}"),
    "discopop_tau": Answer((0.05,), "the loss discopop is not implemented"),
    "activation_offloading": Answer((False,), "set gradient_checkpointing_kwargs={'offload': True}"),
    "sync_ref_model": Answer((False,), FIXED),
    "ref_model_mixup_alpha": Answer((0.6,), FIXED),
    "ref_model_sync_steps": Answer((512,), FIXED),
    "dataset_num_proc": Answer((None, 1), "the tokenizer uses all cores in one process", refused=False),
    "precompute_ref_batch_size": Answer((None,), "max_tokens_per_microbatch bounds these batches, too", refused=False),
    "padding_free": Answer((False, True), "rows have no padding", refused=False),
    "pad_to_multiple_of": Answer(("auto", None), PADDED, refused=False),
}
"""Arguments of TRL's DPOConfig that are not taken. docs/from_trl.md has all of them, and names of earlier releases."""

LOSSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sigmoid": ("dpo", {}),
    "robust": ("dpo", {}),
    "sigmoid_norm": ("dpo", {"reduction": "mean"}),
    "ipo": ("ipo", {"reduction": "mean"}),
    "hinge": ("hinge", {}),
    "apo_zero": ("apo", {"variant": "zero"}),
    "apo_down": ("apo", {"variant": "down"}),
}
"""TRL's name of a loss → the objective that is the same loss, and the hyperparameters that make it so."""
SMOOTHED = ("robust",)
"""Those of `LOSSES` that use label_smoothing."""


def losses_of(loss_type: str | Sequence[str] | None) -> list[str]:
    """The names in `loss_type`."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type or ())


def objective_of(names: Sequence[str], weights: Sequence[float] | None) -> str:
    """The objective that TRL's losses with these weights are; empty without losses."""
    if len(names) > 1 or (names and weights not in (None, [1.0])):
        return "weighted_sum"
    return LOSSES[names[0]][0] if names else ""


def hyperparameters_of(
    names: Sequence[str], weights: Sequence[float] | None, beta: float | None, label_smoothing: float
) -> dict[str, Any]:
    """Hyperparameters of this objective; without losses those that are given."""
    common = {} if beta is None else {"beta": beta}
    smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
    each = [{**common, **(smoothing if name in SMOOTHED else {}), **LOSSES[name][1]} for name in names]
    if objective_of(names, weights) != "weighted_sum":
        return each[0] if each else {**common, **smoothing}
    terms = zip(names, weights or [1.0] * len(names), each, strict=True)
    return {"terms": [{"objective": LOSSES[name][0], "weight": weight, **own} for name, weight, own in terms]}


def loss_problems(
    loss_type: str | Sequence[str] | None, weights: Sequence[float] | None, objective: str, label_smoothing: float
) -> list[str]:
    """Why these four cannot be trained as TRL means them; `objective` is empty if none was chosen."""
    names = losses_of(loss_type)
    problems = []
    if loss_type is not None and not names:
        problems.append("loss_type: expected at least one loss, got an empty list; omit it")
    if weights is not None and len(weights) != len(names):
        problems.append(f"loss_weights: expected a weight for each of {len(names)} losses in loss_type, got {weights}")
    for name in names:
        if name not in LOSSES:
            instead = f"; set objective={name!r}, without loss_type" if name in OBJECTIVES else ""
            problems.append(f"loss_type: expected one of {', '.join(LOSSES)}, got {name!r}{instead} (docs/from_trl.md)")
    found = "" if problems else objective_of(names, weights)
    if found and objective not in ("", found):
        shown = repr(names[0]) if len(names) == 1 else " + ".join(names)
        problems.append(f"loss_type: {shown} is objective={found!r}, got {objective!r}; remove one")
    if label_smoothing:
        if names and not set(SMOOTHED) & set(names):
            problems.append(f"label_smoothing: {' + '.join(names)} does not use it; set loss_type='robust', or omit it")
        elif not problems and not names and (method := objective or DEFAULT_METHOD) != "dpo":
            problems.append(f"label_smoothing: {method} has none; set loss_type='robust', or omit it")
    return problems


def answering(kind: type[T]) -> type[T]:
    """Make a dataclass of arguments answer those of TRL that are none of its own; for use as a decorator.

    Each value that changes nothing is accepted, with a note if it asks for something. All others, and unknown
    arguments, are problems of one ConfigError, with the problems of the arguments that are known.
    """
    build = kind.__init__
    known = tuple(field.name for field in dataclasses.fields(kind) if field.init)  # type: ignore[arg-type]

    @functools.wraps(build)
    def initialize(self: T, *args: Any, **given: Any) -> None:
        own = {name: value for name, value in given.items() if name in known}
        problems = [line for name, value in given.items() if name not in own for line in _problem(name, value, known)]
        try:
            build(self, *args, **own)
        except ConfigError as error:
            if not problems:
                raise
            problems = [*error.problems, *problems]
        reject(kind.__name__, problems)
        for name, value in given.items():
            if name in NOT_TAKEN and value not in NOT_TAKEN[name].harmless:
                print_note(f"note: {name}: has no effect here: {NOT_TAKEN[name].advice}")

    kind.__init__ = initialize  # type: ignore[assignment, method-assign]
    return kind


def _problem(name: str, value: Any, known: Collection[str]) -> list[str]:
    if name in NOT_TAKEN:
        harmless, advice, refused = NOT_TAKEN[name]
        return [f"{name}: not used here: {advice}"] if refused and value not in harmless else []
    if name in MODIFIERS:
        return [f"{name}: a hyperparameter of every method; set objective_kwargs={{{name!r}: {value!r}}}"]
    methods = [method for method, objective in OBJECTIVES.usable()[0].items() if name in objective.model_fields]
    if methods:
        return [f"{name}: a hyperparameter of {', '.join(methods)}; set objective_kwargs={{{name!r}: {value!r}}}"]
    close = difflib.get_close_matches(name, sorted(known), 1)
    return [f"{name}: unknown argument; " + (f"did you mean {close[0]}?" if close else "TRL's are in docs/from_trl.md")]
