"""Pairs as the trainer reads them, and their order over the steps."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from regretless.core.errors import DataError
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling.layout import Ids, Item
from regretless.training.pair_store import PairTable

WINDOW = 64
"""Groups that a step may skip to be filled with whole groups."""


@dataclass(frozen=True)
class TrainingPair:
    """A tokenized pair; `mismatched`: both responses to another prompt, from which some methods estimate their zero.

    more: of an objective of lists, all other pairs with this prompt and chosen response.
    """

    pair: TokenizedPair
    mismatched: tuple[Ids, ...] = ()
    more: tuple[TokenizedPair, ...] = ()

    @property
    def pairs(self) -> tuple[TokenizedPair, ...]:
        """The pair, or those of its list."""
        return (self.pair, *self.more)

    def sides(self, *, rejected: bool) -> tuple[TokenizedSide, ...]:
        """The chosen side, and the `rejected` ones."""
        others = [pair.sides[1] for pair in self.more]
        return (*self.pair.sides, *others) if rejected else (self.pair.chosen,)

    def items(self, *, rejected: bool, continued: bool = False) -> list[Item]:
        """The (prompt, response) token pairs that a step computes for this pair; with those that continuations make."""
        sides = self.sides(rejected=rejected)
        paths = [ids for side in sides for _, ids in side.paths()] if continued else []
        return [(self.pair.prompt_ids, ids) for ids in (*(side.ids for side in sides), *paths)]

    def mismatched_items(self) -> list[Item]:
        """The prompt with each response to another prompt."""
        return [(self.pair.prompt_ids, response) for response in self.mismatched]


class PairDataset(Dataset[TrainingPair]):
    """Tokenized pairs of a table, or some of them, and which of them share a prompt; read on demand.

    With `lists` an item is all pairs with one prompt and chosen response.
    """

    def __init__(
        self,
        pairs: PairTable | Iterable[TokenizedPair],
        *,
        mismatched: bool,
        lists: bool = False,
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        """`numbers`: indices of the table's pairs to use, in order; default: all.

        `mismatched`: attach to every pair the chosen and the rejected response of a pair with the next prompt (for an
        objective whose `zero_point` is an estimate over them). They are fixed per data set, not drawn per batch, so
        that their reference log-probabilities can be computed once and the estimate works for any batch size. Raises
        DataError if that is requested and all prompts are equal.
        """
        self.table = pairs if isinstance(pairs, PairTable) else PairTable.temporary(pairs)
        self.numbers = np.arange(len(self.table)) if numbers is None else numbers
        self._lists = Groups(self.table.chosen[self.numbers]) if lists else None
        self._first, self.tokens = self.numbers, self.table.tokens[self.numbers]
        """(items,) number of the first pair; and tokens of the prompt, responses and continuations of its pairs."""
        if self._lists is not None:
            starts = self._lists.bounds[:-1]
            self._first = self.numbers[self._lists.members[starts]]
            self.tokens = np.add.reduceat(self.tokens[self._lists.members], starts)
        self.groups = Groups(self.table.prompts[self._first])
        self._mismatched = self._with_next_prompt() if mismatched else None

    def _with_next_prompt(self) -> NDArray[np.int64]:
        """For each pair one of another prompt: of the next group, the pair of the same rank, cyclically."""
        groups = self.groups
        if len(groups) < 2:
            raise DataError(
                "the zero point is taken over prompts with answers to other prompts, and these data have one prompt "
                "only; use reference_point=paired"
            )
        sizes = np.diff(groups.bounds)
        rank = np.arange(len(self)) - np.repeat(groups.bounds[:-1], sizes)
        others = rank % np.repeat(np.roll(sizes, -1), sizes) + np.repeat(np.roll(groups.bounds[:-1], -1), sizes)
        partners = np.empty(len(self), np.int64)
        partners[groups.members] = groups.members[others]
        return partners

    @property
    def key(self) -> str | None:
        """Identity of the pairs, if their table is cached under one."""
        if self.table.key is None:
            return None
        chosen = xxhash.xxh3_128_hexdigest(self.numbers.tobytes())
        kind = ("-both-mismatched" if self._mismatched is not None else "") + ("" if self._lists is None else "-lists")
        return f"{self.table.key}-{chosen[:16]}{kind}"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a response."""
        prompts, responses = (
            lengths[self.numbers] for lengths in (self.table.prompt_tokens, self.table.response_tokens)
        )
        if self._mismatched is not None:
            responses = np.maximum(responses, responses[self._mismatched])
        return int((prompts + responses).max(initial=0))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> TrainingPair:
        pair = self.table[int(self._first[index])]
        if self._lists is not None:
            return TrainingPair(pair, more=tuple(self.table[int(self.numbers[n])] for n in self._lists[index][1:]))
        if self._mismatched is None:
            return TrainingPair(pair)
        other = self.table[int(self._first[self._mismatched[index]])]
        return TrainingPair(pair, tuple(side.ids for side in other.sides))


