"""Arguments of TRL's DPOConfig: losses by TRL's names, arguments without an effect, and answers to all others.

Scripts for earlier releases of TRL and transformers have arguments that are gone; these are answered, too.
"""

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


class Instead(NamedTuple):
    """An argument that is not taken."""

    harmless: tuple[Any, ...]
    """Values that ask for what is done here anyway; they are accepted."""
    advice: str
    """What to do in place of any other value."""


OWN = "write it as an objective of your own (CONTRIBUTING.md, Adding an objective)"
REFUSED: Mapping[str, Instead] = {
    "f_divergence_type": Instead(("reverse_kl",), "the divergence is the reverse KL; for another one, " + OWN),
    "f_alpha_divergence_coef": Instead((0.5,), "the divergence is the reverse KL, which has no coefficient"),
    "use_weighting": Instead(
        (False,),
        "set objective_kwargs={'importance': 'mean'}, WPO's weights with the probabilities that the responses were "
        "sampled with in place of estimates",
    ),
    "discopop_tau": Instead((0.05,), "the loss discopop is not implemented; " + OWN),
    "activation_offloading": Instead(
        (False,),
        "lower max_tokens_per_microbatch, or set gradient_checkpointing=True, with "
        "gradient_checkpointing_kwargs={'offload': True} to keep the layers' inputs in the host's memory",
    ),
    "sync_ref_model": Instead((False,), "the reference is fixed, so that its log-probabilities can be cached"),
    "ref_model_mixup_alpha": Instead((0.6,), "the reference is fixed, so that its log-probabilities can be cached"),
    "ref_model_sync_steps": Instead((512,), "the reference is fixed, so that its log-probabilities can be cached"),
    # Of earlier releases of TRL, and of its other configurations.
    "max_completion_length": Instead((None,), "set max_length, for prompt and response together"),
    "rpo_alpha": Instead((None,), "set objective='rpo' and objective_kwargs={'eta': …}"),
    "reference_free": Instead((False,), "set objective='cpo', 'simpo' or 'orpo', which have no reference"),
    "force_use_ref_model": Instead((False, True), "pass ref_model to the trainer"),
    "generate_during_eval": Instead(
        (False,),
        "set log_completions_steps for tables of the model's own responses in the trackers of report_to; `regretless "
        "evaluate` generates and grades after training",
    ),
    "log_completions": Instead(
        (False,), "set log_completions_steps: the tables have chosen, rejected and the model's own response"
    ),
    "num_completions_to_print": Instead((None,), "set log_completions_prompts, with log_completions_steps"),
    "model_adapter_name": Instead((None,), "pass a model with one adapter, or a peft_config"),
    "ref_adapter_name": Instead((None,), "pass ref_model to the trainer"),
    "is_encoder_decoder": Instead((None, False), "only causal models are trained"),
    "use_liger_loss": Instead((False,), "the head computes in chunks already; omit it"),
    # Of earlier releases of transformers.
    "warmup_ratio": Instead((None, 0.0), "set warmup_steps to this number: below 1 it is a share of all steps"),
    "evaluation_strategy": Instead((), "it is called eval_strategy"),
    "per_gpu_train_batch_size": Instead((None,), "it is called per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Instead((None,), "it is called per_device_eval_batch_size"),
    "no_cuda": Instead((False,), "it is called use_cpu"),
    "push_to_hub_model_id": Instead((None,), "it is called hub_model_id"),
    "push_to_hub_token": Instead((None,), "it is called hub_token; better, log in with `hf auth login`"),
    "logging_dir": Instead((None,), "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": Instead((True,), "weights are saved in no other format; omit it"),
    # Of TRL's CPO and of SimPO's authors, and what other libraries call them.
    "cpo_alpha": Instead((), "it is called sft_weight, a hyperparameter of cpo"),
    "simpo_gamma": Instead((), "it is called gamma, a hyperparameter of simpo"),
    "gamma_beta_ratio": Instead((), "set gamma, a hyperparameter of simpo, to this number times beta"),
    "lr": Instead((), "it is called learning_rate"),
    "epochs": Instead((), "it is called num_train_epochs"),
    "num_epochs": Instead((), "it is called num_train_epochs"),
    "batch_size": Instead((), "it is called per_device_train_batch_size; in a recipe, pairs_per_step"),
    "tools": Instead((None,), "put them into the column `tools` of the rows"),
    "chat_template_kwargs": Instead((None,), "put them into the column `chat_template_kwargs` of the rows"),
}
"""Arguments that would change what is trained, and are refused."""

NO_EFFECT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "dataset_num_proc": ((None, 1), "the tokenizer uses all cores in one process"),
    "precompute_ref_batch_size": ((None,), "the reference's batches are bounded by max_tokens_per_microbatch, too"),
    "padding_free": ((False, True), "rows have no padding"),
    "pad_to_multiple_of": (("auto", None), "rows are padded as the attention kernel needs it"),
    "label_pad_token_id": ((-100,), "there are no labels to pad"),
    "padding_value": ((None,), "rows are padded as the attention kernel needs it"),
    "overwrite_output_dir": ((False, True), "training resumes only if resume_from_checkpoint asks for it"),
    "group_by_length": ((False,), "rows are filled up to max_tokens_per_microbatch"),
    "use_logits_to_keep": ((False, True), "logits are computed for response tokens only"),
}
"""Arguments about speed or memory that change no result here: their default values, and why they do nothing."""

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
OTHER_LOSSES: Mapping[str, str] = {
    "sft": "objective='sft' averages over responses, where TRL averages over the tokens of a batch; beside another "
    "loss, set objective='weighted_sum' and objective_kwargs={'terms': …}, without loss_type.",
    "kto_pair": "set objective='kto', without loss_type.",
}


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
            close = difflib.get_close_matches(name, LOSSES, 1)
            own = f"unknown; did you mean {close[0]}?" if close else f"not implemented; {OWN}."
            if name in OBJECTIVES:
                own = f"set objective={name!r}, without loss_type."
            problems.append(f"loss_type: {name!r}: {OTHER_LOSSES.get(name, own)} Taken are {', '.join(LOSSES)}")
    found = "" if problems else objective_of(names, weights)
    if found and objective not in ("", found):
        shown = repr(names[0]) if len(names) == 1 else " + ".join(names)
        problems.append(f"loss_type: {shown} is objective={found!r}, got {objective!r}; remove one")
    if label_smoothing:
        if names and not set(SMOOTHED) & set(names):
            problems.append(
                f"label_smoothing: the loss {' + '.join(names)} does not use it (nor does it in TRL); set "
                "loss_type='robust' or, for cDPO, objective='dpo' and objective_kwargs={'smoothing': 'conservative'}"
            )
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
            if name in NO_EFFECT and value not in NO_EFFECT[name][0]:
                print_note(f"note: {name}: has no effect here: {NO_EFFECT[name][1]}")

    kind.__init__ = initialize  # type: ignore[assignment, method-assign]
    return kind


def _problem(name: str, value: Any, known: Collection[str]) -> list[str]:
    if name in REFUSED:
        harmless, advice = REFUSED[name]
        return [] if value in harmless else [f"{name}: not used here: {advice}"]
    if name in NO_EFFECT:
        return []
    if name in MODIFIERS:
        return [f"{name}: a hyperparameter of every method; set objective_kwargs={{{name!r}: {value!r}}}"]
    methods = [method for method, objective in OBJECTIVES.usable()[0].items() if name in objective.model_fields]
    if methods:
        return [f"{name}: a hyperparameter of {', '.join(methods)}; set objective_kwargs={{{name!r}: {value!r}}}"]
    close = difflib.get_close_matches(name, sorted(known), 1)
    return [f"{name}: unknown argument" + (f"; did you mean {close[0]}?" if close else "")]
