"""A model's forward pass over shared-prefix or plain rows, through whatever wraps the model (peft, DDP, FSDP)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention, sequence_parallel
from regretless.modeling.adapters import fused_adapters
from regretless.modeling.compiled_layers import RowKeywords, compiled_layers, is_compiled
from regretless.modeling.gated_mlp import lean_mlps
from regretless.modeling.layout import Layout, Segment
from regretless.modeling.norms import fused_norms
from regretless.modeling.output_layer import decoder_of, head_of, replaced_forward
from regretless.modeling.recurrent import forked_states
from regretless.modeling.router_loss import asked, with_routers
from regretless.modeling.rows import RowKind
from regretless.modeling.sequence_parallel import SequenceGroup
from regretless.modeling.token_logps import ReferenceHead, TokenScores, token_scores


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers. Raises ConfigError if there is none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ConfigError(
        f"expected a transformers model (or one wrapped by peft or accelerate), got {type(model).__name__}"
    )


def in_one_row(device: torch.device) -> bool:
    """Whether a shared-prefix row on this device is computed by FlexAttention; elsewhere SDPA takes its responses."""
    return device.type == "cuda"


@contextlib.contextmanager
def grouped(model: nn.Module, *, one_row: bool | None = None, sequence: SequenceGroup | None = None) -> Iterator[None]:
    """Within the block, calling `model` runs shared-prefix rows (see `response_scores`).

    `one_row`: FlexAttention over one padded row, or (False) a call of SDPA for each response, nothing padded;
    by default the first on CUDA devices and the second elsewhere.
    `sequence`: processes that compute each row together; all of them have to call the model with the same rows.
    The backward pass belongs inside too: gradient checkpointing runs the forward pass again. The inner model's
    `forward` is replaced, not the wrappers', so that their hooks (adapters, gradient synchronization, sharding) run.
    """
    inner = causal_model(model)
    head, decoder = head_of(inner), decoder_of(inner)
    padded = in_one_row(inner.device) if one_row is None else one_row
    attention = gpu_attention.NAME if padded else cpu_attention.NAME
    compiled = is_compiled(inner)

    def forward(
        input_ids: Tensor,
        position_ids: Tensor,
        layout: Layout,
        reference: ReferenceHead | None = None,
        hidden_only: bool = False,
        statistics: bool = False,
        **_: Any,
    ) -> TokenScores | Tensor:
        if layout.is_plain:
            raise ValueError("plain rows were given to `grouped`; compute them inside `plain`")
        # Pad the row to what the attention and the processes need.
        extra: dict[str, Any] = {"segments": layout.segments}
        length = gpu_attention.padded_length(layout.tokens) if padded else layout.tokens
        if sequence is not None:
            length += -length % (math.lcm(gpu_attention.BLOCK, sequence.size) if padded else sequence.size)
            extra |= {"sequence": sequence, "by": attention}
        if padding := length - layout.tokens:
            input_ids, position_ids = (functional.pad(ids, (0, padding)) for ids in (input_ids, position_ids))
        if padded:
            extra["row_mask"] = gpu_attention.RowMask(layout.segments, length, input_ids.device)
        elif padding:
            extra["segments"] = (*layout.segments, Segment(padding))
        # The decoder, on this process's part of the row.
        if sequence is not None:
            input_ids, position_ids = sequence.part(input_ids), sequence.part(position_ids)
        extra = {"row": RowKeywords(extra)} if compiled else extra | asked(layout, hidden_only=hidden_only)
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
        # Scores of the response tokens, from the hidden states that predict them.
        hidden, predict, targets, listed = output.last_hidden_state, layout.predict, layout.targets, layout.listed
        if sequence is not None:
            hidden = sequence.whole(hidden)
            if not hidden_only:
                predict, targets = sequence.share(predict), sequence.share(targets)
                reference = sequence.share_of_reference(reference)
                listed = None if listed is None else sequence.share(listed)
        hidden = head.cast(hidden[0, predict])
        if hidden_only:
            return hidden
        scores = token_scores(hidden, head, targets, reference, listed=listed, statistics=statistics)
        scores = scores if sequence is None else sequence.all_scores(scores, len(layout.targets))
        return with_routers(scores, inner, output, layout)

    with (
        replaced_forward(inner, forward),
        attention_by(inner, attention if sequence is None else sequence_parallel.NAME),
        compiled_layers(inner) if compiled else _fused(inner),
        forked_states(inner),
    ):
        yield


@contextlib.contextmanager
def _fused(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, parts of the model's layers take fewer passes over memory, and keep less of it."""
    with fused_adapters(model), fused_norms(model), lean_mlps(model):
        yield


