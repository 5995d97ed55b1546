"""A model's forward pass over a shared-prefix row, through whatever wraps the model (peft, DDP, FSDP)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from regretless.errors import ConfigError
from regretless.modeling import attention, flex
from regretless.modeling.layout import Layout, lay_out
from regretless.modeling.token_logps import Head, ReferenceHead, TokenScores, token_scores


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers. Raises ConfigError when there is none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(
        f"expected a transformers model (or one wrapped by peft or accelerate), got {type(model).__name__}"
    )


def head_of(model: PreTrainedModel) -> Head:
    """The model's language-model head. Raises ConfigError when it has none."""
    module = model.get_output_embeddings()
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no language-model head; load it with AutoModelForCausalLM")
    return Head(module, getattr(model.config.get_text_config(), "final_logit_softcapping", None))


@contextlib.contextmanager
def grouped(model: nn.Module, *, flex_attention: bool | None = None) -> Iterator[None]:
    """Within the block, calling `model` runs shared-prefix rows (see `response_scores`).

    `flex_attention`: FlexAttention over one padded row, or (False) a call of SDPA for each response, nothing padded;
    by default the first on CUDA devices and the second elsewhere.
    The backward pass belongs inside too: gradient checkpointing runs the forward pass again. The inner model's
    `forward` is replaced, not the wrappers', so that their hooks (adapters, gradient synchronization, sharding) run.
    """
    inner = causal_model(model)
    head, decoder = head_of(inner), inner.get_decoder()
    before = inner.__dict__.get("forward")
    in_one_row = inner.device.type == "cuda" if flex_attention is None else flex_attention

    def forward(
        input_ids: Tensor,
        position_ids: Tensor,
        layout: Layout,
        reference: ReferenceHead | None = None,
        hidden_only: bool = False,
        **_: Any,
    ) -> TokenScores | Tensor:
        extra: dict[str, Any] = {"segments": layout.segments}
        if in_one_row:
            padding = (0, -layout.tokens % flex.BLOCK)
            input_ids, position_ids = functional.pad(input_ids, padding), functional.pad(position_ids, padding)
            extra = {"row_mask": flex.RowMask(layout.segments, input_ids.shape[1], input_ids.device)}
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
        hidden: Tensor = output.last_hidden_state[0, layout.predict]
        return hidden if hidden_only else token_scores(hidden, head, layout.targets, reference)

    # nn.Module.__setattr__ would do as well; the instance attribute shadows the class's method.
    inner.__dict__["forward"] = forward
    try:
        with _attention(inner, flex.NAME if in_one_row else attention.NAME):
            yield
    finally:
        if before is None:
            del inner.__dict__["forward"]
        else:
            inner.__dict__["forward"] = before


@contextlib.contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within the block the model's attention function is the named one; afterwards it is what it was."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def response_scores(model: nn.Module, layout: Layout, reference: ReferenceHead | None = None) -> TokenScores:
    """Scores (M,) of a layout's response tokens, with `reference` the full-vocabulary KL too; inside `grouped`."""
    scores: TokenScores = model(
        input_ids=layout.input_ids, position_ids=layout.position_ids, layout=layout, reference=reference
    )
    return scores


def reference_head(model: nn.Module, layout: Layout) -> ReferenceHead:
    """Hidden states (M, D) that predict a layout's response tokens, and the head; inside `grouped`, no gradient."""
    with torch.no_grad():
        hidden: Tensor = model(
            input_ids=layout.input_ids, position_ids=layout.position_ids, layout=layout, hidden_only=True
        )
    return ReferenceHead(hidden, head_of(causal_model(model)))


def check_grouped(model: nn.Module) -> None:
    """Compare the shared-prefix pass with the model's own on a small input, so that an unsupported model is refused.

    Raises ConfigError when they differ: the architecture then does something that the shared pass does not know of.
    """
    inner = causal_model(model)
    vocabulary = inner.config.get_text_config().vocab_size
    numbers = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=numbers).tolist())

    items = [(prompt := some(5), some(7)), (prompt, some(4)), (some(3), some(6))]
    layout, places = lay_out(items)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with grouped(model):
                found = response_scores(model, layout.to(inner.device)).logps.float().cpu()
            for (prompt, response), place in zip(items, places, strict=True):
                row = torch.tensor([prompt + response], device=inner.device)
                logits = inner(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
                wanted = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0].cpu()
                got = found[place.start : place.start + place.length]
                tolerance = 1e-3 if inner.dtype in (torch.float32, torch.float64) else 0.25
                if not torch.allclose(got, wanted, atol=tolerance, rtol=1e-2):
                    raise ConfigError(
                        f"{type(inner).__name__}: shared-prefix log-probabilities differ from the model's own by up to "
                        f"{(got - wanted).abs().max():.3g} nats on a test input; this architecture is not supported"
                    )
    finally:
        model.train(training)
