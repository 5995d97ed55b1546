"""One more number per token, from sampling to the loss: an engine that records it, and an objective that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.objectives import Logps, Objective, Output
from regretless.objectives.base import NonNegative, Positive, margins
from regretless.sampling.engines import EngineKind
from regretless.sampling.transformers_engine import TransformersEngine


class EntropyEngine(TransformersEngine):
    """The engine of transformers, which also records the entropy (nats) of the distribution of each sampled token."""

    def measure(self, logits: Tensor, shaped: Tensor, tokens: Tensor) -> Mapping[str, Tensor]:
        """Entropy (B,) of what was drawn from: the logits after temperature, top-p, top-k and penalties."""
        return {"entropy": torch.special.entr(shaped.softmax(dim=1)).sum(dim=1)}


ENGINE = EngineKind(EntropyEngine)


class ForkingDPO(Objective):
    """DPO on the tokens that were sampled with a high entropy, the forks of a text (arXiv:2506.01939)."""

    name: ClassVar[str] = "forking_dpo"

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""
    threshold: NonNegative = 0.7
    """Least entropy (nats) of a token that counts."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference", "rejected", "entropy"})

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        assert logps.reference is not None
        counts = logps.token_numbers["entropy"] >= self.threshold
        rewards = self.beta * ((logps.policy - logps.reference) * counts).sum(dim=1)
        return Output(-F.logsigmoid(margins(rewards, pairs)), rewards=rewards.detach())
