"""Compiled layers in shared rows against layers that are not compiled."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import compiled_layers, cpu_attention, gpu_attention
from regretless.modeling.compiled_layers import compile_layers, is_compiled, leave_uncompiled
from regretless.modeling.forward import causal_model, grouped, response_scores
from regretless.modeling.layout import Layout, lay_out
from regretless.modeling.row_choice import choose_rows
from tiny_kinds import needs_states, tiny_of_kind

VOCABULARY = 40


def rows(count: int) -> list[Layout]:
    """Rows with ever other numbers of prompts, responses and tokens."""
    numbers = random.Random(0)

    def words(most: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(5, VOCABULARY) for _ in range(numbers.randint(2, most)))

    prompts = [[(words(9), words(12)) for _ in range(numbers.randint(1, 3))] for _ in range(count)]
    return [
        lay_out([(prompt, words(12)) for prompt, _ in some for _ in range(numbers.randint(1, 4))])[0]
        for some in prompts
    ]


def adapted(kind: str, **settings: object) -> PreTrainedModel:
    model = tiny_of_kind(kind, **settings)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = get_peft_model(model, config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def results(model: PreTrainedModel, layout: Layout) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their weighted sum."""
    model.zero_grad()
    with grouped(model):
        logps = response_scores(model, layout).logps
        (logps * torch.linspace(0.5, 1.5, len(logps))).sum().backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What compiling changes, in torch, in transformers and in the environment, is as before afterwards."""
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    AttentionInterface.register(cpu_attention.NAME, cpu_attention.grouped_attention)
    AttentionInterface.register(gpu_attention.NAME, gpu_attention.flex_grouped_attention)
    compiled_layers._register_attention.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma2", marks=pytest.mark.extended)])
def test_layers_when_compiled_then_results_are_equal_and_new_rows_compile_nothing(kind: str) -> None:
    model, layouts = adapted(kind), rows(8)
    wanted = [results(model, layout) for layout in layouts]
    counter = CompileCounterWithBackend("aot_eager")
    compile_layers(causal_model(model), counter)
    assert is_compiled(causal_model(model))
    counts = []
    for layout, (logps, gradient) in zip(layouts, wanted, strict=True):
        found = results(model, layout)
        torch.testing.assert_close(found[0], logps, rtol=0, atol=2e-6)
        assert float((found[1] - gradient).norm()) <= 2e-6 * float(gradient.norm())
        counts.append(counter.frame_count)
    assert (len({layout.tokens for layout in layouts}), len({len(layout.segments) for layout in layouts})) == (7, 6)
    assert counts[0] > 0
    assert set(counts) == {counts[0]}
    assert all(module._compiled_call_impl is None for module in model.modules())
    leave_uncompiled(causal_model(model))
    assert torch.equal(results(model, layouts[0])[0], wanted[0][0])
    assert counter.frame_count == counts[0]


@pytest.mark.slow
def test_layers_when_there_are_more_then_they_share_what_is_compiled() -> None:
    counts = []
    for layers in (2, 3):  # the first of a model gets an input without gradient, for which it is compiled once more
        torch._dynamo.reset()
        model, counter = adapted("qwen3", num_hidden_layers=layers), CompileCounterWithBackend("eager")
        compile_layers(causal_model(model), counter)
        results(model, rows(1)[0])
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_layers_when_compiled_by_inductor_then_the_model_passes_the_check_that_it_is_trained_after() -> None:
    model, (layout,) = adapted("qwen3", num_hidden_layers=1), rows(1)
    logps, gradient = results(model, layout)
    compile_layers(causal_model(model))
    assert choose_rows(model, 40, "grouped") == "grouped"
    found = results(model, layout)
    assert not torch.equal(found[1], gradient)  # other kernels
    torch.testing.assert_close(found[0], logps, rtol=0, atol=2e-6)
    assert float((found[1] - gradient).norm()) <= 2e-6 * float(gradient.norm())


@needs_states
def test_layers_when_their_code_depends_on_the_row_then_compiling_them_is_refused() -> None:
    for kind, why in (("qwen3_next", "recurrent layers"), ("qwen3_moe", "experts"), ("llama4_text", "experts")):
        with pytest.raises(ConfigError, match=f"compile_layers: .* has {why}"):
            compile_layers(tiny_of_kind(kind))
    model = tiny_of_kind("qwen3")
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="has checkpointing on"):
        compile_layers(model)
    model = tiny_of_kind("qwen3")
    model._no_split_modules = ["AnotherLayer"]
    with pytest.raises(ConfigError, match="has no layers of the kinds that its _no_split_modules names"):
        compile_layers(model)
    assert not is_compiled(model)
