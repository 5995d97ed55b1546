"""Plain rows: a padded row for each sequence, for models that cannot compute shared-prefix rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from regretless.modeling.layout import Ids, Item, Layout, by_prompt, is_context, lay_out, own_ids, read_ids, token_count
from regretless.modeling.prefix_tree import hosts

RowKind = Literal["grouped", "plain"]
"""`grouped`: one row, every prompt, beginning and response once. `plain`: a row for each prompt with a response."""
RowChoice = Literal["auto", "grouped", "plain"]
"""`auto`: grouped where that is correct for the model, else plain."""


def lay_out_rows(items: Sequence[Item], rows: RowKind) -> tuple[Layout, list[Tensor]]:
    """Rows of a kind for (prompt, response) token pairs, and the index of each item's own tokens among the predicted.

    Raises ValueError for an empty prompt or response.
    """
    return lay_out(items) if rows == "grouped" else _lay_out_plain(items)


def computed_tokens(items: Sequence[Item], rows: RowKind) -> int:
    """Tokens that rows of a kind have for these items, padding included (grouped: an upper bound)."""
    if rows == "grouped":
        return token_count(items)
    distinct = set(sequences(items).values())
    return len(distinct) * max(map(row_length, distinct), default=0)


def _lay_out_plain(items: Sequence[Item]) -> tuple[Layout, list[Tensor]]:
    """One row for each distinct prompt with a response; responses that begin another one need none of their own."""
    if not all(prompt and own_ids(response) for prompt, response in items):
        raise ValueError("expected at least one prompt token and one response token that is not context")
    host = sequences(items)
    distinct = list(dict.fromkeys(host.values()))
    longest = max(map(row_length, distinct))
    ids: list[Ids] = []
    predict: list[int] = []
    targets: list[int] = []
    starts: dict[Item, int] = {}
    for number, (prompt, response) in enumerate(distinct):
        row = prompt + read_ids(response[:-1])
        starts[prompt, response] = len(targets)
        first = number * longest + len(prompt) - 1
        predict.extend(first + offset for offset, token in enumerate(response) if not is_context(token))
        targets.extend(own_ids(response))
        # Padding may be any token, for no token before it sees it; some models treat an id of their own differently.
        ids.append(row + row[-1:] * (longest - len(row)))
    layout = Layout(
        input_ids=torch.tensor(ids),
        position_ids=torch.arange(longest)[None],
        segments=(),
        predict=torch.tensor(predict),
        targets=torch.tensor(targets),
        lengths=tuple(map(row_length, distinct)),
    )
    return layout, [starts[host[item]] + torch.arange(len(own_ids(item[1]))) for item in items]


def row_length(item: Item) -> int:
    """Tokens of an item's plain row: a response's last token is predicted and never read."""
    return len(item[0]) + len(item[1]) - 1


def sequences(items: Sequence[Item]) -> dict[Item, Item]:
    """For each distinct item the one whose row it is in: the longest response to its prompt that begins with it."""
    rows: dict[Item, Item] = {}
    for prompt, responses in by_prompt(items).items():
        host = hosts(responses)
        for response in responses:
            rows[prompt, response] = prompt, host[response]
    return rows
