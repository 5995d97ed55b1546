"""RePO: regret-based preference optimization (arXiv:2606.09124)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import ValidationError, model_validator
from torch import Tensor
from torch.nn import functional as F

from regretless.core.errors import DataError
from regretless.core.settings import setting_error
from regretless.objectives.base import (
    REMEDIES,
    Fraction,
    Logps,
    NonNegative,
    Objective,
    Output,
    Positive,
)
from regretless.objectives.continued import Continued
from regretless.objectives.weights import Formulation, count_steps, repo_weights

REJECTED_WEIGHT: dict[Formulation, float] = {"paper": 1.0, "released": 0.5}
EPSILON: dict[Formulation, float | None] = {"paper": None, "released": 1e-9}
"""Added to the probabilities of tokens that are not listed."""
NEEDS = {"sampled": {"behavior"}, "topk": {"top_logps"}, "rollouts": {"behavior", "continuations"}}
"""What each estimator reads of the behavior policy."""
SCORE = (
    "score = β Σ_s [ (1 + w_s) π_s − c r_s − w_s m_s ] (formulation=paper; released: divided by T)\n"
    "w_s = H_{T−1} − H_{T−s} (formulation=paper), H_T − H_{T−s} (released)\n"
    "estimator=topk: −KL(m ‖ π) of the token at s, by the most likely ones, for π_s − m_s behind w_s\n"
    "estimator=rollouts: Σ w (π − m) as the mean over continuations of each unit's next context that has some\n"
)
"""Of `formula`, what RePO's relatives have in common."""


