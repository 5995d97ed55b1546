"""Log-probabilities of tokens from hidden states, in chunks: the full (tokens, vocabulary) matrix never exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = {"cpu": 1 << 20, "other": 1 << 26}
"""Logits of a chunk: on a CPU few enough (4 MiB in float32) to stay in cache."""
TINY = torch.finfo(torch.float32).tiny ** 0.5
"""About 1e-19: the product of two such numbers is subnormal. Far below the epsilon of every optimizer."""
ROWS_ADDED = 1 << 13
"""Rows of the head's gradient that are computed at a time where they have another type."""
CHUNK_TOKENS = 128
"""Tokens of the smallest chunk, for each one reads the whole head; larger ones are a multiple, as matrix tiles are."""


class TokenScores(NamedTuple):
    """What the head yields per predicted token."""

    logps: Tensor
    """(M,) log-probability of each target token, nats."""
    kl: Tensor | None
    """(M,) KL(reference ‖ policy) over the vocabulary, nats; None when no reference was given."""
    statistics: Tensor | None = None
    """(3, M) of the distribution at each token, without gradient: mean of the logits over the vocabulary, entropy
    (nats), and 1 where the target has the largest logit, else 0. None unless they were asked for."""
    routers: Tensor | None = None
    """(2, E, 1) of the E experts of a mixture, as `modeling.router_loss` sums them up over the row's counted tokens;
    None unless the layout has counted tokens. Of several rows, (2, E, rows)."""
    listed: Tensor | None = None
    """(K + 1, M) log-probability of each token that is listed in the place of the target, and of all others together
    (nats); None unless the layout has lists."""


class Buffers:
    """Memory that all chunks of a row use, the first of which is the largest.

    Memory that is freed and taken again for each chunk is provided anew by the operating system, page by page.
    """

    def __init__(self) -> None:
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of this shape with values left from before; the same name always gives the same memory."""
        if name not in self._taken:
            self._taken[name] = torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
        return self._taken[name][: shape[0]]


@dataclass(frozen=True)
class Head:
    """A model's output layer, and what the model does behind it: a factor, then soft-capping, or code of its own."""

    module: nn.Module
    softcap: float | None = None
    scale: float = 1.0
    """Factor of the output layer's logits."""
    model_logits: Callable[[Tensor], Tensor] | None = None
    """The model's own way from hidden states (M, D) to logits (M, V), where it is none of these."""

    def cast(self, hidden: Tensor) -> Tensor:
        """Hidden states as the module takes them: models with residuals in float32 (Mamba-2) round them here."""
        weight = next(self.module.parameters(), hidden)
        rounds = hidden.dtype == torch.float32 and weight.dtype in (torch.float16, torch.bfloat16)
        return hidden.to(weight.dtype) if rounds else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(M, V) logits of (M, D) hidden states, in float32 or better; inside `within` under sharding."""
        if self.model_logits is not None:
            logits = self.model_logits(hidden)
            return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        # A sharded head has been gathered by `within`, and its hooks must not run for every chunk.
        sharded = isinstance(self.module, FSDPModule)
        return self.finished(type(self.module).forward(self.module, hidden) if sharded else self.module(hidden))

    def linear_logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffers: Buffers) -> Tensor:
        """`logits` of a linear head, without gradient; in memory of `buffers` unless it has a bias or casts."""
        device, shape = hidden.device.type, (len(hidden), len(weight))
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != weight.dtype
        if bias is not None or hidden.dtype != weight.dtype or casts:
            return self.finished(functional.linear(hidden, weight, bias))
        product = torch.mm(hidden, weight.t(), out=buffers.take("product", shape, weight))
        if product.dtype in (torch.float16, torch.bfloat16):
            product = buffers.take("logits", shape, weight, torch.float32).copy_(product)
        return self.finished(product)

    def finished(self, logits: Tensor) -> Tensor:
        """The module's output in float32 or better, multiplied with the factor and soft-capped."""
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the `finished` logits, given them, by the module's output; None where it is 1."""
        if self.softcap is None:
            return None if self.scale == 1 else torch.tensor(self.scale, dtype=logits.dtype)
        # d capped / d raw = 1 − (capped / cap)².
        return (1 - (logits / self.softcap).square()) * self.scale

    def within(self, work: Callable[[Tensor], TokenScores], hidden: Tensor) -> TokenScores:
        """`work(hidden)` inside one call of the module: sharding gathers its weights around it, not chunk by chunk."""
        if not isinstance(self.module, FSDPModule):
            return work(hidden)
        # The instance attribute shadows the class's method, as in `modeling.forward.grouped`.
        self.module.__dict__["forward"] = work
        try:
            scores: TokenScores = self.module(hidden)
        finally:
            del self.module.__dict__["forward"]
        return scores

    @property
    def is_linear(self) -> bool:
        """Whether this is a plain linear layer, apart from factor and soft-capping."""
        kind = type(self.module)
        return self.model_logits is None and (kind is nn.Linear or kind.__bases__ == (FSDPModule, nn.Linear))

    @property
    def is_frozen_linear(self) -> bool:
        """Whether this is a plain linear layer without trainable parameters."""
        return self.is_linear and not any(p.requires_grad for p in self.module.parameters())


