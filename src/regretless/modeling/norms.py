"""Fused RMS normalization with frozen weights, forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

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


def _forward(module: Any, x: Tensor) -> Tensor:
    weight = module.weight
    if type(weight) is nn.Parameter and not weight.requires_grad and weight.dtype == x.dtype and x.device.type == "cpu":
        output: Tensor = _RmsNorm.apply(flat(x), weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
        return output.view(x.shape)
    result: Tensor = type(module).forward(module, x)
    return result


class _RmsNorm(torch.autograd.Function):
    """w x / √(mean x² + ε) for rows x (N, D), in float32 as Llama's norm computes it; w frozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        result = torch.empty_like(rows)
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        for part in parts(rows):
            values = rows[part].float()
            # Llama's own operations: a reference with frozen norms equals a policy with trained ones to the last bit.
            inverse[part] = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
            torch.mul(weight, (values * inverse[part]).to(rows.dtype), out=result[part])
        ctx.save_for_backward(rows, weight, inverse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None]:
        rows, weight, inverse = ctx.saved_tensors
        result = torch.empty_like(rows)
        # With g = w ∂loss/∂y and s = 1/√(mean x² + ε): ∂loss/∂x = s g − s³ mean(g x) x.
        for part in parts(rows):
            values, scale = rows[part].float(), inverse[part]
            grad = (grads[part] * weight).float()
            along = (grad * values).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-rows.shape[-1])
            result[part] = grad.mul_(scale).addcmul_(values, along)
        return result, None, None
