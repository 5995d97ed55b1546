"""The load-balancing loss of mixtures of experts in training: added over a step's distinct tokens, or refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair
from regretless.training.batch import PairBatch
from regretless.training.trainer import PreferenceTrainer

MIXTURE = {"model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
PLAIN = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1}


def router_loss(model: PreTrainedModel, pairs: list[TokenizedPair]) -> tuple[torch.Tensor, int]:
    """transformers' function on the last token of each distinct text of the pairs, and the number of these."""
    texts: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for pair in pairs:
        for side in (pair.chosen, pair.rejected):
            row = (*pair.prompt_ids, *side.ids[:-1])
            layers = model.model(input_ids=torch.tensor([row]), output_router_logits=True).router_logits
            for end in range(1, len(row) + 1):
                texts.setdefault(row[:end], [layer[end - 1] for layer in layers])
    layers = tuple(torch.stack(layer) for layer in zip(*texts.values(), strict=True))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(layers, model.num_experts, model.num_experts_per_tok), len(texts)


def step(make_trainer: Callable[..., PreferenceTrainer], model: PreTrainedModel, **more: Any) -> tuple[Any, Any]:
    trainer = make_trainer(lora=False, model=model, objective="dpo", **(PLAIN | more))
    trainer.train()
    return trainer.state.log_history[0], {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("split", [False, True])
def test_router_loss_when_a_step_has_it_then_weights_move_by_its_gradient_over_the_distinct_tokens(
    split: bool,
    make_trainer: Callable[..., PreferenceTrainer],
    make_model: Callable[..., PreTrainedModel],
    pairs: list[TokenizedPair],
) -> None:
    # With a micro-batch for each pair, in two rows, pairs of other prompts: then each has all its tokens to itself.
    data = [next(pair for pair in pairs if pair.prompt_ids == prompt) for prompt in {p.prompt_ids: 0 for p in pairs}]
    data = data[:4] if split else [pair for pair in pairs if pair.kind == "original"][:7]
    size = {"per_device_train_batch_size": len(data), "max_tokens_per_microbatch": 1 if split else 4096, "data": data}
    model = make_model(**MIXTURE)
    parts = [router_loss(model, [pair]) for pair in data] if split else [router_loss(model, data)]
    total = sum(tokens for _, tokens in parts)
    expected = sum((loss * (tokens / total) for loss, tokens in parts), torch.zeros(()))
    value = float(expected.detach())
    gradients = dict(zip(
        (name for name, _ in model.named_parameters()),
        torch.autograd.grad(expected, list(model.parameters()), allow_unused=True),
        strict=True,
    ))  # fmt: skip
    log, weights = step(make_trainer, model, router_aux_loss_coef=0.5, **size)
    without, others = step(make_trainer, make_model(**MIXTURE), **size)
    assert "aux_loss" not in without
    assert log["aux_loss"] == pytest.approx(value, rel=1e-4)
    assert log["loss"] == pytest.approx(without["loss"] + 0.5 * value, rel=1e-4)
    moved = {name: (weight - others[name]) / -0.25 for name, weight in weights.items()}  # learning rate × coefficient
    assert max(float(grad.abs().max()) for grad in gradients.values() if grad is not None) > 1e-2
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            moved[name], torch.zeros(()).expand_as(moved[name]) if gradient is None else gradient, rtol=1e-2, atol=2e-5
        )


@pytest.mark.parametrize(("rows", "budget"), [("grouped", 18), ("plain", 1000)])
def test_router_loss_when_a_query_is_cut_into_rows_then_it_and_the_gradients_stay(
    rows: str,
    budget: int,
    make_trainer: Callable[..., PreferenceTrainer],
    make_model: Callable[..., PreTrainedModel],
    pairs: list[TokenizedPair],
) -> None:
    query = [pair for pair in pairs if pair.prompt_ids == pairs[3].prompt_ids]
    assert len(query) == 4

    def step_of(rows: str, budget: int) -> tuple[list[PairBatch], dict[str, float], torch.Tensor]:
        model = make_model(**MIXTURE)
        options = {"lora": False, "data": query, "objective": "repo", "router_aux_loss_coef": 0.5}
        trainer = make_trainer(model=model, rows=rows, max_tokens_per_microbatch=budget, **options)
        trainer.prepare_reference()
        data = list(trainer.train_dataset)
        loss = trainer.training_step(trainer.model, data)
        gradient = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        metrics = {**trainer._means["train"].take(trainer.accelerator), "loss": float(loss)}
        return [batch for batch, _ in trainer._weighted_microbatches(data)[0]], metrics, gradient

    ((whole,), expected, wanted) = step_of("grouped", 1000)
    ((cut,), found, gradient) = step_of(rows, budget)
    assert (len(whole.layouts), len(cut.layouts)) == (1, 2 if rows == "grouped" else 1)
    assert cut.tokens > whole.tokens == whole.counted_tokens == cut.counted_tokens
    for name in ("loss", "aux_loss", "rewards/margins"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


def test_router_loss_when_the_models_configuration_asks_for_it_then_it_is_added_in_evaluation_too(
    make_trainer: Callable[..., PreferenceTrainer], make_model: Callable[..., PreTrainedModel]
) -> None:
    asking = {**MIXTURE, "output_router_logits": True, "router_aux_loss_coef": 0.25}
    found = {}
    for coefficient in (None, 0.0):
        trainer = make_trainer(
            model=make_model(**asking), objective="sft", router_aux_loss_coef=coefficient, max_steps=1
        )
        found[coefficient] = trainer.evaluate(trainer.train_dataset)
    assert "eval_aux_loss" not in found[0.0]
    added = found[None]["eval_loss"] - found[0.0]["eval_loss"]
    assert added == pytest.approx(0.25 * found[None]["eval_aux_loss"], rel=1e-5) and added > 0.4


def test_router_loss_when_it_cannot_be_computed_then_it_is_refused_by_name(
    make_trainer: Callable[..., PreferenceTrainer], make_model: Callable[..., PreTrainedModel]
) -> None:
    with pytest.raises(ConfigError, match="computes no load-balancing loss for Qwen3ForCausalLM; set it to 0"):
        make_trainer(router_aux_loss_coef=0.01)
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=1, output_router_logits=True)
    with torch.device("meta"):
        deepseek = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"says output_router_logits: true, but .* for DeepseekV3ForCausalLM"):
        make_trainer(model=deepseek, lora=False)
    with pytest.raises(ConfigError, match="use_reentrant, the load-balancing loss of the routers has no gradient"):
        make_trainer(
            model=make_model(**MIXTURE),
            router_aux_loss_coef=0.01,
            gradient_checkpointing_kwargs={"use_reentrant": True},
        )