class Groups:
    """Indices that share a prompt, in the order in which the prompts first appear; they need not be neighbors."""

    def __init__(self, prompts: NDArray[np.uint64]) -> None:
        """`prompts`: hash of each index's prompt."""
        _, first, inverse = np.unique(prompts, return_index=True, return_inverse=True)
        group = np.argsort(np.argsort(first))[inverse]
        self.members: NDArray[np.int64] = np.argsort(group, kind="stable")
        """The indices, group by group."""
        self.bounds: NDArray[np.int64] = np.concatenate([[0], np.cumsum(np.bincount(group, minlength=len(first)))])
        """(groups + 1,) start of each group among the members."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, group: int) -> NDArray[np.int64]:
        """Members of one group."""
        return self.members[self.bounds[group] : self.bounds[group + 1]]

    def steps(self, order: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
        """Members of the groups that `order` lists, in steps of exactly `size` (the last one what is left).

        A group that two steps share is computed in both. So a step starts with the group that has waited longest and
        adds those that fit as a whole, skipping up to `WINDOW` others. If that leaves room, it looks for groups among
        all of these that fill the step exactly, and only if there are none splits one.
        """
        upcoming = map(self.__getitem__, order.tolist())
        waiting: deque[NDArray[np.int64]] = deque()
        while (first := waiting.popleft() if waiting else next(upcoming, None)) is not None:
            if len(first) > size:
                yield first[:size]
                waiting.appendleft(first[size:])
                continue
            seen, taken, room = [first], [True], size - len(first)
            while room and taken.count(False) < WINDOW:
                group = waiting.popleft() if waiting else next(upcoming, None)
                if group is None:
                    break
                seen.append(group)
                taken.append(len(group) <= room)
                room -= len(group) if taken[-1] else 0
            if room and not all(taken):
                others = _summing_up([len(group) for group in seen[1:]], size - len(first))
                taken, room = (taken, room) if others is None else ([True, *others], 0)
            step = [group for group, is_in in zip(seen, taken, strict=True) if is_in]
            passed = [group for group, is_in in zip(seen, taken, strict=True) if not is_in]
            if room and passed:
                step.append(passed[0][:room])
                passed[0] = passed[0][room:]
            yield np.concatenate(step)
            waiting.extendleft(reversed(passed))


def _summing_up(sizes: Sequence[int], total: int) -> list[bool] | None:
    """Which of the sizes, earlier ones where there is a choice, sum up to exactly `total`; None if none do."""
    sums = [1]  # bit n of the i-th number: some of the first i sizes sum up to n
    for size in sizes:
        sums.append((sums[-1] | sums[-1] << size) & ((2 << total) - 1))
    if not sums[-1] >> total & 1:
        return None
    taken = []
    for size, without in zip(reversed(sizes), reversed(sums[:-1]), strict=True):
        taken.append(not without >> total & 1)
        total -= size if taken[-1] else 0
    return taken[::-1]


class StepSampler(Sampler[list[int]]):
    """Indices of the pairs of each optimizer step for one process.

    A step has exactly `pairs_per_step * processes` pairs (the last one of an epoch the remaining ones). The order
    depends only on seed, epoch and that number: not on how many processes share it, nor on where a resumed run starts.
    Resuming in the middle of an epoch skips indices and reads nothing.
    """

    def __init__(
        self, dataset: PairDataset, pairs_per_step: int, *, seed: int, grouped: bool, rank: int = 0, processes: int = 1
    ) -> None:
        self.dataset, self.pairs_per_step, self.seed, self.grouped = dataset, pairs_per_step, seed, grouped
        self.rank, self.processes = rank, processes
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch for the order of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / (self.pairs_per_step * self.processes))

    def of_one_process(self) -> StepSampler:
        """The same steps, each with the pairs of all processes."""
        size = self.pairs_per_step * self.processes
        return StepSampler(self.dataset, size, seed=self.seed, grouped=self.grouped)

    def read_by(self, first: int, last: int) -> NDArray[np.int64]:
        """Indices, ascending, of the pairs that this process reads in steps `first` to `last` - 1 of training.

        Step numbers continue over the epochs. Changes the epoch.
        """
        read = np.zeros(len(self.dataset), bool)
        for epoch in range(first // len(self), math.ceil(last / len(self))):
            self.set_epoch(epoch)
            before = epoch * len(self)
            for step in itertools.islice(self, max(first - before, 0), last - before):
                read[step] = True
            if read.all():
                break
        return np.flatnonzero(read)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        size = self.pairs_per_step * self.processes
        groups = self.dataset.groups if self.grouped else Groups(np.arange(len(self.dataset), dtype=np.uint64))
        for step in groups.steps(torch.randperm(len(groups), generator=numbers).numpy(), size):
            bounds = _balanced(self.dataset.tokens[step], self.processes)
            yield step[bounds[self.rank] : bounds[self.rank + 1]].tolist()


def _balanced(tokens: NDArray[np.int32], parts: int) -> list[int]:
    """Bounds that split consecutive pairs into parts with about equally many tokens: processes wait for each other."""
    ends = np.cumsum(tokens, dtype=np.int64)
    inner = np.searchsorted(ends - tokens / 2, ends[-1] * np.arange(1, parts) / parts)
    return [0, *inner.tolist(), len(tokens)]


def split_evenly(count: int, parts: int) -> list[range]:
    """`count` consecutive indices in `parts` ranges whose lengths differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


class StepLoader(DataLoader[TrainingPair]):
    """Whole optimizer steps: each item is the list of this process's pairs."""

    def __init__(self, sampler: StepSampler) -> None:
        super().__init__(sampler.dataset, batch_sampler=sampler, collate_fn=list)
        self._steps = sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer, on the loader if nothing is skipped, else on the sampler."""
        self._steps.set_epoch(epoch)
