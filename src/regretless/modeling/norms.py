"""Fused RMS normalization with frozen weights, forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from regretless.modeling.replacing import flat, parts, replaced_forwards, same_code


def fused_norms(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within the block, RMS norms of `model` with the formula of Llama's and frozen weights take fewer passes.

    They are recognized by the code of their forward, which many architectures share. Autograd would keep and read a
    tensor for each of its operations. Other norms, and those with hooks, keep their own forward.
    """
    return replaced_forwards(model, lambda module: same_code(module, LlamaRMSNorm), _forward)


class Normalized(NamedTuple):
    """What the output w x s of a norm is made of: cheap to make again, so that what reads it need not keep it."""

    rows: Tensor
    """x (N, D)."""
    weight: Tensor
    """w (D,)."""
    inverse: Tensor
    """s = 1/√(mean x² + ε) (N, 1), float32."""

    def output(self) -> Tensor:
        """The output (N, D), the same to the last bit each time."""
        result = torch.empty_like(self.rows)
        for part in parts(result):
            # Llama's own operations: a reference with frozen norms equals a policy with trained ones to the last bit.
            scaled = (self.rows[part].float() * self.inverse[part]).to(self.rows.dtype)
            torch.mul(self.weight, scaled, out=result[part])
        return result


def normalized(x: Tensor) -> Normalized | None:
    """What `x` is made of, if it is a norm's whole output inside `fused_norms`."""
    made: tuple[Normalized, int] | None = getattr(x._base, "made_of", None)
    if made is None or not x.is_contiguous() or x.numel() != made[0].rows.numel() or x._version != made[1]:
        return None
    return made[0]


def _forward(module: Any, x: Tensor) -> Tensor:
    weight = module.weight
    if type(weight) is nn.Parameter and not weight.requires_grad and weight.dtype == x.dtype and x.device.type == "cpu":
        rows = flat(x)
        output, inverse = _RmsNorm.apply(rows, weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
        if output.requires_grad:
            output.made_of = Normalized(rows.detach(), weight, inverse), output._version
        view: Tensor = output.view(x.shape)
        return view
    result: Tensor = type(module).forward(module, x)
    return result


class _RmsNorm(torch.autograd.Function):
    """w x / √(mean x² + ε) for rows x (N, D), in float32 as Llama's norm computes it, and the square root; w frozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        for part in parts(rows):
            inverse[part] = torch.rsqrt(rows[part].float().pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(rows, weight, inverse)
        ctx.mark_non_differentiable(inverse)
        return Normalized(rows, weight, inverse).output(), inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor, _: None) -> tuple[Tensor, None, None]:
        rows, weight, inverse = ctx.saved_tensors
        result = torch.empty_like(rows)
        # With g = w ∂loss/∂y and s = 1/√(mean x² + ε): ∂loss/∂x = s g − s³ mean(g x) x.
        for part in parts(rows):
            values, scale = rows[part].float(), inverse[part]
            grad = (grads[part] * weight).float()
            along = (grad * values).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-rows.shape[-1])
            result[part] = grad.mul_(scale).addcmul_(values, along)
        return result, None, None
