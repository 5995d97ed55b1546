"""LoRA layers computed by products alone against peft's own forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from regretless.modeling import adapters
from regretless.modeling.adapters import fused_adapters


class Two(nn.Module):
    """Two linear layers, the first with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def adapted(dtype: torch.dtype = torch.float64, **settings: object) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["up", "down"], **settings)
    model = get_peft_model(Two().to(dtype), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    return model


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients with respect to the input and the adapters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    return [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.requires_grad)]


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    apply = adapters._Adapted.apply
    monkeypatch.setattr(adapters._Adapted, "apply", lambda *given: (calls.append(1), apply(*given))[1])
    return calls


def test_adapters_when_fused_then_values_and_gradients_are_those_of_peft(fused_calls: list[int]) -> None:
    model, x = adapted(), torch.randn(2, 7, 12, dtype=torch.float64)
    wanted = results(model, x)
    with fused_adapters(model):
        found = results(model, x)
    assert len(fused_calls) == 2
    assert len(found) == len(wanted) == 6
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_adapters_when_the_model_changes_their_output_in_place_then_gradients_are_those_of_peft() -> None:
    model, x = adapted(), torch.randn(2, 7, 12, dtype=torch.float64)
    for layer in ("up", "down"):
        getattr(model.base_model.model, layer).register_forward_hook(lambda module, given, output: output.mul_(3.0))
    wanted = results(model, x)
    with fused_adapters(model):
        found = results(model, x)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_adapters_when_fused_under_autocast_then_they_are_as_close_to_exact_ones_as_pefts(
    fused_calls: list[int],
) -> None:
    model, x = adapted(torch.bfloat16), torch.randn(1, 64, 12).bfloat16()
    exact = adapted()
    exact.load_state_dict(model.state_dict())
    wanted = results(exact, x.double())
    with torch.autocast("cpu", torch.bfloat16):
        theirs = results(model, x)
        with fused_adapters(model):
            mine = results(model, x)
    assert len(fused_calls) == 2
    for got, peft, true in zip(mine, theirs, wanted, strict=True):
        assert got.dtype == peft.dtype
        assert (got - true).norm() <= 1.2 * (peft - true).norm()


def dropout(model: PeftModel) -> PeftModel:
    return adapted(lora_dropout=0.5)


def hooked(model: PeftModel) -> PeftModel:
    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(lambda module, given, output: 2 * output)
    return model


def second(model: PeftModel) -> PeftModel:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up", "down"]))
    model.base_model.set_adapter(["default", "second"])
    return model.double()


@pytest.mark.parametrize(
    "change",
    [
        dropout,
        hooked,
        second,
        lambda model: adapted(use_dora=True),
        lambda model: adapted(lora_bias=True),
        lambda model: model.requires_grad_(True),
    ],
    ids=["dropout", "hooks", "two adapters", "DoRA", "bias of B", "trained base"],
)
def test_adapters_when_there_is_more_than_plain_lora_then_peft_computes_them(
    change: Callable[[PeftModel], PeftModel], fused_calls: list[int]
) -> None:
    model, x = change(adapted()), torch.randn(3, 12, dtype=torch.float64)
    torch.manual_seed(1)
    wanted = results(model, x)
    with fused_adapters(model):
        torch.manual_seed(1)
        found = results(model, x)
    assert not fused_calls
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_adapters_when_off_within_the_block_then_the_base_answers_and_afterwards_nothing_is_left() -> None:
    model, x = adapted(), torch.randn(3, 12, dtype=torch.float64)
    base = adapted().unload()
    with fused_adapters(model), model.disable_adapter():
        torch.testing.assert_close(model(x), base(x), rtol=0, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())
