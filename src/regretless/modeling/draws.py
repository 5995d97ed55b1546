"""From logits to tokens: penalty, temperature, top-k and top-p on a short list, and a uniform number for each draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regretless.modeling.token_logps import CHUNK_ELEMENTS

Measure = Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]]
"""(logits (B, V), the same shaped to draw from (B, V), drawn token ids (B, 1)) → further numbers (B,) by name."""

LISTED = 128
"""Most likely tokens that are looked at first where top-p alone says how many are needed."""


class Candidates(NamedTuple):
    """The tokens that can be drawn, most likely first; equally likely ones by their ids."""

    scores: Tensor
    """(B, L) logits after penalty and temperature; −∞ for tokens that cannot be drawn."""
    ids: Tensor | None
    """(B, L) token ids; None if L is the whole vocabulary, in the order of ids."""

    def spread(self, vocabulary: int) -> Tensor:
        """(B, V) scores of all tokens: −∞ for those that are not listed."""
        if self.ids is None:
            return self.scores
        everywhere = self.scores.new_full((len(self.scores), vocabulary), -torch.inf)
        return everywhere.scatter_(1, self.ids, self.scores)


class Draw(NamedTuple):
    """A token of each row."""

    tokens: Tensor
    """(B,) ids."""
    logps: Tensor
    """(B,) nats in the model's own distribution."""
    sampled_logps: Tensor
    """(B,) nats in the distribution that was drawn from; 0 where the most likely token was taken."""
    numbers: Mapping[str, Tensor]
    """(B,) further numbers, by name."""
    top: tuple[Tensor, Tensor] | None = None
    """(B, k) ids of the most likely tokens and their log-probabilities (nats), if they were asked for."""


