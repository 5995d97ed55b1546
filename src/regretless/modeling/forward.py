"""A model's forward pass over a shared-prefix row, through whatever wraps the model (peft, DDP, FSDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention
from regretless.modeling.adapters import fused_adapters
from regretless.modeling.layout import Layout
from regretless.modeling.norms import fused_norms
from regretless.modeling.token_logps import Head, ReferenceHead, TokenScores, token_scores


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers. Raises ConfigError if there is none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(
        f"expected a transformers model (or one wrapped by peft or accelerate), got {type(model).__name__}"
    )


def head_of(model: PreTrainedModel) -> Head:
    """The model's language-model head. Raises ConfigError if it has none."""
    module = model.get_output_embeddings()
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    return Head(module, getattr(model.config.get_text_config(), "final_logit_softcapping", None))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model without its language-model head. Raises ConfigError if it has no such part."""
    # Some causal models call other parts `decoder`, or give their decoder a name that differs from their prefix.
    for decoder in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if isinstance(decoder, PreTrainedModel) and decoder is not model:
            return decoder
    raise ConfigError(f"{type(model).__name__} has no decoder apart from its head; load it with AutoModelForCausalLM")


def in_one_row(device: torch.device) -> bool:
    """Whether a shared-prefix row on this device is computed by FlexAttention; elsewhere SDPA takes its responses."""
    return device.type == "cuda"


@contextlib.contextmanager
def grouped(model: nn.Module, *, one_row: bool | None = None) -> Iterator[None]:
    """Within the block, calling `model` runs shared-prefix rows (see `response_scores`).

    `one_row`: FlexAttention over one padded row, or (False) a call of SDPA for each response, nothing padded;
    by default the first on CUDA devices and the second elsewhere.
    The backward pass belongs inside too: gradient checkpointing runs the forward pass again. The inner model's
    `forward` is replaced, not the wrappers', so that their hooks (adapters, gradient synchronization, sharding) run.
    """
    inner = causal_model(model)
    head, decoder = head_of(inner), decoder_of(inner)
    padded = in_one_row(inner.device) if one_row is None else one_row

    def forward(
        input_ids: Tensor,
        position_ids: Tensor,
        layout: Layout,
        reference: ReferenceHead | None = None,
        hidden_only: bool = False,
        statistics: bool = False,
        **_: Any,
    ) -> TokenScores | Tensor:
        extra: dict[str, Any] = {"segments": layout.segments}
        if padded:
            padding = (0, gpu_attention.padded_length(layout.tokens) - layout.tokens)
            input_ids, position_ids = functional.pad(input_ids, padding), functional.pad(position_ids, padding)
            extra = {"row_mask": gpu_attention.RowMask(layout.segments, input_ids.shape[1], input_ids.device)}
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
        hidden: Tensor = output.last_hidden_state[0, layout.predict]
        if hidden_only:
            return hidden
        return token_scores(hidden, head, layout.targets, reference, statistics=statistics)

    with (
        replaced_forward(inner, forward),
        attention_by(inner, gpu_attention.NAME if padded else cpu_attention.NAME),
        fused_adapters(inner),
        fused_norms(inner),
    ):
        yield


@contextlib.contextmanager
def replaced_forward(model: PreTrainedModel, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block a call of the model, or of its wrapper, ends in `forward`; hooks on the way run."""
    before = model.__dict__.get("forward")
    # nn.Module.__setattr__ would do as well; the instance attribute shadows the class's method.
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = before


@contextlib.contextmanager
def attention_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block the model's attention function is the named one; afterwards it is the previous one."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def response_scores(
    model: nn.Module, layout: Layout, reference: ReferenceHead | None = None, *, statistics: bool = False
) -> TokenScores:
    """Scores (M,) of a layout's response tokens, with `reference` the full-vocabulary KL too; inside `grouped`."""
    scores: TokenScores = model(
        input_ids=layout.input_ids,
        position_ids=layout.position_ids,
        layout=layout,
        reference=reference,
        statistics=statistics,
    )
    return scores


def reference_head(model: nn.Module, layout: Layout) -> ReferenceHead:
    """Hidden states (M, D) that predict a layout's response tokens, and the head; inside `grouped`, no gradient."""
    with torch.no_grad():
        hidden: Tensor = model(
            input_ids=layout.input_ids, position_ids=layout.position_ids, layout=layout, hidden_only=True
        )
    return ReferenceHead(hidden, head_of(causal_model(model)))
