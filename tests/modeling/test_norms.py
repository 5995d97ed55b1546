"""RMS norms in few passes against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from regretless.modeling import replacing
from regretless.modeling.norms import fused_norms

SHAPE = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def output_and_gradient(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = norm(x)
    output.backward(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x).sin())
    assert x.grad is not None
    return output.detach(), x.grad


def frozen(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    nn.init.normal_(norm.weight)
    return norm.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("elements", [1 << 17, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_norm_when_in_few_passes_then_it_is_that_of_transformers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float, elements: int
) -> None:
    monkeypatch.setattr(replacing, "ELEMENTS", elements)
    torch.manual_seed(0)
    norm = frozen(Qwen3RMSNorm(16, eps=0.1), dtype)
    x = (3 * torch.randn(2, 9, 3, 16)).to(dtype)
    wanted = output_and_gradient(norm, x)
    with fused_norms(norm):
        assert "forward" in vars(norm)
        found = output_and_gradient(norm, x)
    assert "forward" not in vars(norm)
    assert torch.equal(found[0], wanted[0])
    assert found[1].dtype == dtype
    assert (found[1] - wanted[1]).norm() <= tolerance * wanted[1].norm()


def test_norm_when_trained_then_its_weight_has_a_gradient() -> None:
    norm = Qwen3RMSNorm(16)
    with fused_norms(norm):
        norm(torch.randn(3, 16)).sum().backward()
    assert norm.weight.grad is not None


@pytest.mark.parametrize(("kind", "count"), [("qwen3", 5), ("llama", 3), ("mistral", 3), ("gemma2", 0)])
def test_norms_when_their_formula_is_llamas_then_they_are_recognized_and_others_are_not(kind: str, count: int) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, pad_token_id=0, **SHAPE))
    with fused_norms(model):
        assert sum("forward" in vars(module) for module in model.modules()) == count


def test_norm_when_it_adds_one_to_its_weight_then_it_keeps_its_own_forward() -> None:
    norm = frozen(Gemma2RMSNorm(16), torch.float32)
    x = torch.randn(3, 16)
    wanted = norm(x)
    with fused_norms(norm):
        torch.testing.assert_close(norm(x), wanted, rtol=0, atol=0)
