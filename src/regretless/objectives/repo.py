"""RePO: regret-based preference optimization (arXiv:2606.09124)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from regretless.core.errors import DataError
from regretless.objectives.base import (
    REMEDIES,
    Fraction,
    Logps,
    NonNegative,
    Objective,
    Output,
    Positive,
)
from regretless.objectives.weights import Formulation, count_steps, repo_weights

REJECTED_WEIGHT: dict[Formulation, float] = {"paper": 1.0, "released": 0.5}
EPSILON: dict[Formulation, float | None] = {"paper": None, "released": 1e-9}
"""Added to the probabilities of tokens that are not listed."""


class RePO(Objective):
    """−log σ(score⁺ − λ score⁻), the score of a response being its negative regret (paper §4.2, §6, appendix table).

    score = β Σ_s [(1 + w_s) π_s − c r_s − w_s m_s] in nats: π the policy, r the reference, m the behavior policy, and
    w_s of `repo_weights`. The released formulation divides the sum by the number of tokens. With estimator=topk,
    −KL(m ‖ π) of the next token at s, by the listed tokens, takes the place of π_s − m_s behind w_s.
    """

    name: ClassVar[str] = "repo"
    title: ClassVar[str] = "RePO: regret-based preference optimization"
    paper: ClassVar[str] = "arXiv:2606.09124"
    formula: ClassVar[str] = (
        "score = β Σ_s [ (1 + w_s) π_s − c r_s − w_s m_s ] (formulation=paper; released: divided by T)\n"
        "w_s = H_{T−1} − H_{T−s} (formulation=paper), H_T − H_{T−s} (released)\n"
        "estimator=topk: −KL(m ‖ π) of the token at s, by the most likely ones, for π_s − m_s behind w_s\n"
        "loss = −log σ(score⁺ − λ score⁻) + sft_weight · mean_s(−π_s⁺)"
    )
    token_value: ClassVar[Literal["reward", "regret", "det"]] = "regret"
    uses_behavior: ClassVar[bool] = True

    beta: Positive = 1.0
    """Inverse temperature β of the score."""
    formulation: Formulation = "paper"
    """`paper` is the paper's formula (future tokens, summed); `released` is the authors' released code (current token
    too, averaged)."""
    rejected_weight: NonNegative | None = None
    """Weight λ of the rejected score; by default 1 for the paper's formula and 0.5 for the released code."""
    reference_weight: NonNegative = 1.0
    """Weight c of the reference; at 0 no reference is needed."""
    sft_weight: NonNegative = 0.0
    """Weight of the chosen response's negative log-likelihood, averaged over its tokens, which is added to the loss."""
    granularity: Literal["token", "step"] = "token"
    """Unit of the weights: single tokens, or steps, whose log-probability is the sum over their tokens."""
    discount: Fraction | None = None
    """Discount factor γ: the l-th unit ahead gets the weight γ^l. By default the units in the window are averaged."""

    estimator: Literal["sampled", "topk"] = "sampled"
    """How the KL divergence of the behavior policy from the policy is estimated in the context of each token: `sampled`
    by the token that was written, π_s − m_s; `topk` by the most likely tokens, which `sample.top_logps` records."""

    @property
    def needs(self) -> frozenset[str]:
        needs: set[str] = {"rejected"}
        if self.reference_weight:
            needs.add("reference")
        if self.uses_behavior:
            needs.add("behavior" if self.estimator == "sampled" else "top_logps")
        if self.granularity == "step":
            needs.add("steps")
        return frozenset(needs)

    def token_weights(self, mask: Tensor, steps: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """w_s of every token, (R, T), zero off the mask. The score's derivative by π_s is β (1 + w_s), /T if released.

        mask: (R, T) bool; steps: (R, T) integer, needed for (and only read with) granularity="step".
        Raises DataError if required steps are missing, ValueError for steps that are not consecutive.
        """
        if self.granularity == "token":
            unit, counts = mask.cumsum(dim=1) - 1, mask.sum(dim=1)
        elif steps is None:
            raise DataError(f"{self.name} needs `steps`: {REMEDIES['steps']}")
        else:
            unit, counts = steps.long(), count_steps(mask, steps)
        weights = repo_weights(counts, mask.shape[1], self.formulation, self.discount, dtype=dtype)
        return weights.gather(1, unit.masked_fill(~mask, 0)).masked_fill(~mask, 0.0)

    def token_scores(self, logps: Logps) -> Tensor:
        """Contribution of each token to its response's score, (R, T) nats, with gradient; row sums are the scores."""
        policy = logps.policy
        tokens = policy
        if self.reference_weight:
            assert logps.reference is not None
            tokens = policy - self.reference_weight * logps.reference
        future = policy
        if self.uses_behavior and self.estimator == "topk":
            assert logps.top_logps is not None
            future = -logps.top_logps.divergence(EPSILON[self.formulation])
        elif self.uses_behavior:
            assert logps.behavior is not None
            future = policy - logps.behavior
        tokens = tokens + self.token_weights(logps.mask, logps.steps, policy.dtype) * future
        if self.formulation == "released":
            units = logps.lengths
            if self.granularity == "step":
                assert logps.steps is not None
                units = count_steps(logps.mask, logps.steps)
            tokens = tokens / units.unsqueeze(1)
        return self.beta * tokens

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        scores = self.token_scores(logps).sum(dim=1)
        chosen, rejected = scores[pairs].unbind(dim=1)
        weight = REJECTED_WEIGHT[self.formulation] if self.rejected_weight is None else self.rejected_weight
        losses = -F.logsigmoid(chosen - weight * rejected)
        if self.sft_weight:
            losses = losses + self.sft_weight * logps.nll("mean")[pairs[:, 0]]
        return Output(losses, scores=scores, rewards=scores.detach())
