"""What the modifiers of an objective compute: weights of tokens and of responses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Importance = Literal["none", "mean", "sum"]


def tail_weights(mask: Tensor, alpha: float, dtype: torch.dtype) -> Tensor:
    """Weight of each token of P pairs' responses: 1 up to the shorter response's length, `alpha` after it, (2P, T).

    mask: (2P, T) bool; rows 2i and 2i + 1 are the chosen and the rejected response of pair i.
    """
    shorter = mask.sum(dim=1).view(-1, 2).min(dim=1).values.repeat_interleave(2)
    tail = mask.cumsum(dim=1) > shorter.unsqueeze(1)
    return torch.ones(mask.shape, device=mask.device, dtype=dtype).masked_fill(tail, alpha)


def importance_weights(policy: Tensor, behavior: Tensor, mask: Tensor, kind: Importance, clip: float) -> Tensor:
    """min(clip, π_θ / μ) of each response, (R,) without gradient, for its probabilities under the two policies.

    policy, behavior: (R, T) nats, zero off the mask. kind: `sum`, the ratio of whole responses; `mean`, its T-th root.
    """
    log_ratio = (policy.detach() - behavior).sum(dim=1)
    if kind == "mean":
        log_ratio = log_ratio / mask.sum(dim=1)
    return log_ratio.exp().clamp(max=clip)
