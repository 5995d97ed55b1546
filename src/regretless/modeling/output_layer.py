"""From hidden states to logits: the factor and soft cap behind the LM head, measured; any other code is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from regretless.core.errors import ConfigError
from regretless.modeling.token_logps import Head

PROBED = (-64.0, -2.0, 0.25, 1.0, 64.0)
"""Outputs of the output layer that the model's own code is given: powers of two, so that a factor is read exactly."""

_measured_heads: WeakKeyDictionary[PreTrainedModel, tuple[float, float | None] | None] = WeakKeyDictionary()
"""(factor, soft cap) behind the output layer; None: the model does more."""


def head_of(model: PreTrainedModel) -> Head:
    """The way from the decoder's hidden states to the model's logits. Raises ConfigError if it has no output layer.

    Most models apply their output layer, some then a factor or a soft cap; this is measured, once for each model, with
    the model's own code. Where it does anything else (BERT's transformation, a factor before the output layer), the
    head calls that code on each chunk of hidden states.
    """
    module = model.get_output_embeddings()
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    decoder = decoder_of(model)
    if model not in _measured_heads:
        _measured_heads[model] = _measured(model, decoder, module)
    measured = _measured_heads[model]
    if measured is not None:
        return Head(module, softcap=measured[1], scale=measured[0])
    if isinstance(module, FSDPModule):
        raise ConfigError(
            f"{type(model).__name__} does more than a factor or a soft cap between its last layer and its logits, "
            "which cannot be computed in chunks under sharding; train it with strategy ddp"
        )
    return Head(module, model_logits=lambda hidden: _own_logits(model, decoder, hidden[None])[0])


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its language-model head. Raises ConfigError if it has no such part."""
    # Some causal models call other parts `decoder`, or give their decoder a name that differs from their prefix.
    for decoder in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(decoder, PreTrainedModel) and decoder is not model:
            return decoder
    raise ConfigError(f"{type(model).__name__} has no decoder apart from its head; load it with AutoModelForCausalLM")


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block a call of the module, or of its wrapper, ends in `forward`; hooks on the way run."""
    before = module.__dict__.get("forward")
    # nn.Module.__setattr__ would do as well; the instance attribute shadows the class's method.
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class _DecoderOutput(BaseModelOutputWithPast):
    """Hidden states in the place of a decoder's output; whatever else a model looks for there is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _own_logits(model: PreTrainedModel, decoder: nn.Module, hidden: Tensor) -> Tensor:
    """(1, M, V) logits that the model's own forward makes of hidden states (1, M, D)."""

    def decoded(*_: Any, **__: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=hidden)

    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with replaced_forward(decoder, decoded):
        # The class's method: `modeling.forward` replaces that of the instance.
        output = type(model).forward(model, input_ids=ids, use_cache=False)
    logits: Tensor = output.logits
    return logits


def _measured(model: PreTrainedModel, decoder: nn.Module, module: nn.Module) -> tuple[float, float | None] | None:
    """(factor, soft cap) behind the output layer; None if the model does anything else, or nothing can be said."""
    config = model.config.get_text_config(decoder=True)
    vocabulary = getattr(module, "out_features", None) or config.vocab_size
    size, count = getattr(config, "hidden_size", None), len(PROBED)
    if size is None:
        return 1.0, getattr(config, "final_logit_softcapping", None)
    with torch.inference_mode(False), torch.no_grad():
        hidden = torch.linspace(-1, 1, count * size, device=model.device).view(1, count, size).to(model.dtype)
        # Each value at each place, so that neither a cut vocabulary nor a bias of single tokens goes unseen.
        at = torch.arange(vocabulary)[None, :] + torch.arange(count)[:, None]
        made = torch.tensor(PROBED)[at % count][None].to(model.device)
        inputs: list[Tensor] = []

        def output_layer(states: Tensor, *_: Any, **__: Any) -> Tensor:
            inputs.append(states)
            return made.clone()

        try:
            with replaced_forward(module, output_layer):
                logits = _own_logits(model, decoder, hidden)
        # What a model needs beside its decoder's hidden states depends on the architecture; then the check before
        # training compares log-probabilities with the model's own.
        except Exception:
            return 1.0, getattr(config, "final_logit_softcapping", None)
    if len(inputs) != 1 or inputs[0].shape != hidden.shape or not torch.equal(inputs[0], hidden.to(inputs[0].dtype)):
        return None
    if logits.shape != made.shape:
        return None
    tolerance = 4 * torch.finfo(logits.dtype).eps
    caps = [
        value
        for key, value in config.to_dict().items()
        if "logit" in key and "cap" in key and isinstance(value, int | float) and value
    ]
    factor = float(logits[0, 0, 0] / made[0, 0, 0])
    for scale, cap in ((factor, None), *((1.0, float(cap)) for cap in caps)):
        wanted = made * scale if cap is None else torch.tanh(made * scale / cap) * cap
        if torch.allclose(wanted, logits.float(), rtol=tolerance, atol=tolerance):
            return scale, cap
    return None


@contextlib.contextmanager
def head_input_in_one_piece(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, the output layer reads hidden states that lie in one piece of memory.

    transformers gives it a part of them where only the last logits are asked for (`logits_to_keep`). Of a
    part of a tensor, products in bfloat16 on CPUs take 60 times as long, and that for each sequence of the batch.
    """

    def in_one_piece(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype == torch.bfloat16:
            # Not `contiguous`, which leaves strides as they are where a dimension has one element.
            return value.clone(memory_format=torch.contiguous_format)
        return value

    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda module, args: tuple(map(in_one_piece, args)))
    try:
        yield
    finally:
        hook.remove()
