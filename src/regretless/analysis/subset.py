"""Random sample of pairs by whole prompts, and scores of its responses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from regretless.core.intervals import mean_by_prompt
from regretless.data.columns import SIDES, SideName
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.layout import Item
from regretless.modeling.load import ModelConfig, load_model
from regretless.modeling.scoring import score_responses

T = TypeVar("T")
Scores = Mapping[Item, NDArray[np.float32]]
"""Log-probability (nats) of each response token."""


def whole_prompts(rows: Sequence[T], count: int | None, seed: int, prompt_of: Callable[[T], Hashable]) -> list[T]:
    """All rows of random prompts until there are `count` rows or more; all rows for None.

    Of a prompt with more than `count` rows, `count` random ones.
    """
    if count is None or count >= len(rows):
        return list(rows)
    groups: dict[Hashable, list[T]] = {}
    for row in rows:
        groups.setdefault(prompt_of(row), []).append(row)
    order = list(groups.values())
    random = Random(seed)
    random.shuffle(order)
    selected: list[T] = []
    for group in order:
        if len(selected) >= count:
            break
        selected.extend(group if len(group) <= count else random.sample(group, count))
    return selected


@dataclass(frozen=True)
class Sample:
    """Pairs, and their distinct responses by side."""

    pairs: Sequence[TokenizedPair]

    def items(self, side: SideName) -> list[Item]:
        """Distinct (prompt, response) of one side, in the order of the pairs."""
        responses = [(pair.prompt_ids, pair.sides[SIDES.index(side)].ids) for pair in self.pairs]
        return list(dict.fromkeys(responses))

    def score(self, model: ModelConfig, label: str, others: Iterable[Item] = ()) -> Scores:
        """Token log-probabilities of all responses under a model, which is loaded for this and then released.

        others: responses that are scored too, as those with what is stored behind their cuts.
        """
        items = list(dict.fromkeys([*(item for pair in self.pairs for item in pair.items), *others]))
        values = score_responses(load_model(model), items, description=f"analyze: {label}"[:28])
        return dict(zip(items, values, strict=True))

    def mean(
        self, totals: Callable[[Item], float], counts: Callable[[Item], float], *sides: SideName
    ) -> dict[str, object]:
        """Σ `totals` / Σ `counts` over the distinct responses of the sides (`mean_by_prompt`)."""
        items = list(dict.fromkeys(item for side in sides for item in self.items(side)))
        return dict(mean_by_prompt([*map(totals, items)], [*map(counts, items)], [prompt for prompt, _ in items]))
