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
    hidden: Tensor, head: Head, targets: Tensor, reference: ReferenceHead | None = None, *, statistics: bool = False
) -> TokenScores:
    """Scores of `targets` (M,) given the hidden states (M, D) that predict them, with `statistics` on request."""
    return head.within(lambda gathered: _scores(gathered, head, targets, reference, statistics), hidden)


def _scores(
    hidden: Tensor, head: Head, targets: Tensor, reference: ReferenceHead | None, statistics: bool
) -> TokenScores:
    stats = torch.empty((3, len(targets)), dtype=torch.float32, device=hidden.device) if statistics else None
    if head.is_frozen_linear and torch.is_grad_enabled() and hidden.requires_grad:
        logps, kl = _FrozenHeadScores.apply(hidden, head, targets, reference, stats)  # type: ignore[no-untyped-call]
    elif head.is_frozen_linear or (head.is_linear and not torch.is_grad_enabled()):
        logps, kl, _, _ = _linear_forward(hidden.detach(), head, targets, reference, stats, with_gradient=False)
    elif head.is_linear:
        weight, bias = head.module.weight, head.module.bias
        logps, kl = _TrainedHeadScores.apply(hidden, weight, bias, head, targets, reference, stats)  # type: ignore[no-untyped-call]
    else:
        logps, kl = _recomputed(hidden, head, targets, reference, stats)
    for scores in (logps, kl):
        if scores is not None and scores.requires_grad:
            scores.register_hook(_without_tiny)
    return TokenScores(logps, kl, stats)


def _without_tiny(gradient: Tensor | None) -> Tensor | None:
    """The gradient, with entries below TINY as 0; None where a loss reads other scores only.

    A pair whose loss is saturated has entries like exp(−95). What they are multiplied with next makes them subnormal,
    and CPUs are many times slower at arithmetic with subnormal numbers than with zeros.
    """
    return None if gradient is None else gradient.masked_fill(gradient.abs() < TINY, 0.0)


