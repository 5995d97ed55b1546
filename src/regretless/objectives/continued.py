"""Continuations of the beginnings of responses by their writers, and which of them each unit's future is read from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Continued:
    """F continuations of up to L tokens, of beginnings of the R responses of `Logps`. Nats; F may be 0.

    Raises ValueError for shapes that differ, and for a continuation without a token.
    """

    policy: Tensor
    """(F, L) log-probabilities under the policy in training, with gradient."""
    behavior: Tensor
    """(F, L) those under the policy that drew them."""
    mask: Tensor
    """(F, L) bool: True at their tokens, which come first, as those of the responses do."""
    rows: Tensor
    """(F,) long: the response that each continues."""
    starts: Tensor
    """(F,) long: how many of its tokens it continues, one or more."""
    steps: Tensor | None = None
    """(F, L) integer step of each token, counted on from those before it; read only on the mask."""

    def __post_init__(self) -> None:
        shape = self.policy.shape
        for name in ("behavior", "mask", "steps"):
            if (value := getattr(self, name)) is not None and value.shape != shape:
                raise ValueError(f"Continued.{name}: expected {tuple(shape)} as policy, got {tuple(value.shape)}")
        for name in ("rows", "starts"):
            if (value := getattr(self, name)).shape != shape[:1]:
                raise ValueError(f"Continued.{name}: expected {tuple(shape[:1])}, got {tuple(value.shape)}")
        if not self.mask[:, :1].all():
            raise ValueError("Continued.mask: expected one token or more of each, the first ones")

    def in_type(self, dtype: torch.dtype) -> Self:
        """With log-probabilities of this type, 0 off the mask, and no gradient but the policy's."""
        values = {"policy": self.policy, "behavior": self.behavior.detach()}
        return replace(self, **{name: each.to(dtype).masked_fill(~self.mask, 0.0) for name, each in values.items()})

    def shares(self) -> Tensor:
        """1 / K of each, (F,): K continuations begin where it does."""
        together = (self.rows[:, None] == self.rows) & (self.starts[:, None] == self.starts)
        return 1 / together.sum(1).to(self.policy.dtype)

    def before(self, ended: Tensor) -> Tensor:
        """Of units that have ended where each begins (F,), those that have where the context before it is; 0 without.

        A unit's future is read in the first context with continuations at its end or behind it: the units of each are
        those between the two numbers.
        """
        earlier = (self.rows[:, None] == self.rows) & (self.starts[:, None] > self.starts)
        return torch.where(earlier, ended, 0).amax(1) if len(ended) else ended
