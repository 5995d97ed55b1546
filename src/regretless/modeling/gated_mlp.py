"""Gated MLPs with SiLU that keep half as much for the backward pass, and compute the rest again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from regretless.modeling.adapters import Adapter, adapter_of
from regretless.modeling.norms import parts, same_code


@contextlib.contextmanager
def lean_mlps(model: nn.Module) -> Iterator[None]:
    """Within the block, MLPs of `model` with the formula of Llama's, and plain LoRA on `down_proj`, keep two tensors.

    Autograd would keep four tensors as wide as the MLP: the gate, what SiLU makes of it, the other factor, and their
    product. The second and the fourth are computed again from the others: a cheap pass over memory, no matrix product.
    Call it inside `fused_adapters`.
    """
    mlps = [module for module in model.modules() if _is_gated(module)]
    for module in mlps:
        vars(module)["forward"] = partial(_forward, module)
    try:
        yield
    finally:
        for module in mlps:
            del vars(module)["forward"]


def _is_gated(module: Any) -> bool:
    return (
        same_code(module, LlamaMLP)
        and type(module.act_fn) in (nn.SiLU, SiLUActivation)
        and "forward" not in vars(module)
    )


def _forward(module: Any, x: Tensor) -> Tensor:
    adapter = adapter_of(module.down_proj, x) if torch.is_grad_enabled() and not _is_hooked(module) else None
    if adapter is None:
        result: Tensor = type(module).forward(module, x)
        return result
    dtype = adapter.weight.dtype
    found: Tensor = _GatedProduct.apply(module.gate_proj(x).to(dtype), module.up_proj(x).to(dtype), *adapter)  # type: ignore[no-untyped-call]
    return found


def _is_hooked(module: Any) -> bool:
    """Whether the two layers that are not called have hooks, which would not run."""
    return any(
        hooks
        for part in (module.down_proj, module.act_fn)
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    )


class _GatedProduct(torch.autograd.Function):
    """The output of an `Adapter`, given as its weights, for SiLU(gate) · up; both (..., I)."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        narrow: Tensor,
        wide: Tensor,
        scaling: float,
    ) -> Tensor:
        gates, ups = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (gate, up))
        rows = torch.empty_like(gates)
        for part in parts(rows):
            torch.mul(silu(gates[part]), ups[part], out=rows[part])
        result, reduced = Adapter(weight, bias, narrow, wide, scaling).output(rows)
        ctx.save_for_backward(gates, ups, weight, narrow, wide, reduced)
        ctx.scaling, ctx.shape = scaling, gate.shape
        return result.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups, weight, narrow, wide, reduced = ctx.saved_tensors
        adapter = Adapter(weight, None, narrow, wide, ctx.scaling)
        grad = upstream.reshape(-1, upstream.shape[-1])
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
        return grad_gates.view(ctx.shape), grad_ups.view(ctx.shape), None, None, *of_weights, None
