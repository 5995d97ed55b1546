"""The load-balancing loss of shared and plain rows against transformers', of the same tokens a sequence at a time."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from regretless.modeling.forward import grouped, in_rows, response_scores
from regretless.modeling.layout import Item, Layout, lay_out
from regretless.modeling.router_loss import DistinctTokens, has_router_loss, router_loss, with_routers
from regretless.modeling.rows import RowKind, lay_out_rows
from regretless.modeling.token_logps import TokenScores
from tiny_kinds import DELTA

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CASES: list[tuple[str, RowKind]] = [
    *((family, "grouped") for family in ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")),
    ("qwen3_moe", "plain"),
    ("qwen3_next", "plain"),
]
ITEMS: list[Item] = [
    ((5, 6, 7, 8, 9, 10), (20, 21, 22, 23, 24, 2)),
    ((5, 6, 7, 8, 9, 10), (20, 21, 22)),  # a prefix of the first: a masked response
    ((5, 6, 7, 8, 9, 10), (20, 30, 31, 2)),  # begins as the first does
    ((11, 12), (40, 41, 2)),
    ((11, 12), (42, 41, 2)),
]


def tiny(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type)
    sizes = SIZES | (DELTA if model_type == "qwen3_next" else {})
    config = AutoConfig.for_model(model_type, **{name: value for name, value in sizes.items() if hasattr(config, name)})
    return AutoModelForCausalLM.from_config(config)


def plain_loss(model: PreTrainedModel, items: list[Item]) -> torch.Tensor:
    """transformers' function on the router's logits of every distinct text's last token, each sequence by itself."""
    texts: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for prompt, response in items:
        row = (*prompt, *response[:-1])
        layers = model.model(input_ids=torch.tensor([row]), output_router_logits=True).router_logits
        for end in range(1, len(row) + 1):
            texts.setdefault(row[:end], [layer[end - 1] for layer in layers])
    layers = tuple(torch.stack(layer) for layer in zip(*texts.values(), strict=True))
    loss = sys.modules[type(model).__module__].load_balancing_loss_func
    return loss(layers, model.num_experts, model.num_experts_per_tok)


def loss_of(model: PreTrainedModel, layout: Layout) -> torch.Tensor:
    """The load-balancing loss of a layout's distinct tokens; inside `in_rows`."""
    counted = DistinctTokens().new(layout)
    routers = response_scores(model, replace(layout, counted=counted)).routers
    assert routers is not None
    return router_loss(routers, int(counted.sum()))


@pytest.mark.parametrize(("model_type", "rows"), CASES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_router_loss_when_rows_are_shared_or_padded_then_it_and_its_gradients_are_those_of_the_distinct_tokens(
    model_type: str, rows: RowKind, checkpointing: bool
) -> None:
    model = tiny(model_type)
    expected = plain_loss(model, ITEMS)
    weights = [weight for name, weight in model.named_parameters() if not name.startswith(("lm_head", "model.norm"))]
    wanted = torch.autograd.grad(expected, weights, allow_unused=True)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with in_rows(model.train(), rows):
        loss = loss_of(model, lay_out_rows(ITEMS, rows)[0])
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert float(expected.detach()) > model.num_experts_per_tok * 1.01  # not balanced, where all tokens would agree
    assert max(float(grad.abs().max()) for grad in wanted if grad is not None) > 1e-2
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_router_loss_when_the_row_is_padded_then_padding_does_not_count() -> None:
    model, (layout, _) = tiny("qwen3_moe").requires_grad_(False), lay_out(ITEMS)
    with grouped(model, one_row=True):
        found = loss_of(model, layout)
    assert float(found) == pytest.approx(float(plain_loss(model, ITEMS)), rel=1e-5)


def test_router_loss_when_computed_under_autocast_then_its_sums_are_in_float32() -> None:
    model, (layout, _) = tiny("qwen3_moe"), lay_out(ITEMS)
    layout = replace(layout, counted=DistinctTokens().new(layout))
    output = SimpleNamespace(router_logits=[torch.randn(layout.tokens, model.num_experts) for _ in range(2)])
    expected = with_routers(TokenScores(torch.empty(0), None), model, output, layout).routers
    with torch.autocast("cpu", torch.bfloat16):
        found = with_routers(TokenScores(torch.empty(0), None), model, output, layout).routers
    assert found is not None and expected is not None and torch.equal(found, expected)


def test_distinct_tokens_when_a_query_is_cut_into_rows_then_each_text_counts_once() -> None:
    whole, parts = DistinctTokens(), DistinctTokens()
    texts = {(*prompt, *response[:-1])[:end] for prompt, response in ITEMS for end in range(1, len(prompt + response))}
    assert int(whole.new(lay_out(ITEMS)[0]).sum()) == len(texts) == 6 + 5 + 2 + 2 + 4
    rows = [lay_out([item])[0] for item in ITEMS]
    assert [int(parts.new(row).sum()) for row in rows] == [6 + 5, 0, 2, 2 + 2, 2]
    plain, _ = lay_out_rows(ITEMS, "plain")
    assert plain.tokens == 4 * 11 and int(DistinctTokens().new(plain).sum()) == len(texts)  # one row is half padding
    # The same ids at the same places of another text are other tokens.
    assert parts.new(lay_out([((9, 6, 7), (8, 2))])[0]).all()


def test_router_loss_when_transformers_computes_none_for_the_model_then_there_is_none() -> None:
    for model_type in ("deepseek_v3", "llama", "doge"):
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type)
            config.num_hidden_layers = 1
            assert not has_router_loss(AutoModelForCausalLM.from_config(config)), model_type
