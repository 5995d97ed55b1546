"""Running means of the logged training metrics, weighted by pairs and equal on every process."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from regretless.modeling.token_logps import TokenScores
from regretless.objectives import Logps, Output
from regretless.objectives.base import SATURATED
from regretless.training.batch import PairBatch


class RunningMeans:
    """Sums and counts by name since the last `take`."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._restored: dict[str, list[float]] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add the values of each name (any shape)."""
        for name, tensor in values.items():
            self.add_sum(name, tensor.sum(), tensor.numel())

    def add_sum(self, name: str, total: Tensor, count: int) -> None:
        """Add `count` values with this sum, a scalar."""
        # Stays on the device: reading it would synchronize with the device at every micro-batch.
        self._sums[name].append(total.detach())
        self._counts[name] += count

    def state(self) -> dict[str, Any]:
        """This process's additions since the last `take`: single sums and the count, by name."""
        sums_by_name = {name: torch.stack(sums).cpu().double().tolist() for name, sums in self._sums.items()}
        return {
            name: {"sums": self._restored.get(name, []) + sums_by_name.get(name, []), "count": self._counts[name]}
            for name in {**self._restored, **sums_by_name}
        }

    def restore(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Start with these states, in place of the additions since the last `take`."""
        self._clear()
        for name, part in (item for state in states for item in state.items()):
            self._restored[name] = self._restored.get(name, []) + part["sums"]
            self._counts[name] += part["count"]

    def _clear(self) -> None:
        self._sums.clear()
        self._counts.clear()
        self._restored.clear()

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Means over all processes since the last call; every process has to call it."""
        mine = {name: (_sum(part["sums"]), part["count"]) for name, part in self.state().items()}
        self._clear()
        everyone = [mine] if accelerator.num_processes == 1 else gather_object([mine])
        means = {}
        for name in sorted({name for part in everyone for name in part}):
            parts = [part[name] for part in everyone if name in part]
            means[name] = sum(total for total, _ in parts) / sum(count for _, count in parts)
        return means


class TokenCount:
    """Tokens of all pairs trained on since the beginning, prompts with each of their responses, over all processes."""

    def __init__(self) -> None:
        self.mine = 0
        """Those of this process."""

    def total(self, accelerator: Accelerator) -> int:
        """Those of all processes; every process has to call it."""
        return self.mine if accelerator.num_processes == 1 else sum(gather_object([self.mine]))


class Speed:
    """Tokens that the model processes per second of training, each distinct one once, over all processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._since: float | None = None
        self._tokens = 0

    def start(self) -> None:
        """Start the clock, if it is not running."""
        if self._since is None:
            self._since = self._clock()

    def add(self, tokens: int) -> None:
        """Count tokens of this process."""
        self._tokens += tokens

    def take(self, accelerator: Accelerator) -> float:
        """Tokens per second since the last call, or since the start; time spent on anything else counts as well.

        Every process has to call it.
        """
        now = self._clock()
        seconds = now - (now if self._since is None else self._since)
        tokens = self._tokens if accelerator.num_processes == 1 else sum(gather_object([self._tokens]))
        self._since, self._tokens = now, 0
        return tokens / seconds if seconds else 0.0


def _sum(values: Sequence[float]) -> float:
    # math.fsum refuses infinities of both signs.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def pair_metrics(logps: Logps, pairs: Tensor, output: Output, *, with_rejected: bool) -> dict[str, Tensor]:
    """Metrics per pair: rewards, accuracies, margins (TRL's names), log-probabilities and log-ratios (nats).

    behavior_kl/…: Σ KL(behavior policy ‖ policy) over a response's contexts, by listed tokens. A falling
    `logratios/chosen` shows that a method makes the chosen responses less likely, too.
    """
    sides = {"chosen": pairs[:, 0], "rejected": pairs[:, 1]} if with_rejected else {"chosen": pairs[:, 0]}
    sums = logps.of_compared(logps.policy.detach()).sum(-1)
    metrics = {f"logps/{side}": sums[rows] for side, rows in sides.items()}
    if logps.reference is not None:
        ratios = logps.log_ratio().detach()
        metrics |= {f"logratios/{side}": ratios[rows] for side, rows in sides.items()}
    if logps.top_logps is not None:
        divergences = logps.top_logps.divergence().detach().sum(-1)
        metrics |= {f"behavior_kl/{side}": divergences[rows] for side, rows in sides.items()}
    if (by_pair := output.pair_rewards(pairs)) is not None:
        rewards = {side: by_pair[:, number] for number, side in enumerate(sides)}
        metrics |= {f"rewards/{side}": values for side, values in rewards.items()}
        if with_rejected:
            margins = rewards["chosen"] - rewards["rejected"]
            metrics |= {
                "rewards/margins": margins,
                "rewards/accuracies": (margins > 0).float(),
                "rewards/saturated": (margins.abs() > SATURATED).float(),
            }
    return metrics


def add_token_metrics(
    means: RunningMeans, statistics: Tensor, mask: Tensor, pairs: Tensor, token_counts: tuple[int, int], *, sides: int
) -> None:
    """Add TRL's metrics that are means over tokens: logits/chosen, logits/rejected, entropy, mean_token_accuracy.

    statistics: (3, R, T), those of `TokenScores`; mask: (R, T); pairs: (P, 2); `sides`: 2, or 1 without rejected ones.
    As in TRL, entropy is over both sides, and accuracy over the chosen one.
    """
    sums = (statistics * mask).sum(-1)  # (3, R)
    names = ("chosen", "rejected")[:sides]
    for side, name in enumerate(names):
        means.add_sum(f"logits/{name}", sums[0, pairs[:, side]].sum(), token_counts[side])
    means.add_sum("entropy", sums[1, pairs[:, :sides]].sum(), sum(token_counts[:sides]))
    means.add_sum("mean_token_accuracy", sums[2, pairs[:, 0]].sum(), token_counts[0])


def add_batch_metrics(
    means: RunningMeans,
    batch: PairBatch,
    logps: Logps,
    scores: TokenScores,
    output: Output,
    aux_loss: Tensor | None,
    *,
    with_rejected: bool,
) -> None:
    """Add all metrics of a micro-batch, whose scores have statistics; `aux_loss`: its load-balancing loss, if any."""
    compared = batch.compared
    means.add(pair_metrics(logps, compared, output, with_rejected=with_rejected))
    if aux_loss is not None:
        means.add_sum("aux_loss", aux_loss * batch.counted_tokens, batch.counted_tokens)
    assert scores.statistics is not None
    statistics, sides = scores.statistics[:, batch.gather], 2 if with_rejected else 1
    add_token_metrics(means, statistics, batch.mask, compared, batch.token_counts, sides=sides)


def add_step_tokens(means: RunningMeans, *, pairwise: int, computed: int, recomputed: int, first_process: bool) -> None:
    """Add one process's tokens of an optimizer step: the means are of steps, over all processes together.

    tokens/computed: tokens that the model read with gradient. tokens/saved: how many fewer these are than `pairwise`,
    the tokens of all pairs, each prompt with each of its responses. tokens/recomputed: those of the computed ones that
    were computed without gradient before, because their query is larger than a micro-batch.
    """
    values = {"computed": computed, "saved": pairwise - computed, "recomputed": recomputed}
    for name, value in values.items():
        means.add_sum(f"tokens/{name}", torch.tensor(value, dtype=torch.float64), int(first_process))