class ReferenceHead(NamedTuple):
    """Hidden states (M, D) of the reference model, and its head, where a full-vocabulary divergence is wanted."""

    hidden: Tensor
    head: Head


def token_scores(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    reference: ReferenceHead | None = None,
    *,
    listed: Tensor | None = None,
    statistics: bool = False,
) -> TokenScores:
    """Scores of `targets` (M,) given the hidden states (M, D) that predict them, with `statistics` on request.

    listed: (M, K) ids, each at most once in a row, whose log-probabilities are wanted too.
    """
    wanted = _Wanted(targets, reference, listed)
    return head.within(lambda gathered: _scores(gathered, head, wanted, statistics), hidden)


class _Wanted(NamedTuple):
    """What is to be known of each distribution."""

    targets: Tensor
    reference: ReferenceHead | None
    listed: Tensor | None

    def part(self, rows: slice) -> _Wanted:
        """The same of some rows."""
        reference = self.reference and self.reference._replace(hidden=self.reference.hidden[rows])
        return _Wanted(self.targets[rows], reference, None if self.listed is None else self.listed[rows])


def _scores(hidden: Tensor, head: Head, wanted: _Wanted, statistics: bool) -> TokenScores:
    stats = torch.empty((3, len(hidden)), dtype=torch.float32, device=hidden.device) if statistics else None
    if head.is_frozen_linear and torch.is_grad_enabled() and hidden.requires_grad:
        weight = head.module.weight
        found = _FrozenHeadScores.apply(hidden, weight, head, wanted, stats)  # type: ignore[no-untyped-call]
    elif head.is_frozen_linear or (head.is_linear and not torch.is_grad_enabled()):
        found = _linear_forward(hidden.detach(), head, wanted, stats, with_gradient=False).scores
    elif head.is_linear:
        weight, bias = head.module.weight, head.module.bias
        found = _TrainedHeadScores.apply(hidden, weight, bias, head, wanted, stats)  # type: ignore[no-untyped-call]
    else:
        found = _recomputed(hidden, head, wanted, stats)
    for scores in found:
        if scores is not None and scores.requires_grad:
            scores.register_hook(_without_tiny)
    logps, kl, listed = found
    return TokenScores(logps, kl, stats, listed=listed)


def _without_tiny(gradient: Tensor | None) -> Tensor | None:
    """The gradient, with entries below TINY as 0; None where a loss reads other scores only.

    A pair whose loss is saturated has entries like exp(−95). What they are multiplied with next makes them subnormal,
    and CPUs are many times slower at arithmetic with subnormal numbers than with zeros.
    """
    return None if gradient is None else gradient.masked_fill(gradient.abs() < TINY, 0.0)


_Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""(M,) log-probabilities of the targets, (M,) divergences, (K + 1, M) log-probabilities of what is listed."""


class _FrozenHeadScores(torch.autograd.Function):
    """With a frozen head the gradient of each score with respect to its hidden state is one vector.

    ∂ log p[y] / ∂h = W[y] − Σ_v p_v W_v and ∂ KL / ∂h = Σ_v (p_v − r_v) W_v: computed in the forward pass from the
    logits at hand, they make the backward pass a scaling, and no logits are kept or made twice. Where tokens are
    listed, W[y], their rows W_v and the mean of all other rows, weighted with p_v, give all gradients of
    log-probabilities: the mean is kept in the place of the first vector.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, head: Head, wanted: _Wanted, statistics: Tensor | None
    ) -> _Scores:
        forward = _linear_forward(hidden, head, wanted, statistics, with_gradient=True)
        ids = None if wanted.listed is None else torch.cat((wanted.targets.unsqueeze(-1), wanted.listed), dim=1)
        ctx.save_for_backward(*forward.gradients, ids, forward.scores[2], forward.slopes, weight)
        return forward.scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        first, of_kl, ids, listed, slopes, weight = ctx.saved_tensors
        scaled = [(grads[1], of_kl)]
        grad = None
        if ids is None:
            scaled.append((grads[0], first))
        else:
            of_listed = torch.zeros_like(listed) if grads[2] is None else grads[2]
            of_logp = torch.zeros_like(listed[0]) if grads[0] is None else grads[0]
            every = of_logp + of_listed.sum(0)
            of_rows = torch.cat((of_logp.unsqueeze(0), of_listed[:-1] - every * listed[:-1].exp())).t()
            of_rows = _times(of_rows, slopes).to(weight.dtype).contiguous()
            grad = functional.embedding_bag(ids, weight, per_sample_weights=of_rows, mode="sum")
            scaled.append((of_listed[-1] - every * listed[-1].exp(), first))
        for upstream, vectors in scaled:
            if upstream is not None and vectors is not None:
                term = upstream.unsqueeze(-1).to(vectors.dtype) * vectors
                grad = term if grad is None else grad + term
        return grad, None, None, None, None