class _FrozenHeadScores(torch.autograd.Function):
    """With a frozen head the gradient of each score with respect to its hidden state is one vector.

    ∂ log p[y] / ∂h = W[y] − Σ_v p_v W_v and ∂ KL / ∂h = Σ_v (p_v − r_v) W_v: computed in the forward pass from the
    logits at hand, they make the backward pass a scaling, and no logits are kept or made twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Head,
        targets: Tensor,
        reference: ReferenceHead | None,
        statistics: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        logps, kl, logp_gradient, kl_gradient = _linear_forward(
            hidden, head, targets, reference, statistics, with_gradient=True
        )
        ctx.save_for_backward(logp_gradient, kl_gradient)
        return logps, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        grad = None
        for upstream, vectors in zip(grads, ctx.saved_tensors, strict=True):
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
        targets: Tensor,
        reference: ReferenceHead | None,
        statistics: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        device = hidden.device.type
        ctx.head, ctx.reference = head, reference
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(hidden, weight, bias, targets)
        logps, kl, _, _ = _linear_forward(hidden, head, targets, reference, statistics, with_gradient=False)
        return logps, kl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        device, dtype, enabled = ctx.autocast
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(device, dtype, enabled):
            to_inputs = _linear_backward(
                hidden, weight, bias, targets, ctx.head, ctx.reference, grads, ctx.needs_input_grad
            )
        return *to_inputs, None, None, None, None


def _linear_backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: Head,
    reference: ReferenceHead | None,
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, those that are wanted, given those of log-probabilities and KL."""
    hidden_grad = torch.empty_like(hidden) if wanted[0] else None
    weight_grad = torch.zeros_like(weight) if wanted[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and wanted[2] else None
    buffers = Buffers()
    for rows in _chunks(hidden, weight.shape[0]):
        part = hidden[rows]
        logits = head.linear_logits(part, weight, bias, buffers)
        slope = head.slope(logits)
        difference = buffers.take("difference", (len(part), len(weight)), logits)
        torch.softmax(logits, -1, out=difference)
        # ∂ log p[y] / ∂ logits = one-hot − p, and ∂ KL / ∂ logits = p − r: in place, for a chunk is large.
        of_logp, of_kl = (None if grad is None else grad[rows].unsqueeze(-1) for grad in grads)
        if of_kl is None or reference is None:
            assert of_logp is not None
            difference.mul_(-of_logp)
        else:
            difference.mul_(of_kl if of_logp is None else of_kl - of_logp)
            difference.sub_(reference.head.logits(reference.hidden[rows]).softmax(-1).mul_(of_kl))
        if of_logp is not None:
            difference.scatter_add_(-1, targets[rows].unsqueeze(-1), of_logp.to(difference.dtype))
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


def _linear_forward(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    reference: ReferenceHead | None,
    statistics: Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    weight, bias = head.module.weight, head.module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    # Results lie outside the loop: made between a chunk's logits and the next one's, they would keep the C allocator
    # from using the freed space again, and every chunk would take fresh memory.
    logps = torch.empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    kl = None if reference is None else torch.empty_like(logps)
    logp_gradient = torch.empty_like(hidden, dtype=weight.dtype) if with_gradient else None
    kl_gradient = None if reference is None or logp_gradient is None else torch.empty_like(logp_gradient)
    # Where the logits are W h, accurately, the gradient g = W[y] − Σ_v p_v W_v gives the entropy.
    accurate = weight.dtype in (torch.float32, torch.float64) and hidden.device.type == "cpu"
    plain = head.softcap is None and bias is None and not torch.is_autocast_enabled("cpu")
    by_gradient = logp_gradient is not None and accurate and plain
    buffers = Buffers()
    for rows in _chunks(hidden, weight.shape[0]):
        logits = head.linear_logits(hidden[rows], weight, bias, buffers)
        chosen = targets[rows].unsqueeze(-1)
        all_logps = buffers.take("logps", (len(chosen), len(weight)), logits)
        torch.log_softmax(logits, -1, out=all_logps)
        logps[rows] = all_logps.gather(-1, chosen).squeeze(-1)
        slope = head.slope(logits)
        if statistics is not None:
            _write_statistics(statistics[:, rows], logits, all_logps, targets[rows], entropy=not by_gradient)
        del logits
        if reference is not None and kl is not None:
            reference_logps = reference.head.logits(reference.hidden[rows]).log_softmax(-1)
            kl[rows] = (reference_logps.exp() * (reference_logps - all_logps)).sum(-1)
        if logp_gradient is None:
            continue
        probabilities = all_logps.exp_()
        if kl_gradient is not None:
            difference = probabilities - reference_logps.exp_()
            kl_gradient[rows] = _times(difference, slope).to(weight.dtype) @ weight
        # One-hot minus probabilities, in place: the chunk is not needed any more.
        difference = probabilities.neg_().scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=probabilities.dtype))
        logp_gradient[rows] = _times(difference, slope).to(weight.dtype) @ weight
    if statistics is not None and by_gradient and logp_gradient is not None:
        # −Σ_v p_v log p_v = log Z − Σ_v p_v W_v · h, and log p[y] = W[y] · h − log Z: the sum of both is g · h.
        statistics[1] = torch.linalg.vecdot(logp_gradient, hidden) - logps
    return logps, kl, logp_gradient, kl_gradient


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


def _recomputed(
    hidden: Tensor, head: Head, targets: Tensor, reference: ReferenceHead | None, statistics: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A head that is more than a linear layer: each chunk's logits are made again in the backward pass."""

    def scores(
        written: Tensor | None, part: Tensor, chosen: Tensor, reference_part: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        logits = head.logits(part)
        all_logps = logits.log_softmax(-1)
        logps = all_logps.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        # The second time, in the backward pass, it ends before this line unless there is a reference.
        if written is not None:
            _write_statistics(written, logits.detach(), all_logps.detach(), chosen)
        if reference is None or reference_part is None:
            return logps, None
        with torch.no_grad():
            reference_logps = reference.head.logits(reference_part).log_softmax(-1)
        return logps, (reference_logps.exp() * (reference_logps - all_logps)).sum(-1)

    vocabulary = head.logits(hidden[:1].detach()).shape[-1]
    logp_parts, kl_parts = [], []
    for rows in _chunks(hidden, vocabulary):
        reference_part = None if reference is None else reference.hidden[rows]
        # Not an argument of the checkpoint, which would keep it and find it changed.
        write = partial(scores, None if statistics is None else statistics[:, rows])
        part = (hidden[rows], targets[rows], reference_part)
        logps, kl = checkpoint(write, *part, use_reentrant=False) if torch.is_grad_enabled() else write(*part)
        logp_parts.append(logps)
        if kl is not None:
            kl_parts.append(kl)
    return torch.cat(logp_parts), torch.cat(kl_parts) if kl_parts else None


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    elements = CHUNK_ELEMENTS["cpu" if hidden.device.type == "cpu" else "other"]
    size = CHUNK_TOKENS * max(1, elements // (CHUNK_TOKENS * vocabulary))
    return [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