@dataclass(frozen=True)
class Sampler:
    """Draws tokens; what is drawn from is what transformers' processors of these names leave, in their order."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Draw from this many most likely tokens, and those as likely as the last of them; 0: from all."""
    top_p: float = 1.0
    """Draw from the most likely tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Divisor of positive and factor of negative logits of tokens that were seen."""
    measure: Measure | None = None
    """Further numbers of each token, from distributions over the whole vocabulary."""
    top: int = 0
    """Number of most likely tokens to tell of each distribution, at most all."""
    top_kind: Literal["raw", "sampled"] = "raw"
    """Which distribution: the model's own, or the one that is drawn from, in which others have −∞."""

    def __call__(self, logits: Tensor, seen: Tensor, uniforms: Tensor) -> Draw:
        """A token for each row, by inverting the distribution function at a uniform number.

        logits: (B, V) of the model, in float32 or better. seen: (B, S) ids of prompt and response so far, in any order
        and number. uniforms: (B,) float64 in [0, 1). A row's token depends on nothing but that row of the three.
        """
        # On a CPU a few rows at a time, which stay in its cache.
        rows = max(1, CHUNK_ELEMENTS["cpu"] // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
        slices = zip(*(torch.split(each, rows) for each in (logits, seen, uniforms)), strict=True)
        parts = [self._draw(*part) for part in slices]
        numbers = {name: torch.cat([part.numbers[name] for part in parts]) for name in parts[0].numbers}
        columns = zip(*((part.tokens, part.logps, part.sampled_logps) for part in parts), strict=True)
        tokens, logps, sampled = map(torch.cat, columns)
        tops = [part.top for part in parts if part.top is not None]
        top = (torch.cat([ids for ids, _ in tops]), torch.cat([values for _, values in tops])) if tops else None
        return Draw(tokens, logps, sampled, numbers, top)

    def _draw(self, logits: Tensor, seen: Tensor, uniforms: Tensor) -> Draw:
        candidates = self.candidates(logits, seen)
        if self.temperature > 0:
            # Sums from the first to the last, in float64: the same however many candidates other rows need.
            weights = (candidates.scores.double() - candidates.scores.amax(1, keepdim=True)).exp_()
            sums = weights.cumsum(1)
            places = torch.searchsorted(sums, uniforms[:, None] * sums[:, -1:], right=True)
            # Rounding may reach the sum of all; the last token that can be drawn is the first that reaches it.
            places = places.minimum(torch.searchsorted(sums, sums[:, -1:].contiguous()))
            sampled = (weights.gather(1, places) / sums[:, -1:]).log()[:, 0]
        else:
            places = candidates.scores.argmax(1, keepdim=True)
            sampled = torch.zeros_like(uniforms)
        tokens = places if candidates.ids is None else candidates.ids.gather(1, places)
        # Rounding can put a certain token slightly above 0.
        total = logits.logsumexp(1)
        logps = (logits.gather(1, tokens)[:, 0] - total).clamp(max=0)
        numbers = {} if self.measure is None else self.measure(logits, candidates.spread(logits.shape[1]), tokens)
        top = self._top(logits, total, candidates) if self.top else None
        return Draw(tokens[:, 0], logps, sampled, numbers, top)

    def _top(self, logits: Tensor, total: Tensor, candidates: Candidates) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities (B, k) of the most likely tokens; `total` (B,) is the log of the logits' sum."""
        size = min(self.top, logits.shape[1])
        if self.top_kind == "sampled":
            scores = candidates.scores.double()
            total = scores.logsumexp(1)
            if candidates.ids is None:
                return _likeliest(scores, total, size)
            if scores.shape[1] < size:
                # Tokens that cannot be drawn fill the list.
                return _likeliest(candidates.spread(logits.shape[1]).double(), total, size)
            return candidates.ids[:, :size], scores[:, :size] - total[:, None]
        # Without a penalty, what was listed is in the order of the logits.
        if self.repetition_penalty == 1 and candidates.ids is not None and candidates.ids.shape[1] >= size:
            ids = candidates.ids[:, :size]
            return ids, (logits.gather(1, ids) - total[:, None]).clamp(max=0)
        return _likeliest(logits, total, size)

    def candidates(self, logits: Tensor, seen: Tensor) -> Candidates:
        """What each row is drawn from; logits and seen as in a call."""
        if self.repetition_penalty == 1:
            return self._listed(logits)
        # In place, and back again: few logits change, and a copy of them all would take longer than the rest.
        before = logits.gather(1, seen)
        logits.scatter_(
            1, seen, torch.where(before < 0, before * self.repetition_penalty, before / self.repetition_penalty)
        )
        found = self._listed(logits)
        if found.scores is logits:
            found = Candidates(logits.clone(), None)
        logits.scatter_(1, seen, before)
        return found

    def _listed(self, scores: Tensor) -> Candidates:
        """Candidates for scores (B, V) after the penalty: a list that has all that can be drawn, or the vocabulary."""
        if self.temperature == 0:
            if self.measure is not None:
                return Candidates(scores, None)
            best = scores.argmax(1, keepdim=True)
            return Candidates(scores.gather(1, best), best)
        vocabulary = scores.shape[1]
        if self.top_k == 0 and self.top_p == 1:
            return Candidates(scores / self.temperature, None)
        total = None if self.top_k else (scores.double() / self.temperature).logsumexp(1, keepdim=True)
        size = 2 * self.top_k if self.top_k else LISTED
        while True:
            size = min(size, vocabulary)
            listed, ids = scores.topk(size)
            # By ids first: among equal scores, what `topk` returns depends on its number.
            ids, order = ids.sort(dim=1)
            listed, order = (listed.gather(1, order) / self.temperature).sort(dim=1, descending=True, stable=True)
            ids, last = ids.gather(1, order), listed[:, -1]
            kept = self._kept(listed, total)
            lowest = listed.masked_fill(~kept, torch.inf).amin(1)
            # Tokens that are not listed may be as likely as the last of the list.
            if size == vocabulary or bool((last < lowest).all()):
                return Candidates(listed.masked_fill(~kept, -torch.inf), ids)
            size *= 4

    def _kept(self, listed: Tensor, total: Tensor | None) -> Tensor:
        """Which of the scores (B, L), most likely first, top-k and top-p leave.

        total: (B, 1) log of the sum over the vocabulary, where there is no top-k. Tokens as likely as the last of the
        top k stay, as in transformers.
        """
        kept = torch.ones_like(listed, dtype=torch.bool)
        if self.top_k:
            kept = listed >= listed[:, min(self.top_k, listed.shape[1]) - 1, None]
        if self.top_p < 1:
            first = listed[:, :1].double()
            weights = (listed - first).exp_().masked_fill_(~kept, 0)
            sums = weights.cumsum(1)
            whole = sums[:, -1:] if total is None else (total - first).exp()
            kept &= sums - weights < self.top_p * whole
        return kept


def _likeliest(scores: Tensor, total: Tensor, size: int) -> tuple[Tensor, Tensor]:
    values, ids = scores.topk(size)
    return ids, (values - total[:, None]).clamp(max=0)


def uniform_numbers(seed: int, count: int) -> np.ndarray:
    """The first `count` uniform numbers of a response, float64 in [0, 1): one for each of its tokens.

    Philox (Salmon et al. 2011) counts under the key `seed`; its raw numbers are the same in every release of numpy.
    """
    return (np.random.Philox(key=seed).random_raw(count) >> np.uint64(11)) * 2.0**-53
