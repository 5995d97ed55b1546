"""The weights that collapse RePO's double sum over future tokens into one weighted sum, in O(T)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Formulation = Literal["paper", "released"]


def repo_weights(
    lengths: Tensor,
    T: int,
    formulation: Formulation = "paper",
    discount: float | None = None,
    *,
    cuts: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """How often each token occurs as a future token, w_s for s = 1…length, (R, T); zero beyond the length.

    lengths: (R,) integer, units (tokens or steps) of each response, 1…T.
    paper: the window of unit t is t+1…length; released: t…length, the authors' released code.
    discount None: each window is averaged, so w_s = H_{T−1} − H_{T−s} (paper) or H_T − H_{T−s} (released), H the
    harmonic numbers. A discount γ in [0, 1] weighs the l-th unit ahead by γ^l instead (arXiv:2606.09124, Theorem 5.4),
    so w_s = Σ_{l=1}^{s−1} γ^l (paper) or Σ_{l=0}^{s−1} γ^l (released).

    cuts (R,), 0…length: only the windows of the units up to a cut count, so the units behind it are future alone.

    Computed in float64, then cast to `dtype`: early weights are differences of nearly equal harmonic numbers.
    Raises ValueError for a length outside 1…T.
    """
    # Apple's GPUs have no float64.
    counts = lengths.to("cpu" if lengths.device.type == "mps" else lengths.device).unsqueeze(1)
    if counts.min() < 1 or counts.max() > T:
        raise ValueError(f"repo_weights: expected lengths in 1…{T}, got {int(counts.min())}…{int(counts.max())}")
    position = torch.arange(1, T + 1, device=counts.device).unsqueeze(0)
    offset = 0 if formulation == "released" else 1
    # How many windows a unit is in: those of the units before it, or up to it.
    windows = position - offset
    if cuts is not None:
        windows = windows.minimum(cuts.to(counts.device).unsqueeze(1))
    if discount is None:
        terms = 1 / torch.arange(1, T + 1, device=counts.device, dtype=torch.float64)
        harmonic = torch.cat([terms.new_zeros(1), terms.cumsum(0)])
        weights = harmonic[counts - offset] - harmonic[(counts - offset - windows).clamp(min=0)]
    else:
        # The nearest of these windows' units is so far before the unit.
        weights = discount ** (position - windows).double() * _geometric_sum(discount, windows)
        weights = weights.expand(counts.shape[0], T)
    return weights.masked_fill(position > counts, 0.0).to(dtype).to(lengths.device)


def _geometric_sum(ratio: float, terms: Tensor) -> Tensor:
    """Σ_{l=0}^{n−1} ratio^l for each n in `terms`, float64, numerically stable as the ratio approaches 1."""
    terms = terms.double()
    if ratio == 1:
        return terms
    if ratio == 0:
        return (terms > 0).double()
    return torch.expm1(terms * math.log(ratio)) / (ratio - 1)


def count_steps(mask: Tensor, steps: Tensor) -> Tensor:
    """Steps of each response, (R,) long. mask: (R, T) bool; steps: (R, T) integer, read only on the mask.

    Raises ValueError unless every response's steps start at 0 and each token stays in its step or opens the next.
    """
    steps = steps.masked_fill(~mask, -1)
    latest = steps.cummax(dim=1).values
    before = torch.cat([torch.full_like(latest[:, :1], -1), latest[:, :-1]], dim=1)
    advance = steps - before
    bad = mask & ((steps < 0) | (advance < 0) | (advance > 1))
    if bad.any():
        rows = bad.any(dim=1).nonzero().flatten().tolist()
        raise ValueError(
            f"steps of responses {rows}: expected 0, 0, …, 1, 1, …, each step opening right after the last"
        )
    return latest[:, -1] + 1
