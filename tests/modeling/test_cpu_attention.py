"""Attention in shared rows, with and without sinks, against the definition and the model's own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from regretless.modeling import cpu_attention
from regretless.modeling.cpu_attention import grouped_attention
from regretless.modeling.forward import attention_by, grouped, response_scores
from regretless.modeling.gpu_attention import BLOCK, RowMask, flex_grouped_attention
from regretless.modeling.layout import Segment, lay_out
from regretless.modeling.row_choice import choose_rows
from tiny_kinds import tiny_of_kind

PROMPT = tuple(range(5, 19))
ITEMS = [(PROMPT, (20, 21, 22, 23, 24, 2)), (PROMPT, (20, 21, 22)), ((11, 12), (*range(25, 39), 2)), (PROMPT, (30, 2))]
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4},
    "granite_swa": {"sliding_window": 6},
}


def with_sinks(kind: str) -> PreTrainedModel:
    """A model of the kind whose sinks matter."""
    model = tiny_of_kind(kind, **KINDS[kind])
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.copy_(torch.linspace(-1, 3, len(parameter)))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_sinks_when_rows_are_shared_then_values_and_gradients_are_those_of_eager_attention(kind: str) -> None:
    model = with_sinks(kind)
    assert choose_rows(model, 40) == "grouped"
    layout, places = lay_out(ITEMS)
    names = [name for name, _ in model.named_parameters() if "embed" in name or "sinks" in name or "q_proj" in name]
    weights = [model.get_parameter(name) for name in names]
    with grouped(model):
        scores = response_scores(model, layout).logps
        found = [scores[place] for place in places]
        got = torch.autograd.grad(sum((values * 1.5).sum() for values in found), weights)
    wanted = []
    for prompt, response in ITEMS:
        ids = torch.tensor([prompt + response])
        with attention_by(model, "eager"):
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted.append(logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0])
    expected = torch.autograd.grad(sum((values * 1.5).sum() for values in wanted), weights)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-5)
    for name, one, other in zip(names, got, expected, strict=True):
        assert float(other.abs().max()) > 0
        assert float((one - other).norm()) <= 1e-5 * float(other.norm()), name


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("kernel", ["flex", "whole", "blocks"])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_attention_when_heads_have_other_sizes_then_output_and_gradients_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kernel: str, with_sinks: bool
) -> None:
    torch.manual_seed(0)
    flex = kernel == "flex"
    # Segments of 9, 7 and 5 queries in blocks of at least 2: of 3, 3 and 3; 3, 3 and 1; and 3 and 2.
    monkeypatch.setattr(cpu_attention, "BLOCK", 2 if kernel == "blocks" else cpu_attention.BLOCK)
    segments = (Segment(7), Segment(5, 0), Segment(1, 0), Segment(2), Segment(9, 3))
    length = BLOCK
    used = 7 + 5 + 1 + 2 + 9
    rows = length if flex else used
    states = [torch.randn(1, heads, rows, 16, requires_grad=not flex) for heads in (4, 2, 2)]
    query, key, value = states
    # Without sinks: a score of minus infinity.
    sinks = torch.tensor([-30.0, 0.0, 1.0, 40.0]) if with_sinks else torch.full((4,), -torch.inf)
    options = {"scaling": 0.3, "sliding_window": window, "s_aux": sinks if with_sinks else None}
    mask = RowMask(segments, length, torch.device("cpu"))
    if flex:
        found = flex_grouped_attention(torch.nn.Module(), query, key, value, None, row_mask=mask, **options)[0]
    else:
        found = grouped_attention(torch.nn.Module(), query, key, value, None, segments=segments, **options)[0]
    grid = torch.arange(rows)
    sees = mask.blocks(window).mask_mod(torch.tensor(0), torch.tensor(0), grid[:, None], grid[None, :])
    sees = sees | torch.eye(rows, dtype=torch.bool)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    scores = torch.cat((scores.masked_fill(~sees, -torch.inf), sinks.view(1, 4, 1, 1).expand(1, 4, rows, 1)), -1)
    wanted = (scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(found[:, :used], wanted[:, :used], rtol=1e-4, atol=1e-5)
    if not flex:  # it has no backward pass on a CPU
        weights = torch.randn_like(wanted)
        got, expected = (torch.autograd.grad((output * weights).sum(), states) for output in (found, wanted))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "keys"), [(None, [6, 9, 12]), (4, [6, 6, 6])])
def test_attention_when_queries_are_in_blocks_then_masked_keys_are_left_out(
    monkeypatch: pytest.MonkeyPatch, window: int | None, keys: list[int]
) -> None:
    monkeypatch.setattr(cpu_attention, "BLOCK", 3)
    seen, attend = [], functional.scaled_dot_product_attention

    def counting(query: Tensor, key: Tensor, *others: object, **options: object) -> Tensor:
        seen.append((query.shape[2], key.shape[2]))
        return attend(query, key, *others, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counting)
    states = torch.randn(1, 2, 12, 8)
    options = {"segments": (Segment(3), Segment(9, 0)), "scaling": 0.3, "sliding_window": window}
    grouped_attention(torch.nn.Module(), states, states, states, None, **options)
    # The response's 9 queries see the prompt's 3 keys and those up to their own, or a window's.
    assert seen[-3:] == [(3, count) for count in keys]


def test_sinks_when_scores_are_also_capped_then_it_is_refused() -> None:
    states = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="sinks together with soft-capping"):
        grouped_attention(
            torch.nn.Module(),
            states,
            states,
            states,
            None,
            segments=(Segment(4),),
            softcap=3.0,
            s_aux=torch.ones(2),
        )
