"""LoRA's linear layers as few matrix products, without the elementwise passes over wide outputs between them."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from regretless.modeling.replacing import flat, has_hooks, is_replaced_by, replaced_forwards


def fused_adapters(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within the block, plain LoRA layers of `model` compute W x + s B (A x) by matrix products alone.

    peft's own forward makes the product with B, scales it, adds it, and casts the input to the adapter's type and back
    under autocast: each of these reads and writes a tensor as wide as the layer, forward and backward. Layers of other
    kinds (DoRA, several adapters, dropout, quantized or sharded weights, hooks) keep peft's forward.
    """
    return replaced_forwards(model, lambda module: type(module) is LoraLinear, _forward)


class Adapter(NamedTuple):
    """Weights of W x + b + s B (A x), all of one type."""

    weight: Tensor
    """W (O, I), frozen."""
    bias: Tensor | None
    """b (O,), frozen."""
    narrow: Tensor
    """A (r, I)."""
    wide: Tensor
    """B (O, r)."""
    scaling: float
    """s."""

    def output(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output (N, O) for rows (N, I), and A x (N, r)."""
        reduced = rows @ self.narrow.t()
        result = functional.linear(rows, self.weight, self.bias)
        return result.addmm_(reduced, self.wide.t(), alpha=self.scaling), reduced

    def input_gradient(self, grad: Tensor, grad_reduced: Tensor) -> Tensor:
        """Gradient of the rows (N, I), given that of the output (N, O) and its product with B (N, r)."""
        return (grad @ self.weight).addmm_(grad_reduced, self.narrow, alpha=self.scaling)

    def weight_gradients(
        self, grad: Tensor, grad_reduced: Tensor, rows: Tensor, reduced: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of A and B, given those of `input_gradient`, the rows and A x."""
        return (grad_reduced.t() @ rows).mul_(self.scaling), (grad.t() @ reduced).mul_(self.scaling)


def adapter_of(layer: Any, x: Tensor) -> Adapter | None:
    """Weights of a layer that is plain LoRA on a plain frozen linear layer, in the type that `x` is computed in.

    None for any other layer, and where types differ without autocast.
    """
    name = _plain_adapter(layer)
    if name is None:
        return None
    base, narrow, wide = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    kind = x.device.type
    automatic = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if automatic else x.dtype
    if not automatic and {base.weight.dtype, narrow.dtype, wide.dtype} != {dtype}:
        return None
    bias = None if base.bias is None else base.bias.to(dtype)
    return Adapter(base.weight.to(dtype), bias, narrow.to(dtype), wide.to(dtype), layer.scaling[name])


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    adapter = None if args or kwargs else adapter_of(layer, x)
    if adapter is None:
        result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return result
    rows = flat(x).to(adapter.weight.dtype)
    output: Tensor = _Adapted.apply(rows, *adapter)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], -1)


def _plain_adapter(layer: Any) -> str | None:
    """Name of the layer's one active adapter, if there is nothing but plain LoRA on a plain frozen linear layer."""
    if type(layer) is not LoraLinear or not is_replaced_by(layer, _forward):
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] in layer.lora_variant:
        return None
    dropout = layer.lora_dropout[names[0]]
    if layer.training and not (isinstance(dropout, nn.Identity) or getattr(dropout, "p", 1) == 0):
        return None
    base, narrow, wide = parts = layer.base_layer, layer.lora_A[names[0]], layer.lora_B[names[0]]
    frozen = not any(parameter.requires_grad for parameter in base.parameters())
    biased = narrow.bias is not None or wide.bias is not None
    return names[0] if frozen and not biased and all(map(_is_plain, parts)) else None


def _is_plain(part: nn.Module) -> bool:
    """Whether a call of this module is a product with its weight and nothing else."""
    # Sharded and quantized layers are of other classes; weights divided among devices are no plain parameters.
    plain = type(part) is nn.Linear and type(part.weight) is nn.Parameter
    return plain and not has_hooks(part) and "forward" not in vars(part)


class _Adapted(torch.autograd.Function):
    """The output of an `Adapter`, given as its weights, for rows (N, I)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, narrow: Tensor, wide: Tensor, scaling: float
    ) -> Tensor:
        result, reduced = Adapter(weight, bias, narrow, wide, scaling).output(rows)
        ctx.save_for_backward(rows, weight, narrow, wide, reduced)
        ctx.scaling = scaling
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, narrow, wide, reduced = ctx.saved_tensors
        adapter = Adapter(weight, None, narrow, wide, ctx.scaling)
        grad_reduced = grad @ wide
        grad_rows = adapter.input_gradient(grad, grad_reduced) if ctx.needs_input_grad[0] else None
        return grad_rows, None, None, *adapter.weight_gradients(grad, grad_reduced, rows, reduced), None