class _TrainedHeadScores(torch.autograd.Function):
    """With a linear head that learns, each chunk's logits are made again in the backward pass.

    The head's gradient is one matrix that every chunk adds to. Left to autograd, each chunk would make one of its own:
    where the vocabulary is large, these are larger than the chunk's logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        wanted: _Wanted,
        statistics: Tensor | None,
    ) -> _Scores:
        device = hidden.device.type
        ctx.head, ctx.wanted = head, wanted
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        scores = _linear_forward(hidden, head, wanted, statistics, with_gradient=False).scores
        ctx.save_for_backward(hidden, weight, bias, scores[2])
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        device, dtype, enabled = ctx.autocast
        hidden, weight, bias, listed = ctx.saved_tensors
        with torch.autocast(device, dtype, enabled):
            to_inputs = _linear_backward(
                hidden, weight, bias, ctx.head, ctx.wanted, listed, grads, ctx.needs_input_grad
            )
        return *to_inputs, None, None, None


def _linear_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    wanted: _Wanted,
    listed: Tensor | None,
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, those that are needed, given those of the scores.

    listed: (K + 1, M) log-probabilities, as the forward pass gave them.
    """
    hidden_grad = torch.empty_like(hidden) if needed[0] else None
    weight_grad = torch.zeros_like(weight) if needed[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and needed[2] else None
    buffers = Buffers()
    for rows in _chunks(hidden, weight.shape[0]):
        part = hidden[rows]
        targets, reference, ids = wanted.part(rows)
        logits = head.linear_logits(part, weight, bias, buffers)
        slope = head.slope(logits)
        difference = buffers.take("difference", (len(part), len(weight)), logits)
        torch.softmax(logits, -1, out=difference)
        # ∂ log p[y] / ∂ logits = one-hot − p, and ∂ KL / ∂ logits = p − r: in place, for a chunk is large.
        of_logp, of_kl = (None if grad is None else grad[rows].unsqueeze(-1) for grad in grads[:2])
        of_listed = None if grads[2] is None or listed is None else grads[2][:, rows].t()
        every = torch.zeros_like(difference[:, :1])
        for sign, of_score in ((-1, of_logp), (1, of_kl), (-1, of_listed)):
            if of_score is not None:
                every += sign * of_score.sum(-1, keepdim=True)
        if of_listed is None or listed is None or ids is None:
            difference.mul_(every)
        else:
            # ∂ log (1 − Σ_L p) / ∂ logits = p / (1 − Σ_L p) − p at the tokens that are not listed, −p at the others.
            at_listed = difference.gather(-1, ids).mul_(every).add_(of_listed[:, :-1])
            difference.mul_(every + of_listed[:, -1:] / listed[-1, rows].exp().unsqueeze(-1))
            difference.scatter_(-1, ids, at_listed)
        if of_kl is not None and reference is not None:
            difference.sub_(reference.head.logits(reference.hidden).softmax(-1).mul_(of_kl))
        if of_logp is not None:
            difference.scatter_add_(-1, targets.unsqueeze(-1), of_logp.to(difference.dtype))
        if bias_grad is not None:
            bias_grad += difference.sum(0) if slope is None else (difference * slope).sum(0)
        by_output = _times(difference, slope).to(weight.dtype)
        if hidden_grad is not None:
            hidden_grad[rows] = by_output @ weight
        if weight_grad is not None:
            _add_product(weight_grad, by_output, part)
    return hidden_grad, weight_grad, bias_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right to `total` (V, D), without memory for more than some rows of the product."""
    if left.dtype == right.dtype == total.dtype and not torch.is_autocast_enabled(total.device.type):
        total.addmm_(left.t(), right)
        return
    for start in range(0, len(total), ROWS_ADDED):
        rows = slice(start, start + ROWS_ADDED)
        total[rows] += left[:, rows].t() @ right


class _Forward(NamedTuple):
    """What a forward pass through a linear head makes."""

    scores: _Scores
    gradients: tuple[Tensor | None, Tensor | None]
    """(M, D) of log-probability and KL by the hidden state; in the place of the first, with lists, the mean of W_v,
    weighted with p_v, over the tokens v that are not listed."""
    slopes: Tensor | None
    """(M, K + 1) of the targets' and the listed tokens' logits by the module's output, or one for all; None: 1."""


def _linear_forward(
    hidden: Tensor, head: Head, wanted: _Wanted, statistics: Tensor | None, *, with_gradient: bool
) -> _Forward:
    weight, bias = head.module.weight, head.module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Results lie outside the loop: made between a chunk's logits and the next one's, they would keep the C allocator
    # from using the freed space again, and every chunk would take fresh memory.
    logps = torch.empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    kl = None if wanted.reference is None else torch.empty_like(logps)
    width = 0 if wanted.listed is None else wanted.listed.shape[1] + 1
    listed = logps.new_empty(width, len(logps)) if width else None
    gradient = torch.empty_like(hidden, dtype=weight.dtype) if with_gradient else None
    kl_gradient = None if kl is None or gradient is None else torch.empty_like(gradient)
    slopes = logps.new_empty(len(logps), width) if width and head.softcap is not None else head.slope(logps)
    by_gradient = gradient is not None and _gives_entropy(head, hidden)
    log_sums = torch.empty_like(logps)
    buffers = Buffers()
    for rows in _chunks(hidden, weight.shape[0]):
        targets, reference, ids = wanted.part(rows)
        logits = head.linear_logits(hidden[rows], weight, bias, buffers)
        chosen = targets.unsqueeze(-1)
        all_logps = buffers.take("logps", (len(chosen), len(weight)), logits)
        torch.log_softmax(logits, -1, out=all_logps)
        logps[rows] = all_logps.gather(-1, chosen).squeeze(-1)
        log_sums[rows] = logits.gather(-1, chosen).squeeze(-1) - logps[rows]
        slope = head.slope(logits)
        if statistics is not None:
            _write_statistics(statistics[:, rows], logits, all_logps, targets, entropy=not by_gradient)
        del logits
        if reference is not None and kl is not None:
            reference_logps = reference.head.logits(reference.hidden).log_softmax(-1)
            kl[rows] = (reference_logps.exp() * (reference_logps - all_logps)).sum(-1)
        if listed is None and gradient is None:
            continue
        if listed is not None and ids is not None:
            listed[:-1, rows] = all_logps.gather(-1, ids).t()
            if slopes is not None and slope is not None and head.softcap is not None:
                slopes[rows] = slope.gather(-1, torch.cat((chosen, ids), dim=1))
        probabilities = all_logps.exp_()
        if kl_gradient is not None:
            difference = probabilities - reference_logps.exp_()
            kl_gradient[rows] = _times(difference, slope).to(weight.dtype) @ weight
        # In place: the chunk is not needed any more.
        if listed is not None and ids is not None:
            # Not 1 − Σ_L p, which has no digits left where nearly all is listed.
            difference = probabilities.scatter_(-1, ids, 0.0)
            rest = difference.sum(-1).clamp(min=torch.finfo(difference.dtype).tiny)
            listed[-1, rows] = rest.log()
        else:
            # One-hot minus probabilities.
            rest, ones = None, torch.ones_like(chosen, dtype=probabilities.dtype)
            difference = probabilities.neg_().scatter_add_(-1, chosen, ones)
        if gradient is not None:
            product = _times(difference, slope).to(weight.dtype) @ weight
            gradient[rows] = product if rest is None else product / rest.unsqueeze(-1)
    if statistics is not None and by_gradient and gradient is not None:
        statistics[1] = _entropy(torch.linalg.vecdot(gradient, hidden), logps, log_sums, listed)
    return _Forward((logps, kl, listed), (gradient, kl_gradient), slopes)


def _gives_entropy(head: Head, hidden: Tensor) -> bool:
    """Whether products of gradients and hidden states give the entropy: where the logits are W h, accurately."""
    accurate = head.module.weight.dtype in (torch.float32, torch.float64) and hidden.device.type == "cpu"
    return accurate and head.softcap is None and head.module.bias is None and not torch.is_autocast_enabled("cpu")


def _entropy(products: Tensor, logps: Tensor, log_sums: Tensor, listed: Tensor | None) -> Tensor:
    """Entropy (M,) of each distribution, by the products (M,) of its `_Forward.gradients` and its hidden state.

    log_sums: (M,) log Z. −Σ_v p_v log p_v = log Z − Σ_v p_v W_v · h, and log p[y] = W[y] · h − log Z: without lists it
    is the product less log p[y]. With lists, the product is the mean logit of all other tokens.
    """
    if listed is None:
        return products - logps
    probabilities = listed.exp()
    return probabilities[-1] * (log_sums - products) - (probabilities[:-1] * listed[:-1]).sum(0)


def _write_statistics(
    statistics: Tensor, logits: Tensor, all_logps: Tensor, targets: Tensor, *, entropy: bool = True
) -> None:
    """Write a chunk's part of `TokenScores.statistics`. Its logits (M, V) are overwritten: no memory is taken."""
    statistics[0] = logits.mean(-1)
    # Not argmax, which takes CPUs several times longer.
    statistics[2] = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) == logits.amax(-1)
    if entropy:
        statistics[1] = -torch.exp(all_logps, out=logits).mul_(all_logps).sum(-1)


