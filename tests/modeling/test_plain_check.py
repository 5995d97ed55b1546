"""The check of plain rows: planted faults in which padding, or another row, changes a sequence."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling.plain_check import check_plain
from tiny_kinds import tiny_of_kind


def mix_rows(model: PreTrainedModel) -> None:
    """A normalization over the batch, as in batch normalization."""
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: (args[0] - 1e-6 * args[0].mean((0, 1), keepdim=True), *args[1:]))


def look_ahead(model: PreTrainedModel) -> None:
    """A convolution that is padded on the wrong side: each token sees a little of the next one."""
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: (args[0] + 1e-6 * args[0].roll(-1, dims=1), *args[1:]))


def end_counts(model: PreTrainedModel) -> None:
    """Experts that take a number of tokens which depends on the batch: no gradient shows it."""
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda _, args: (args[0] * (1 + 0.01 * args[0].shape[1]), *args[1:]))


def no_gradient(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * torch.nan, *args[1:]))


FAULTS = {
    mix_rows: "tokens of other rows",
    look_ahead: "is not causal",
    end_counts: "differ from those of each sequence alone",
    no_gradient: "is not finite",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["lfm2", "qwen3"])
def test_check_when_padding_leaks_into_a_sequence_then_it_is_refused(fault: Any, kind: str) -> None:
    model = tiny_of_kind(kind, initializer_range=0.02).float()
    check_plain(model)
    model = tiny_of_kind(kind, initializer_range=0.02).float()
    fault(model)
    with pytest.raises(ConfigError, match=rf"rows of one sequence each: .*{FAULTS[fault]}"):
        check_plain(model)


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "llama4_text"])
def test_check_when_precision_is_low_then_what_is_right_passes_and_what_is_wrong_does_not(
    kind: str, precision: str
) -> None:
    low = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    for wrong in (False, True):
        model = tiny_of_kind(kind).float()
        model = model.bfloat16() if precision == "bfloat16" else model
        if wrong:
            layer = next(module for module in model.modules() if "layers" in dict(module.named_children())).layers[0]
            layer.register_forward_pre_hook(
                lambda _, args, kwargs: (
                    tuple(value * (1 + 0.02 * value.shape[1]) for value in args[:1]) + args[1:],
                    {
                        name: value * (1 + 0.02 * value.shape[1]) if name == "hidden_states" else value
                        for name, value in kwargs.items()
                    },
                ),
                with_kwargs=True,
            )
        with low, pytest.raises(ConfigError, match="differ") if wrong else contextlib.nullcontext():
            check_plain(model)


def test_check_when_positions_depend_on_the_longest_row_then_sequences_up_to_the_context_pass() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_of_kind("llama", rope_parameters=rope, max_position_embeddings=256).float()
    check_plain(model, longest=256)
    with pytest.raises(ConfigError, match=r"is in the same batch; sequences of up to 256 tokens are fine"):
        check_plain(model, longest=257)


def test_check_when_it_has_run_then_the_model_is_as_it_was() -> None:
    model = tiny_of_kind("lfm2").float().train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    check_plain(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
