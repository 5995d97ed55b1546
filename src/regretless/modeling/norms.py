"""RMS normalization with frozen weights in few passes over its input, forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from regretless.modeling.replacing import parts, replaced_forwards, same_code


def fused_norms(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within the block, RMS norms of `model` with the formula of Llama's and frozen weights take fewer passes.

    They are recognized by the code of their forward, which many architectures share. Autograd would keep and read a
    tensor for each of its operations. Other norms, and those with hooks, keep their own forward.
    """
    return replaced_forwards(model, lambda module: same_code(module, LlamaRMSNorm), _forward)


def _forward(module: Any, x: Tensor) -> Tensor:
    weight = module.weight
    if type(weight) is nn.Parameter and not weight.requires_grad and weight.dtype == x.dtype and x.device.type == "cpu":
        found: Tensor = _RmsNorm.apply(x, weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
        return found
    result: Tensor = type(module).forward(module, x)
    return result


class _RmsNorm(torch.autograd.Function):
    """w x / √(mean x² + ε) over the last dimension, in float32 as Llama's norm computes it; w frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = torch.empty_like(rows)
        inverse = torch.empty(len(rows), 1, dtype=torch.float32, device=x.device)
        for part in parts(rows):
            values = rows[part].float()
            # Llama's own operations: a reference with frozen norms equals a policy with trained ones to the last bit.
            inverse[part] = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
            torch.mul(weight, (values * inverse[part]).to(x.dtype), out=result[part])
        ctx.save_for_backward(rows, weight, inverse)
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        rows, weight, inverse = ctx.saved_tensors
        grads = upstream.reshape(rows.shape)
        result = torch.empty_like(rows)
        # With g = w ∂loss/∂y and s = 1/√(mean x² + ε): ∂loss/∂x = s g − s³ mean(g x) x.
        for part in parts(rows):
            values, scale = rows[part].float(), inverse[part]
            grad = (grads[part] * weight).float()
            along = (grad * values).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-rows.shape[-1])
            result[part] = grad.mul_(scale).addcmul_(values, along)
        return result.view(upstream.shape), None, None