class RePO(Objective):
    """−log σ(score⁺ − λ score⁻), the score of a response being its negative regret (paper §4.2, §6, appendix table).

    score = β Σ_s [(1 + w_s) π_s − c r_s − w_s m_s] in nats: π the policy, r the reference, m the behavior policy, and
    w_s of `repo_weights`. The released formulation divides the sum by the number of tokens. With estimator=topk,
    −KL(m ‖ π) of the next token at s, by the listed tokens, takes the place of π_s − m_s behind w_s. With
    estimator=rollouts, the mean over stored continuations takes the place of what was written behind a context.
    """

    name: ClassVar[str] = "repo"
    title: ClassVar[str] = "RePO: regret-based preference optimization"
    paper: ClassVar[str] = "arXiv:2606.09124"
    formula: ClassVar[str] = SCORE + "loss = −log σ(score⁺ − λ score⁻) + sft_weight · mean_s(−π_s⁺)"
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
    horizon: Literal["cut", "stored"] = "cut"
    """Where the future of a response ends that is cut: at the `cut`, as in the authors' code, or with the tokens that
    are `stored` behind it, which count as future of those before it and nowhere else."""
    estimator: Literal["sampled", "topk", "rollouts"] = "sampled"
    """How the KL divergence of the behavior policy from the policy is estimated: `sampled` by the tokens that were
    written, π_s − m_s; `topk` by the most likely tokens in the context of each, which `sample.top_logps` records;
    `rollouts` by the behavior policy's continuations of a response's beginnings, which `rollout.keep_continuations`
    stores."""
    unknown_behavior: Literal["refuse", "dirac"] = "refuse"
    """What happens to a pair without behavior log-probabilities of both responses: `refuse`, or `dirac`, which trains
    it as RePO_det does (the paper's Algorithm 1, line 4)."""

    @model_validator(mode="after")
    def _check_horizon_and_behavior(self) -> Self:
        problems = {}
        if self.horizon == "stored" and (self.ld_alpha != 1 or self.importance != "none"):
            problems["horizon"] = "ld_alpha and importance weigh whole responses, not what is behind a cut"
        if self.unknown_behavior == "dirac" and not self.uses_behavior:
            problems["unknown_behavior"] = f"{self.name} reads no behavior policy"
        elif self.unknown_behavior == "dirac" and (self.reference == "behavior" or self.importance != "none"):
            problems["unknown_behavior"] = "importance and reference=behavior need the behavior policy of every pair"
        elif self.unknown_behavior == "dirac" and self.estimator != "sampled":
            read = {"topk": "lists", "rollouts": "continuations"}[self.estimator]
            problems["unknown_behavior"] = f"estimator={self.estimator} needs the {read} of every pair"
        if problems:
            errors = [
                setting_error((key,), f"{text}; leave it out", getattr(self, key)) for key, text in problems.items()
            ]
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self

    @property
    def reads_units(self) -> bool:
        # `ld_alpha` weighs single tokens, lists are in the place of single tokens.
        return self.uses_behavior and self.estimator == "sampled" and self.ld_alpha == 1

    @property
    def missing(self) -> Mapping[str, float]:
        return {"behavior": 0.0} if self.unknown_behavior == "dirac" else {}

    @property
    def needs(self) -> frozenset[str]:
        needs: set[str] = {"rejected"}
        if self.horizon == "stored":
            needs.add("future")
        if self.reference_weight:
            needs.add("reference")
        if self.uses_behavior:
            needs |= NEEDS[self.estimator]
        if self.granularity == "step":
            needs.add("steps")
        return frozenset(needs)

    def token_weights(
        self,
        mask: Tensor,
        steps: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        *,
        future: Tensor | None = None,
        units: Tensor | None = None,
    ) -> Tensor:
        """w_s of every token, (R, T), zero off the mask. The score's derivative by π_s is β (1 + w_s), /T if released.

        mask: (R, T) bool; steps: (R, T) integer, needed for (and only read with) granularity="step". future: (R, T),
        1 behind a response's cut, where the derivative is β w_s. units: (R, T) integer, in place of single tokens.
        Raises DataError if required steps are missing, ValueError for steps that are not consecutive.
        """
        weighted = self._weighted(steps, units)
        unit, counts = _unit_numbers(mask, weighted), _count(mask, weighted)
        cuts = None if future is None else _count(mask & (future == 0), weighted)
        weights = repo_weights(counts, mask.shape[1], self.formulation, self.discount, cuts=cuts, dtype=dtype)
        return weights.gather(1, unit).masked_fill(~mask, 0.0)

    def _weighted(self, steps: Tensor | None, units: Tensor | None) -> Tensor | None:
        """Number of what is weighted at each token, (R, T); None for tokens. Raises DataError as above."""
        if self.granularity == "token":
            return units
        if steps is None:
            raise DataError(f"{self.name} needs `steps`: {REMEDIES['steps']}")
        return steps

    def _rollout_weights(self, logps: Logps, continued: Continued) -> tuple[Tensor, Tensor]:
        """What π − m counts at the tokens of responses (R, T), and at those of their continuations (F, L).

        A continuation and the tokens before it are a response of its own; its weights are those of the windows of the
        units that have their next context with continuations where it begins, divided by the number of these.
        """
        dtype, rows, mask = logps.policy.dtype, continued.rows, logps.mask
        weighted = self._weighted(logps.steps, None)
        unit, own_counts, cuts = _unit_numbers(mask, weighted), _count(mask, weighted), _count(logps.compared, weighted)
        # Units of the continuations' tokens, numbered from the beginning of the response.
        of_steps = self._weighted(continued.steps, None)
        start = continued.starts.unsqueeze(1) if of_steps is None else 0
        numbers = (_unit_numbers(continued.mask, of_steps) + start).masked_fill(~continued.mask, 0)
        counts, ended = numbers.amax(dim=1) + 1, numbers[:, 0]
        most = max(mask.shape[1], int(counts.max()))

        def windows(lengths: Tensor, first: Tensor, last: Tensor) -> Tensor:
            """Weights (·, most) of the windows of the units behind the first ones, up to the last."""
            upper, lower = (
                repo_weights(lengths, most, self.formulation, self.discount, cuts=each, dtype=dtype)
                for each in (last, first)
            )
            return upper - lower

        first, last = (each.minimum(cuts[rows]) for each in (continued.before(ended), ended))
        of_paths = windows(counts, first, last) * continued.shares().unsqueeze(1)
        # Behind the last context, it is what was written.
        done = torch.zeros_like(cuts).scatter_reduce(0, rows, last, "amax")
        taken = windows(own_counts, done, cuts).gather(1, unit)
        before = torch.arange(mask.shape[1], device=mask.device) < continued.starts.unsqueeze(1)
        taken = taken.index_add(0, rows, of_paths.gather(1, unit[rows]) * before)
        return taken.masked_fill(~mask, 0.0), of_paths.gather(1, numbers).masked_fill(~continued.mask, 0.0)

    def token_scores(self, logps: Logps) -> Tensor:
        """Contribution of each token to its response's score, (R, T) nats, with gradient; row sums are the scores."""
        policy = logps.policy
        tokens = policy
        if self.reference_weight:
            assert logps.reference is not None
            tokens = policy - self.reference_weight * logps.reference
        later = policy
        if self.uses_behavior and self.estimator == "topk":
            assert logps.top_logps is not None
            later = -logps.top_logps.divergence(EPSILON[self.formulation])
        elif self.uses_behavior:
            assert logps.behavior is not None
            later = policy - logps.behavior
        continued = logps.continuations if self.estimator == "rollouts" else None
        if continued is not None and len(continued.rows):
            weights, of_paths = self._rollout_weights(logps, continued)
            behind = (of_paths * (continued.policy - continued.behavior)).sum(dim=1)
            tokens = logps.of_compared(tokens) + weights * later
            # What is expected behind a token belongs to it.
            tokens = tokens.index_put((continued.rows, continued.starts - 1), behind, accumulate=True)
        else:
            weights = self.token_weights(logps.mask, logps.steps, policy.dtype, future=logps.future, units=logps.units)
            tokens = logps.of_compared(tokens) + weights * later
        if self.formulation == "released":
            tokens = tokens / _count(logps.compared, self._weighted(logps.steps, logps.units)).unsqueeze(1)
        return self.beta * tokens

    @property
    def weight_of_rejected(self) -> float:
        """λ, `rejected_weight` or the formulation's own."""
        return REJECTED_WEIGHT[self.formulation] if self.rejected_weight is None else self.rejected_weight

    def losses(self, scores: Tensor, pairs: Tensor) -> Tensor:
        """Losses of pairs (P, 2) by the scores (R,) of responses: (P,), or (P, 2) with one for each response; nats."""
        chosen, rejected = scores[pairs].unbind(dim=1)
        return -F.logsigmoid(chosen - self.weight_of_rejected * rejected)

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        scores = self.token_scores(logps).sum(dim=1)
        losses = self.losses(scores, pairs)
        if self.sft_weight:
            likelihoods = self.sft_weight * logps.nll("mean")[pairs[:, 0]]
            losses = losses + (likelihoods if losses.dim() == 1 else likelihoods.unsqueeze(1))
        return Output(losses, scores=scores, rewards=scores.detach())


def _unit_numbers(mask: Tensor, units: Tensor | None) -> Tensor:
    """Number, from 0, of the unit of each token, (R, T) long; 0 off the mask. Tokens where none are given."""
    numbers = mask.cumsum(dim=1) - 1 if units is None else units.long()
    return numbers.masked_fill(~mask, 0)


def _count(mask: Tensor, units: Tensor | None) -> Tensor:
    """Units of each response, (R,) long: tokens where none are given."""
    return mask.sum(dim=1) if units is None else count_steps(mask, units)
