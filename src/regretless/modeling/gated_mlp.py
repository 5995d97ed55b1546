"""Gated MLPs with SiLU that keep few or none of their activations and compute the others again in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP

from regretless.modeling.adapters import Adapter, adapter_of
from regretless.modeling.norms import Normalized, normalized
from regretless.modeling.replacing import flat, has_hooks, parts, replaced_forwards, same_code

MOST_KEPT = 2048
"""Tokens of a row on a CPU up to which an MLP keeps two wide tensors; they would be most of a larger row's memory."""


def lean_mlps(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within the block, MLPs of `model` with the formula of Llama's, and plain LoRA on `down_proj`, keep two tensors.

    Autograd would keep four tensors as wide as the MLP: the gate, what SiLU makes of it, the other factor, and their
    product. The second and the fourth are computed again from the others: a cheap pass over memory, no matrix product.
    With plain LoRA on all layers, rows of more than `MOST_KEPT` tokens keep none: two products are computed again, a
    tenth of a step's. Call it inside `fused_adapters`.
    """
    return replaced_forwards(model, _is_gated, _forward)


def _is_gated(module: Any) -> bool:
    return same_code(module, LlamaMLP) and type(module.act_fn) in (nn.SiLU, SiLUActivation)


def _forward(module: Any, x: Tensor) -> Tensor:
    layers = module.gate_proj, module.up_proj, module.down_proj
    # The last layer and the activation are not called, so hooks on them would not run.
    whole = not torch.is_grad_enabled() or has_hooks(module.down_proj) or has_hooks(module.act_fn)
    adapter = None if whole else adapter_of(module.down_proj, x)
    if adapter is None:
        result: Tensor = type(module).forward(module, x)
        return result
    output: Tensor
    rows = flat(x)
    adapters = [each for layer in layers if not has_hooks(layer) and (each := adapter_of(layer, x))]
    if x.device.type == "cpu" and len(rows) > MOST_KEPT and len(adapters) == len(layers):
        trained = [weight for each in adapters for weight in (each.narrow, each.wide)]
        output = _GatedMlp.apply(rows.to(adapter.weight.dtype), normalized(x), adapters, *trained)  # type: ignore[no-untyped-call]
    else:
        gates, ups = (flat(layer(x)).to(adapter.weight.dtype) for layer in layers[:2])
        output = _GatedProduct.apply(gates, ups, *adapter)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], -1)


class _GatedMlp(torch.autograd.Function):
    """The output of three `Adapter`s for rows (N, D): keeps the rows, or what made them, and nothing wide.

    `trained`: A and B of each adapter, which have a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, made_of: Normalized | None, adapters: Sequence[Adapter], *trained: Tensor
    ) -> Tensor:
        gate, up, down = ctx.adapters = adapters
        product = gate.output(rows)[0]
        _gated(product, up.output(rows)[0], product)
        result, reduced = down.output(product)
        ctx.save_for_backward(reduced, *(made_of or (rows,)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reduced, *kept = ctx.saved_tensors
        gate, up, down = ctx.adapters
        rows = kept[0] if len(kept) == 1 else Normalized(*kept).output().to(grad.dtype)
        (gates, of_gate), (ups, of_up) = gate.output(rows), up.output(rows)
        *grads, of_down = _of_product(gates, ups, down, grad, reduced)
        total, of_weights = torch.zeros_like(rows), []
        for each, given, narrowed in zip((gate, up), grads, (of_gate, of_up), strict=True):
            grad_reduced = given @ each.wide
            total += each.input_gradient(given, grad_reduced)
            of_weights += each.weight_gradients(given, grad_reduced, rows, narrowed)
        return total, None, None, *of_weights, *of_down


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
        _gated(gates, ups, rows)
        result, reduced = Adapter(weight, bias, narrow, wide, scaling).output(rows)
        ctx.save_for_backward(gates, ups, weight, narrow, wide, reduced)
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, ups, weight, narrow, wide, reduced = ctx.saved_tensors
        adapter = Adapter(weight, None, narrow, wide, ctx.scaling)
        grad_gates, grad_ups, of_weights = _of_product(gates, ups, adapter, grad, reduced)
        return grad_gates, grad_ups, None, None, *of_weights, None


def _gated(gates: Tensor, ups: Tensor, into: Tensor) -> None:
    """Write SiLU(gate) · up."""
    for part in parts(gates):
        torch.mul(silu(gates[part]), ups[part], out=into[part])


def _of_product(
    gates: Tensor, ups: Tensor, down: Adapter, grad: Tensor, reduced: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Gradients of gate, up, and A and B of `down`, given that of its output for SiLU(gate) · up."""
    grad_reduced = grad @ down.wide
    grad_rows = down.input_gradient(grad, grad_reduced)
    rows, grad_gates = torch.empty_like(gates), torch.empty_like(gates)
    for part in parts(rows):
        activated = silu(gates[part])
        torch.mul(activated, ups[part], out=rows[part])
        torch.ops.aten.silu_backward.grad_input(grad_rows[part] * ups[part], gates[part], grad_input=grad_gates[part])
        grad_rows[part].mul_(activated)  # now the gradient of `ups`
    of_weights = down.weight_gradients(grad, grad_reduced, rows, reduced)
    return grad_gates, grad_rows, of_weights
