"""The type of the trained weights: float32 preserves small updates that bfloat16 rounds away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from regretless.core.terminal import print_note
from regretless.modeling.forward import causal_model
from regretless.modeling.load import say_if_slow
from regretless.training.arguments import PreferenceConfig

HALF = (torch.bfloat16, torch.float16)
WEIGHTS_AT_ONCE = 1 << 24
KEEPS_SMALL_UPDATES = {
    "stable_adamw": ("kahan_sum", True),
    "adamw_torch_8bit": ("bf16_stochastic_round", False),
    "adamw_torch_4bit": ("bf16_stochastic_round", False),
}
"""Optimizers of the Trainer that can preserve updates of bfloat16 weights: their entry in `optim_args`, its default."""


def fit_trained_weights(model: nn.Module, args: PreferenceConfig, *, as_loaded: bool) -> None:
    """Cast the trainable weights in place to `args.trained_dtype`, by default float32.

    `as_loaded`: weights keep their type if none is set. Weights that stay in half precision are reported on the
    terminal, with the share of updates that rounding will lose, unless the optimizer preserves them.
    """
    if args.trained_dtype is not None or not as_loaded:
        changed = set_trained_dtype(model, getattr(torch, args.trained_dtype or "float32"))
        autocast = args.mixed_precision != "no" or not torch.accelerator.is_available()
        if changed and args.trained_dtype is None and not autocast:
            print_note(
                "note: the weights are trained and computed with in float32; with bf16=True they compute in bfloat16"
            )
    if args.bf16:
        say_if_slow(torch.bfloat16, "leave out bf16")
    half = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype in HALF]
    if half and not keeps_small_updates(args):
        lost = share_lost(half, args.learning_rate)
        print_note(
            f"note: the trained weights are {str(half[0].dtype).removeprefix('torch.')}: at learning rate "
            f"{args.learning_rate:g}, {lost:.1%} of the updates or more are below half a step between two numbers of "
            "that type, and rounding loses them (an estimate for Adam, whose updates are of the learning rate's "
            "size). Leave out trained_dtype and the model's dtype to train in float32, or set optim=stable_adamw, "
            "whose Kahan summation keeps them"
        )


def match_reference(reference: nn.Module, policy: nn.Module) -> None:
    """Cast a reference in half precision to float32, in place, if the policy was cast to it.

    Rewards are differences between the two: computed in one type, they contain no rounding of the weights' type.
    """
    if causal_model(policy).dtype == torch.float32:
        for weight in reference.parameters():
            if weight.dtype in HALF:
                weight.data = weight.data.float()


def set_trained_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Cast the trainable weights to `dtype`, in place; returns whether any was of another type.

    float32 is a lower bound: float64 stays, and no value changes. An adapter's own weights are cast alone, because its
    layers take inputs of any type. Where whole layers are trained, the frozen ones are cast too: without autocast, a
    layer takes inputs of its own type only.
    """
    others = HALF if dtype == torch.float32 else (torch.float32, torch.float16)
    adapter = {
        id(weight)
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        for name in module.adapter_layer_names
        if isinstance(part := getattr(module, name, None), nn.Module)
        for weight in part.parameters()
    }
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.dtype in others]
    alone = all(id(weight) in adapter for weight in trained)
    for weight in trained if alone else model.parameters():
        if weight.dtype in others:
            weight.data = weight.data.to(dtype)
    return bool(trained)


def share_lost(weights: Iterable[Tensor], update: float) -> float:
    """Share of the numbers in `weights` that stay as they are when `update` is added or subtracted in their type."""
    lost = total = 0
    for weight in weights:
        for part in torch.split(weight.detach().flatten(), WEIGHTS_AT_ONCE):
            exact = part.float()
            lost += int((((exact + update).to(part.dtype) == part) & ((exact - update).to(part.dtype) == part)).sum())
        total += weight.numel()
    return lost / total if total else 0.0


def keeps_small_updates(args: PreferenceConfig) -> bool:
    """True if the optimizer in `optim` and `optim_args` compensates for the rounding of its updates."""
    option, default = KEEPS_SMALL_UPDATES.get(str(getattr(args.optim, "value", args.optim)), ("", False))
    options = dict(entry.split("=", 1) for entry in (args.optim_args or "").replace(" ", "").split(",") if "=" in entry)
    return str(options.get(option, default)).lower() in ("true", "1", "yes")
