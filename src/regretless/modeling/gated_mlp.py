"""Gated MLPs with SiLU that save half the activations and recompute the others in the backward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from regretless.modeling.adapters import Adapter, adapter_of
from regretless.modeling.replacing import flat, has_hooks, parts, replaced_forwards, same_code


def lean_mlps(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within the block, MLPs of `model` with the formula of Llama's, and plain LoRA on `down_proj`, keep two tensors.

    Autograd would keep four tensors as wide as the MLP: the gate, what SiLU makes of it, the other factor, and their
    product. The second and the fourth are computed again from the others: a cheap pass over memory, no matrix product.
    Call it inside `fused_adapters`.
    """
    return replaced_forwards(model, _is_gated, _forward)


def _is_gated(module: Any) -> bool:
    return same_code(module, LlamaMLP) and type(module.act_fn) in (nn.SiLU, SiLUActivation)


def _forward(module: Any, x: Tensor) -> Tensor:
    # The last layer and the activation are not called, so hooks on them would not run.
    whole = not torch.is_grad_enabled() or has_hooks(module.down_proj) or has_hooks(module.act_fn)
    adapter = None if whole else adapter_of(module.down_proj, x)
    if adapter is None:
        result: Tensor = type(module).forward(module, x)
        return result
    gates, ups = (flat(layer(x)).to(adapter.weight.dtype) for layer in (module.gate_proj, module.up_proj))
    output: Tensor = _GatedProduct.apply(gates, ups, *adapter)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], -1)


class _GatedProduct(torch.autograd.Function):
    """The output of an `Adapter`, given as its weights, for SiLU(gate) · up; both (N, I)."""

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        ups: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor,
        wide: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = torch.empty_like(gates)
        for part in parts(rows):
            torch.mul(silu(gates[part]), ups[part], out=rows[part])
        result, reduced = Adapter(weight, bias, narrow, wide, scaling).output(rows)
        ctx.save_for_backward(gates, ups, weight, narrow, wide, reduced)
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups, weight, narrow, wide, reduced = ctx.saved_tensors
        adapter = Adapter(weight, None, narrow, wide, ctx.scaling)
        grad_reduced = grad @ wide
        grad_rows = adapter.input_gradient(grad, grad_reduced)
        rows, grad_gates, grad_ups = (torch.empty_like(gates) for _ in range(3))
        for part in parts(rows):
            activated = silu(gates[part])
            torch.mul(activated, ups[part], out=rows[part])
            torch.mul(grad_rows[part], activated, out=grad_ups[part])
            torch.ops.aten.silu_backward.grad_input(
                grad_rows[part] * ups[part], gates[part], grad_input=grad_gates[part]
            )
        of_weights = adapter.weight_gradients(grad, grad_reduced, rows, reduced)
        return grad_gates, grad_ups, None, None, *of_weights, None