def _times(values: Tensor, slope: Tensor | None) -> Tensor:
    return values if slope is None else values * slope


def _recomputed(hidden: Tensor, head: Head, wanted: _Wanted, statistics: Tensor | None) -> _Scores:
    """A head that is more than a linear layer: each chunk's logits are made again in the backward pass."""

    def scores(written: Tensor | None, part: Tensor, of_part: _Wanted) -> _Scores:
        logits = head.logits(part)
        all_logps = logits.log_softmax(-1)
        targets, reference, ids = of_part
        logps = all_logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # The second time, in the backward pass, it ends before this line unless there is a reference or a list.
        if written is not None:
            _write_statistics(written, logits.detach(), all_logps.detach(), targets)
        kl = listed = None
        if reference is not None:
            with torch.no_grad():
                reference_logps = reference.head.logits(reference.hidden).log_softmax(-1)
            kl = (reference_logps.exp() * (reference_logps - all_logps)).sum(-1)
        if ids is not None:
            others = all_logps.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True)
            others = others.clamp(min=torch.finfo(others.dtype).tiny).log()
            listed = torch.cat((all_logps.gather(-1, ids), others), dim=-1).t()
        return logps, kl, listed

    vocabulary = head.logits(hidden[:1].detach()).shape[-1]
    parts = []
    for rows in _chunks(hidden, vocabulary):
        # Not an argument of the checkpoint, which would keep it and find it changed.
        write = partial(scores, None if statistics is None else statistics[:, rows])
        part = (hidden[rows], wanted.part(rows))
        parts.append(checkpoint(write, *part, use_reentrant=False) if torch.is_grad_enabled() else write(*part))
    logps, kl, listed = zip(*parts, strict=True)
    return (
        torch.cat(logps),
        None if wanted.reference is None else torch.cat(kl),
        None if wanted.listed is None else torch.cat(listed, dim=-1),
    )


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    elements = CHUNK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "other"]
    size = CHUNK_TOKENS * max(1, elements // (CHUNK_TOKENS * vocabulary))
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
