"""Sequence parallelism: several processes compute one row, each a part of its tokens, and in attention of its heads.

Every layer but attention treats each token by itself. Before attention the processes exchange tokens for heads, and
behind it heads for tokens, so that each of them computes the whole row for some of the heads: by any attention, with
any mask (DeepSpeed-Ulysses, Jacobs et al. 2023). A process keeps the activations of its own tokens only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling.cpu_attention import PER_HEAD
from regretless.modeling.recurrent import recurrent_layers
from regretless.modeling.token_logps import ReferenceHead, TokenScores

NAME = "regretless_sequence_parallel"


@dataclass(frozen=True)
class SequenceGroup:
    """Processes that compute the same rows together, and the place of this one among them.

    Each of them computes the loss from all scores of a row. The gradients that a process then has are `size` times
    those of its tokens: averaged over the processes, as in data parallelism, they are those of the row.
    """

    processes: Any
    """The process group of torch.distributed."""
    rank: int
    size: int

    @classmethod
    def of_neighbors(cls, size: int) -> SequenceGroup:
        """The group of this process, of `size` with consecutive numbers; all processes have to call it."""
        group, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]
        return cls(group, dist.get_rank() % size, size)

    def part(self, row: Tensor) -> Tensor:
        """This process's tokens (1, N / size) of a row (1, N)."""
        return row.chunk(self.size, dim=1)[self.rank]

    def whole(self, hidden: Tensor) -> Tensor:
        """Hidden states (1, N, D) of a row, given those of this process's tokens (1, N / size, D)."""
        gathered: Tensor = _Gathered.apply(hidden.transpose(0, 1), self, False).transpose(0, 1)  # type: ignore[no-untyped-call]
        return gathered

    def share(self, predicted: Tensor) -> Tensor:
        """This process's part (m, …) of what belongs to the M predicted tokens.

        The last token is repeated until all parts are equally long. So the work of the output layer is divided equally,
        wherever in the row the responses are.
        """
        filled = torch.cat((predicted, predicted[-1:].expand(-len(predicted) % self.size, *predicted.shape[1:])))
        return filled.chunk(self.size)[self.rank]

    def share_of_reference(self, reference: ReferenceHead | None) -> ReferenceHead | None:
        """The same for the reference's hidden states (M, D)."""
        return None if reference is None else reference._replace(hidden=self.share(reference.hidden))

    def all_scores(self, scores: TokenScores, count: int) -> TokenScores:
        """Scores of all `count` predicted tokens, given those of this process's share."""

        def joined(part: Tensor | None) -> Tensor | None:
            if part is None:
                return None
            gathered: Tensor = _Gathered.apply(part.movedim(-1, 0), self, True).movedim(0, -1)  # type: ignore[no-untyped-call]
            return gathered[..., :count]

        return TokenScores._make(map(joined, scores))


def check_sequence_parallel(model: PreTrainedModel, size: int) -> None:
    """Raise ConfigError for a model whose layers cannot be divided among so many processes."""
    name = type(model).__name__
    if recurrent_layers(model):
        raise ConfigError(
            f"sequence_parallel_size: {name} has recurrent layers, in which a token needs the states behind all tokens "
            "before it; set it to 1"
        )
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int) or heads % size:
        raise ConfigError(
            f"sequence_parallel_size: {heads} attention heads of {name} cannot be divided equally among {size} "
            f"processes; choose a divisor of {heads}"
        )


def parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: SequenceGroup,
    by: str,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`, over rows of which each process has a part.

    query (1, H, N / size, D), key and value (1, H_kv, N / size, D). `by`: name of the attention function that computes
    whole rows for a part of the heads, from a part of what `options` has for each head. Returns (1, N / size, H, D).
    """
    if key.shape[1] % sequence.size:
        # Each process needs the keys that its own queries share.
        repeats = math.lcm(key.shape[1], sequence.size) // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    heads = [_tokens_for_heads(states, sequence) for states in (query, key, value)]
    for name in PER_HEAD:
        if options.get(name) is not None:
            options[name] = options[name].chunk(sequence.size)[sequence.rank]
    output, _ = AttentionInterface()[by](module, *heads, attention_mask, **options)
    return _heads_for_tokens(output, sequence), None


def _tokens_for_heads(states: Tensor, sequence: SequenceGroup) -> Tensor:
    """(1, H, N / size, D) of all heads as (1, H / size, N, D) of all tokens."""
    _, heads, tokens, width = states.shape
    parts = states.reshape(sequence.size, heads // sequence.size, tokens, width)
    return _exchanged(parts, sequence).transpose(0, 1).reshape(1, heads // sequence.size, -1, width)


def _heads_for_tokens(output: Tensor, sequence: SequenceGroup) -> Tensor:
    """(1, N, H / size, D) of all tokens as (1, N / size, H, D) of all heads."""
    _, tokens, heads, width = output.shape
    parts = output.reshape(sequence.size, tokens // sequence.size, heads, width)
    return _exchanged(parts, sequence).transpose(0, 1).reshape(1, tokens // sequence.size, -1, width)


def _exchanged(parts: Tensor, sequence: SequenceGroup) -> Tensor:
    exchanged: Tensor = _Exchanged.apply(parts, sequence)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(torch.autograd.Function):
    """Part i of what process j gives, as part j of what process i gets; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, sequence: SequenceGroup) -> Tensor:
        ctx.sequence = sequence
        return _exchange(parts, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.sequence), None


def _exchange(parts: Tensor, sequence: SequenceGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=sequence.processes)
    return received


class _Gathered(torch.autograd.Function):
    """All processes' parts (n, …) as (size · n, …); the gradient is that of the sum of the processes' losses.

    is_used_alike: all processes compute the same from it, and so the same gradient; else each computes something else.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, sequence: SequenceGroup, is_used_alike: bool) -> Tensor:
        ctx.sequence, ctx.is_used_alike = sequence, is_used_alike
        gathered = part.new_empty((sequence.size * len(part), *part.shape[1:]))
        dist.all_gather(list(gathered.chunk(sequence.size)), part.contiguous(), group=sequence.processes)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sequence = ctx.sequence
        if ctx.is_used_alike:
            return grad.chunk(sequence.size)[sequence.rank] * sequence.size, None, None
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=sequence.processes)
        return total.chunk(sequence.size)[sequence.rank], None, None


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(NAME, parallel_attention)
