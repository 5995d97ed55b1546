"""Pairs in the order of a number, the lowest first: those whose sides may be exchanged come early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from regretless.analysis.first_step import Reference, usable, values_at_start
from regretless.core.errors import ConfigError
from regretless.data.columns import Pair
from regretless.data.rows import pair_row
from regretless.data.tokenization import TokenizedPair
from regretless.objectives import Objective

SCORE = "score"
"""The difference of the sides' scores, as a name to sort by."""
SETTING = "inspect.sort"
Ordered = list[tuple[float | None, TokenizedPair]]
"""Pairs, each with the number that they are sorted by, if there is one."""


def in_order_of_column(name: str, pairs: Sequence[TokenizedPair]) -> Ordered:
    """Pairs in the order of a column of numbers, or of `score`, without those that have none there.

    Raises ConfigError if no pair has one.
    """
    values = [(value, pair) for pair in pairs if (value := _number(pair.row, name)) is not None]
    if not values:
        row = {} if pairs[0].row is None else pair_row(pairs[0].row)
        columns = ", ".join(column for column, value in row.items() if isinstance(value, int | float))
        raise ConfigError(
            f"{SETTING}: no pair has a number {name}; expected {SCORE}, if both sides have one, an objective, or a "
            f"column of numbers ({columns or 'the data have none'})"
        )
    return [*sorted(values, key=lambda item: item[0])]


def _number(row: Pair | None, name: str) -> float | None:
    if row is None:
        return None
    if name != SCORE:
        value = pair_row(row).get(name)
        return value if isinstance(value, int | float) else None
    scores = [side.score for side in row.sides.values() if side.score is not None]
    return scores[0] - scores[1] if len(scores) == 2 else None


def in_order_of_margin(
    name: str,
    objectives: Mapping[str, Objective],
    pairs: Sequence[TokenizedPair],
    reference: Reference,
    ends_step: Callable[[int], bool],
) -> Ordered:
    """Pairs in the order of their margins (nats) at the start of training with an objective.

    objectives: those that are inspected, by label. Raises ConfigError if it is none of them, or its margins are all
    zero.
    """
    objective = next((one for one in objectives.values() if one.name == name), None)
    if objective is None or not pairs:
        remedy = "set inspect.sample, so that a model is loaded" if objective else "name it in inspect.objectives"
        raise ConfigError(f"{SETTING}: {name} has no margins here; {remedy}")
    able = usable(objective, pairs)
    _, rewards = values_at_start(objective, able, reference, ends_step)
    if rewards is None or not (margins := rewards[:, 0] - rewards[:, 1]).any():
        raise ConfigError(
            f"{SETTING}: {name} gives no pair a margin before training, where the policy is the reference; sort by "
            f"{SCORE}, or by an objective that reads no reference, such as simpo"
        )
    return sorted(zip(margins.tolist(), able, strict=True), key=lambda item: item[0])
