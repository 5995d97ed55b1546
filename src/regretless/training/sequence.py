"""Processes of a training that compute each row together: who they are, and that their scores are those of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regretless.core.errors import ConfigError
from regretless.core.ranks import processes
from regretless.modeling.forward import causal_model, grouped, response_scores
from regretless.modeling.layout import Layout
from regretless.modeling.model_check import TOLERANCE
from regretless.modeling.sequence_parallel import SequenceGroup, check_sequence_parallel
from regretless.training.arguments import PreferenceConfig
from regretless.training.passes import LARGEST_DIFFERENCE


def sequence_group(args: PreferenceConfig, model: nn.Module, aux_coefficient: float) -> SequenceGroup | None:
    """The processes that compute each row together with this one; None if each computes rows of its own.

    All processes have to call it. Raises ConfigError if `args.sequence_parallel_size` does not fit their number or the
    model.
    """
    size = args.sequence_parallel_size
    if size == 1:
        return None
    if processes() % size:
        raise ConfigError(
            f"sequence_parallel_size: {size} does not divide {processes()}, the number of processes; start them with "
            "torchrun, accelerate launch or, in a recipe, the setting processes"
        )
    check_sequence_parallel(causal_model(model), size)
    if aux_coefficient:
        raise ConfigError(
            "sequence_parallel_size: not together with the load-balancing loss of a mixture of experts; set "
            "router_aux_loss_coef to 0, or sequence_parallel_size to 1"
        )
    return SequenceGroup.of_neighbors(size)


def check_together(model: nn.Module, layout: Layout, sequence: SequenceGroup, accelerator: Any) -> None:
    """Raise ConfigError unless the processes together give a row's tokens the log-probabilities that one gives them.

    So a model that mixes tokens anywhere but in attention is found. `model`: unwrapped. One pass of each kind.
    """
    training, inner = model.training, causal_model(model)
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            with grouped(model):
                alone = response_scores(model, layout).logps
            with grouped(model, sequence=sequence):
                together = response_scores(model, layout).logps
    finally:
        model.train(training)
    differences = (together.double() - alone.double()).abs()
    is_exact = inner.device.type == "cpu" and inner.dtype == torch.float32 and accelerator.mixed_precision == "no"
    difference, allowed = (
        (differences.max(), TOLERANCE) if is_exact else (differences.square().mean().sqrt(), LARGEST_DIFFERENCE)
    )
    if not difference <= allowed:
        raise ConfigError(
            f"sequence_parallel_size: {type(inner).__name__} gives log-probabilities that differ by "
            f"{float(difference):.2g} nats (at most {allowed:g} expected) when {sequence.size} processes compute "
            "a row together: it mixes tokens elsewhere than in attention. Set sequence_parallel_size to 1"
        )
