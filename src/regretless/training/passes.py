"""Forward and backward passes of an optimizer step; what does not fit into a row is scored first, then trained on.

The loss depends on the model through the scores of the rows alone: log-probabilities of the response tokens, for some
methods divergences, and for mixtures of experts the sums of their routers. So a micro-batch of several rows needs no
memory for all of them at a time. All rows are computed without gradient, the loss is differentiated by each score, and
each row is computed again and gets these derivatives as the gradient of its scores. That is the gradient of the whole
micro-batch: no response is computed in two rows, and the first row, the largest, is computed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from regretless.core.errors import ConfigError
from regretless.modeling.layout import Layout
from regretless.modeling.token_logps import TokenScores
from regretless.training.batch import PairBatch

Score = Callable[[Layout, bool], TokenScores]
"""Scores of a row's response tokens, and on request the statistics of their distributions."""
Loss = Callable[[PairBatch, TokenScores | None, bool], Tensor]
"""Mean loss over a micro-batch's pairs, given the scores of all rows (None: to be computed) and whether it counts."""
DIFFERENTIABLE = ("logps", "kl", "routers", "listed")
"""Scores that a loss has a gradient by."""
LARGEST_DIFFERENCE = 0.05
"""Nats, root mean square over a row: more than rounding makes of equal computations, less than any randomness does."""


@dataclass(frozen=True)
class RandomState:
    """State of torch's random numbers on the CPU and on the device of a tensor."""

    device: str
    cpu: Tensor
    others: tuple[list[int], list[Tensor]]

    @classmethod
    def now(cls, tensor: Tensor) -> RandomState:
        """The present state."""
        return cls(tensor.device.type, torch.get_rng_state(), get_device_states(tensor))

    def restore(self) -> None:
        """Draw from this state on."""
        torch.set_rng_state(self.cpu)
        if self.device != "cpu":
            set_device_states(*self.others, device_type=self.device)

    @contextlib.contextmanager
    def again(self, tensor: Tensor) -> Iterator[None]:
        """Draw from this state within the block, and behind it as if nothing had been drawn."""
        before = RandomState.now(tensor)
        self.restore()
        try:
            yield
        finally:
            before.restore()


@dataclass(frozen=True)
class FirstPass:
    """Scores of a row without gradient, and the random numbers with which they come out again."""

    scores: TokenScores
    state: RandomState


@dataclass(frozen=True)
class DummyPasses:
    """Passes that count for nothing: they keep the processes' collective operations in step under FSDP."""

    first: int = 0
    """Those without gradient."""
    trained: int = 0
    """Those with gradient."""


