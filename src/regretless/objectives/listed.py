"""The KL divergence of a writer from the policy, by the most likely tokens that the writer listed in each context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Probability of all tokens that are not listed up to which there are none: sums of float32 are no closer to 1."""


@dataclass(frozen=True, eq=False)
class Listed:
    """What is known of each context of R responses of up to T tokens by K listed tokens, in nats."""

    behavior: Tensor
    """(R, T, K) log-probabilities under the behavior policy, −∞ for tokens that it never writes; no gradient."""
    policy: Tensor
    """(R, T, K + 1) those under the policy in training, and of all tokens that are not listed together."""
    weights: Tensor | None = None
    """(R, T) factors of the divergences; None: 1."""

    def divergence(self, epsilon: float | None = None) -> Tensor:
        """KL(μ ‖ π) of the next token in each context, (R, T) nats, with gradient; μ is the behavior policy.

        The tokens that are not listed count as one: the divergence is exact where all that μ writes is listed, and
        otherwise less than the exact one by the KL of what is within that one, times its probability.
        epsilon: what the authors' released code adds to the probability of both sides' other tokens. It also divides
        each by their number, the same for two models of one vocabulary, so that it cancels.
        """
        written = self.behavior > -torch.inf
        logps = self.behavior.masked_fill(~written, 0.0)
        probabilities = logps.exp() * written
        total = (probabilities * (logps - self.policy[..., :-1])).sum(-1)
        rest = (1 - probabilities.sum(-1)).clamp(min=0)
        others = self.policy[..., -1]
        if epsilon is None:
            rest = rest.masked_fill(rest <= ROUNDING, 0.0)
        else:
            rest, others = rest + epsilon, (others.exp() + epsilon).log()
        divergence: Tensor = total + torch.special.xlogy(rest, rest) - rest * others
        return divergence if self.weights is None else divergence * self.weights