@contextlib.contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Within the block, calling `model` runs plain rows (`modeling.rows`) by the model's own attention and masks.

    Nothing tells the model that rows are padded: padding is behind every sequence, where a causal model cannot see it.
    The backward pass belongs inside too, as in `grouped`.
    """
    inner = causal_model(model)
    head, decoder = head_of(inner), decoder_of(inner)

    def forward(
        input_ids: Tensor,
        layout: Layout,
        reference: ReferenceHead | None = None,
        hidden_only: bool = False,
        statistics: bool = False,
        **_: Any,
    ) -> TokenScores | Tensor:
        if not layout.is_plain:
            raise ValueError("a row that sequences share was given to `plain`, which would compute it as one sequence")
        output = decoder(input_ids=input_ids, use_cache=False, **asked(layout, hidden_only=hidden_only))
        hidden = head.cast(output.last_hidden_state.flatten(0, 1)[layout.predict])
        if hidden_only:
            return hidden
        scores = token_scores(hidden, head, layout.targets, reference, listed=layout.listed, statistics=statistics)
        return with_routers(scores, inner, output, layout)

    with replaced_forward(inner, forward):
        yield


def in_rows(
    model: nn.Module, rows: RowKind, sequence: SequenceGroup | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context within which calls of the model compute rows of this kind: `grouped` or `plain`.

    `sequence`: processes that compute each row together; for `grouped` rows only.
    """
    return grouped(model, sequence=sequence) if rows == "grouped" else plain(model)


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


def check_ids(model: nn.Module, layout: Layout) -> None:
    """Raise ConfigError for a token id that the model has no embedding of; on a GPU it would end the whole process.

    Call it with a layout on the CPU.
    """
    embeddings, largest = causal_model(model).get_input_embeddings(), int(layout.input_ids.max())
    if isinstance(embeddings, nn.Embedding):
        others = [ids for ids in (layout.targets, layout.listed) if ids is not None]
        largest, count = max(largest, *(int(ids.max()) for ids in others)), embeddings.num_embeddings
        if largest >= count:
            raise ConfigError(
                f"token id {largest} is beyond the {count:,} embeddings of {type(causal_model(model)).__name__}: use "
                "the model's own tokenizer, or call resize_token_embeddings after adding tokens"
            )


def response_scores(
    model: nn.Module, layout: Layout, reference: ReferenceHead | None = None, *, statistics: bool = False
) -> TokenScores:
    """Scores (M,) of a layout's response tokens, with `reference` the full-vocabulary KL too; inside `in_rows`."""
    scores: TokenScores = model(
        input_ids=layout.input_ids,
        position_ids=layout.position_ids,
        layout=layout,
        reference=reference,
        statistics=statistics,
    )
    return scores


def reference_head(model: nn.Module, layout: Layout) -> ReferenceHead:
    """Hidden states (M, D) that predict a layout's response tokens, and the head; inside `in_rows`, no gradient."""
    with torch.no_grad():
        hidden: Tensor = model(
            input_ids=layout.input_ids, position_ids=layout.position_ids, layout=layout, hidden_only=True
        )
    return ReferenceHead(hidden, head_of(causal_model(model)))
