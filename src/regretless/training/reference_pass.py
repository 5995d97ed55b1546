"""Which pairs a training reads, and the log-probabilities of the reference that they still lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers import TrainingArguments

from regretless.core.errors import ConfigError
from regretless.modeling.layout import Item
from regretless.training.data import PairDataset, StepSampler
from regretless.training.reference import ReferenceLogps, Scorer


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs whose responses need log-probabilities of the reference."""

    data: PairDataset
    numbers: NDArray[np.int64] | None = None
    """Indices of the pairs; None for all."""
    superset: NDArray[np.int64] | None = None
    """Indices of these pairs and more: where those are complete, so are these."""
    with_rejected: bool = True
    """Whether the rejected responses are among them."""

    def items(self) -> Iterator[Item]:
        """The responses with their prompts. Pairs of a prompt are adjacent, so that they share a computation."""
        members = self.data.groups.members
        for index in (members if self.numbers is None else members[np.isin(members, self.numbers)]).tolist():
            pair = self.data[index]
            yield from pair.items(rejected=self.with_rejected)
            yield from pair.mismatched_items()

    def mark(self, numbers: NDArray[np.int64] | None) -> str | None:
        """Identity of these pairs of the data, if their table is cached under one."""
        key, data = self.data.key, self.data
        if key is None:
            return None
        part = "" if numbers is None or len(numbers) == len(data) else f"-{xxhash.xxh3_64_hexdigest(numbers.tobytes())}"
        return f"{key}{part}{'' if self.with_rejected else '-chosen'}"


def fill(
    values: ReferenceLogps, pairs: ScoredPairs, score: Scorer, *, is_lost: bool, writes: bool, wait: Callable[[], None]
) -> None:
    """Compute what is missing for the pairs; of several processes one `writes`, and all `wait` for it.

    is_lost: whether the reference cannot be computed any more. Raises ConfigError if it is needed then.
    """
    # Complete data are not read again: a resumed run starts where it was.
    mark = pairs.mark(pairs.numbers)
    marks = [mark, pairs.mark(pairs.superset), pairs.mark(None)]
    if any(each is not None and values.covers(each) for each in marks):
        return
    if is_lost and next(values.missing(pairs.items()), None) is not None:
        raise ConfigError(
            "the reference is the model as it was before training, and these data came after it: pass them to the "
            "trainer at construction, and call prepare_reference() before training if it reads more of them later; "
            "or pass ref_model"
        )
    values.compute(pairs.items(), score, writes=writes, wait=wait)
    if mark is not None:
        values.mark(mark, writes=writes)


def pairs_read(
    steps: StepSampler, args: TrainingArguments, done: int, processes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the pairs that a training reads, from its beginning and behind `done` steps, to its end.

    steps: those of all processes together.
    """
    last = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(steps))
    # Without skipping, a resumed run starts with the first step of its epoch.
    first = done - done % len(steps) if args.ignore_data_skip else done
    superset, numbers = steps.read_by(0, last), steps.read_by(first, first + last - done)
    if processes > 1:
        # What a process without pairs computes in an epoch's last step.
        superset, numbers = np.union1d(superset, [0]), np.union1d(numbers, [0])
    return superset, numbers