class Passes:
    """The passes of one optimizer step over one model, inside `modeling.forward.grouped`."""

    def __init__(self, accelerator: Any, model: nn.Module, score: Score, loss: Loss) -> None:
        """`accelerator`: accelerate's; gradients are synchronized in the last pass only."""
        self._accelerator, self._model, self._score, self._loss = accelerator, model, score, loss
        self._left = 0

    def gradients(self, work: Sequence[tuple[PairBatch, float]], dummy: DummyPasses = DummyPasses()) -> Tensor:
        """Add the gradient of Σ weight · mean loss of the micro-batches; returns that sum, detached.

        A micro-batch with weight 0 is computed and counts for nothing. Raises ConfigError if a model's scores differ
        between its two passes over a row.
        """
        self._left = sum(len(batch.layouts) for batch, _ in work) + dummy.trained
        # Under sharding all processes make their passes without gradient first, then all others.
        firsts = []
        for batch, weight in work:
            firsts.append([self._first(layout, statistics=weight > 0) for layout in batch.layouts[1:]])
        some_layout = work[0][0].layouts[0]
        for _ in range(dummy.first):
            self._first(some_layout)
        losses = [self._trained(batch, weight, first) for (batch, weight), first in zip(work, firsts, strict=True)]
        for _ in range(dummy.trained):
            with self._synchronized_if_last():
                self._accelerator.backward(self._score(some_layout, False).logps.sum() * 0.0)
        return torch.stack(losses).sum()

    def _first(self, layout: Layout, *, statistics: bool = False) -> FirstPass:
        state = RandomState.now(layout.input_ids)
        with torch.no_grad():
            return FirstPass(self._score(layout, statistics), state)

    def _trained(self, batch: PairBatch, weight: float, firsts: Sequence[FirstPass]) -> Tensor:
        with self._synchronized_if_last():
            if not firsts:
                loss = self._loss(batch, None, weight > 0)
                self._accelerator.backward(loss * weight)
                return loss.detach() * weight
            largest = self._score(batch.layouts[0], weight > 0)
            parts = [largest, *(first.scores for first in firsts)]
            scores = leaves(joined(parts))
            loss = self._loss(batch, scores, weight > 0)
            derivatives = derivatives_by_row(loss * weight, scores, parts)
            self._accelerator.backward(_weighted(largest, derivatives[0]))
        del largest, parts  # its graph
        for layout, first, derivative in zip(batch.layouts[1:], firsts, derivatives[1:], strict=True):
            with self._synchronized_if_last():
                with first.state.again(layout.input_ids):
                    again = self._score(layout, False)
                _check_same(first.scores, again, batch)
                self._accelerator.backward(_weighted(again, derivative))
        return loss.detach() * weight

    def _synchronized_if_last(self) -> contextlib.AbstractContextManager[Any]:
        self._left -= 1
        return self._accelerator.no_sync(self._model) if self._left else contextlib.nullcontext()


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Scores of all rows, one row behind the other in the last dimension."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return TokenScores._make(None if column[0] is None else torch.cat(column, dim=-1) for column in columns)


def leaves(scores: TokenScores) -> TokenScores:
    """The same scores without the graph behind them, to differentiate a loss by."""
    return scores._replace(
        **{
            name: tensor.detach().requires_grad_()
            for name in DIFFERENTIABLE
            if (tensor := getattr(scores, name)) is not None
        }
    )


def derivatives_by_row(loss: Tensor, scores: TokenScores, parts: Sequence[TokenScores]) -> list[dict[str, Tensor]]:
    """The loss's derivative by each of the scores, which are `leaves` of the `parts`, as those of each row by name."""
    inputs = {name: tensor for name in DIFFERENTIABLE if (tensor := getattr(scores, name)) is not None}
    # A method may leave out the divergences, or weigh them with 0.
    derivatives = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, materialize_grads=True)
    sizes = {name: [getattr(part, name).shape[-1] for part in parts] for name in inputs}
    split = (torch.split(each, sizes[name], dim=-1) for name, each in zip(inputs, derivatives, strict=True))
    by_row = zip(*split, strict=True)
    return [dict(zip(inputs, row, strict=True)) for row in by_row]


def _weighted(scores: TokenScores, derivatives: dict[str, Tensor]) -> Tensor:
    """A number whose gradient with respect to the scores is `derivatives`."""
    terms = [(getattr(scores, name) * derivative).sum() for name, derivative in derivatives.items()]
    return torch.stack(terms).sum()


def _check_same(first: TokenScores, again: TokenScores, batch: PairBatch) -> None:
    """Raise ConfigError if two passes over a row, which should be equal, are not."""
    difference = float((first.logps - again.logps.detach()).square().mean().sqrt())
    if difference > LARGEST_DIFFERENCE:
        raise ConfigError(
            f"max_tokens_per_microbatch: {batch.sources[0]} and other pairs of its prompt have {batch.tokens} tokens, "
            f"so they are computed twice, and the model's log-probabilities differ by {difference:.2g} nats between "
            "the two: it draws random numbers that are not torch's. Turn that off in the model, or set "
            f"max_tokens_per_microbatch to {batch.tokens} or more"
        )
