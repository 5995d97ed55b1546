"""Gated MLPs that compute again what they do not keep, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from regretless.modeling import forward, replacing
from regretless.modeling.adapters import fused_adapters
from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.gated_mlp import lean_mlps
from regretless.modeling.layout import lay_out
from tiny_kinds import tiny_of_kind

WIDTH, INNER = 12, 20
LAYERS = ("gate_proj", "up_proj", "down_proj")


class Two(nn.Module):
    """Two MLPs, one behind the other."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        config = AutoConfig.for_model("qwen3", hidden_size=WIDTH, intermediate_size=INNER, **settings)
        self.first, self.second = Qwen3MLP(config), Qwen3MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def adapted(dtype: torch.dtype = torch.float64, layers: tuple[str, ...] = LAYERS, **settings: object) -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Two(**settings).to(dtype), LoraConfig(r=4, target_modules=[*layers]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@contextmanager
def lean(model: nn.Module) -> Iterator[None]:
    with fused_adapters(model), lean_mlps(model):
        yield


def results(model: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many numbers were kept for the backward pass."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with keeping() as kept:
        output = model(x)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    found = [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
    return found, sum(kept.values())


@contextmanager
def keeping() -> Iterator[dict[int, int]]:
    """Sizes of the storages that are kept for a backward pass, by their place."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("elements", [replacing.ELEMENTS, 50])
def test_mlp_when_lean_then_values_and_gradients_are_equal_and_two_wide_tensors_fewer_are_kept(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(replacing, "ELEMENTS", elements)
    model, tokens = adapted(), 14
    x = torch.randn(2, tokens // 2, WIDTH, dtype=torch.float64)
    with fused_adapters(model):
        wanted, kept = results(model, x)
    with lean(model):
        found, fewer = results(model, x)
    assert not any("forward" in vars(module) for module in model.modules())
    assert kept - fewer == 2 * 2 * tokens * INNER
    assert len(found) == len(wanted) == 2 + 2 * 2 * len(LAYERS)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_mlp_when_lean_under_autocast_then_the_output_is_that_of_fused_adapters() -> None:
    model, x = adapted(torch.float32), torch.randn(1, 64, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        with fused_adapters(model):
            wanted, _ = results(model, x)
        with lean(model):
            found, _ = results(model, x)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], wanted[0])
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= 0.01 * theirs.norm()


def hooked(model: nn.Module) -> nn.Module:
    model.base_model.model.first.down_proj.register_forward_hook(lambda module, given, output: 2 * output)
    model.base_model.model.second.act_fn.register_forward_hook(lambda module, given, output: 2 * output)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: hooked(adapted()),
        lambda: adapted(hidden_act="gelu"),
        lambda: adapted(layers=("gate_proj", "up_proj")),
    ],
    ids=["hooks", "another activation", "no adapter"],
)
def test_mlp_when_it_is_another_then_it_keeps_its_own_forward(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(3, WIDTH, dtype=torch.float64)
    with fused_adapters(model):
        wanted, kept = results(model, x)
    with lean(model):
        found, as_many = results(model, x)
    assert as_many == kept
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_model_when_it_computes_shared_rows_then_its_mlps_are_lean(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, inner = 3, 48
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_of_kind("qwen3", num_hidden_layers=layers, intermediate_size=inner), config).train()
    layout, _ = lay_out([((5, 6, 7), (8, 9, 2)), ((5, 6, 7), (9, 2))])

    def count() -> int:
        with keeping() as kept, grouped(model):
            response_scores(model, layout).logps.sum().backward()
        return sum(kept.values())

    fewer = count()
    monkeypatch.setattr(forward, "lean_mlps", lambda model: nullcontext())
    assert count() - fewer == layers * 2 * layout.tokens * inner


def test_parts_when_on_another_device_then_there_is_one() -> None:
    rows = torch.empty(3 * replacing.ELEMENTS, 2, device="meta")
    assert list(replacing.parts(rows)) == [slice(None)]
    sizes = [part.stop - part.start for part in replacing.parts(torch.empty(100_000, 2))]
    assert sizes == [replacing.ELEMENTS // 2, replacing.ELEMENTS // 2]
