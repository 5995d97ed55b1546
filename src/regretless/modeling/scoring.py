"""Log-probabilities of fixed responses under a model; each distinct token is computed once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regretless.core.progress import bar
from regretless.modeling.forward import causal_model, check_ids, in_rows, response_scores
from regretless.modeling.layout import Ids, Item, token_count
from regretless.modeling.prefix_tree import beginning
from regretless.modeling.row_choice import choose_rows, note_plain_rows
from regretless.modeling.rows import RowChoice, RowKind, computed_tokens, lay_out_rows, row_length, sequences


def score_responses(
    model: nn.Module,
    items: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_tokens: int = 4096,
    description: str | None = None,
    rows: RowChoice = "auto",
) -> list[NDArray[np.float32]]:
    """Log-probability (nats) of every token of each response, one float32 array per (prompt, response) pair of ids.

    No gradient, dropout off. Rows hold up to `max_tokens` tokens; a prompt's responses share a row if they fit, and
    each has a plain row of its own for a model in which they cannot, or with rows="plain" (`choose_rows`).
    `description` labels a progress bar. Raises ValueError for an empty prompt or response, and ConfigError for a model
    that would be given other values than its own (at its first call).
    """
    # Which items share a row.
    keyed = [(tuple(prompt), tuple(response)) for prompt, response in items]
    if not keyed:
        return []
    kind = choose_rows(model, max(len(prompt) + len(response) for prompt, response in keyed), rows)
    order = _scoring_order(keyed, kind)
    in_order = [[keyed[index]] for index in order]
    packed = [[order[number] for number in row] for row in fill_rows(in_order, max_tokens, kind)]
    if kind == "plain" and rows == "auto":
        computed = sum(computed_tokens([keyed[index] for index in row], kind) for row in packed)
        note_plain_rows(model, computed, keyed)

    # The model, row by row.
    results: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(keyed)
    device = causal_model(model).device
    training = model.training
    model.eval()
    shown = bar(description, len(keyed)) if description else contextlib.nullcontext(lambda *_: None)
    try:
        with torch.no_grad(), in_rows(model, kind), shown as advance:
            for chosen in packed:
                layout, indices = lay_out_rows([keyed[index] for index in chosen], kind)
                check_ids(model, layout)
                logps = response_scores(model, layout.to(device)).logps.float().cpu().numpy()
                for item, of_item in zip(chosen, indices, strict=True):
                    results[item] = logps[of_item.numpy()]
                advance(len(chosen))
    finally:
        model.train(training)
    return results


def _scoring_order(items: Sequence[Item], kind: RowKind) -> list[int]:
    """Items that share tokens next to each other; for plain rows the longest first, so that few are padded."""
    if kind == "grouped":
        first: dict[Item, int] = {}
        alike = [(prompt, beginning(response)) for prompt, response in items]
        for index, item in enumerate(alike):
            first.setdefault(item, index)
        # Backwards, so that a response comes before those that it begins with.
        order = sorted(range(len(items)), key=lambda index: items[index][1], reverse=True)
        return sorted(order, key=lambda index: (items[index][0], first[alike[index]]))
    host = sequences(items)
    return sorted(range(len(items)), key=lambda index: (-row_length(host[items[index]]), host[items[index]]))


def fill_rows(units: Sequence[Sequence[Item]], max_tokens: int, kind: RowKind = "grouped") -> list[list[int]]:
    """Split units (groups of responses), in order, into rows of at most `max_tokens` tokens.

    Neighboring units of one prompt share a row if all of them fit into one; a unit that is larger than a row
    gets a row of its own. Of plain rows, it is as many that together have so many tokens, padding included.
    Returns the units' indices, row by row.
    """
    if kind == "plain":
        return _fill_plain_rows(units, max_tokens)
    rows: list[list[int]] = []
    row: list[int] = []
    used = 0
    for run in _runs_of_one_prompt(units):
        cost = token_count([item for index in run for item in units[index]])
        if row and used + cost > max_tokens:
            rows.append(row)
            row, used = [], 0
        if cost <= max_tokens:
            row.extend(run)
            used += cost
            continue
        present: set[Item] = set()
        for index in run:
            if used <= max_tokens and present.issuperset(units[index]):
                row.append(index)
                continue
            together = token_count([item for other in (*row, index) for item in units[other]])
            if row and together > max_tokens:
                rows.append(row)
                row, together, present = [], token_count(units[index]), set()
            row.append(index)
            present.update(units[index])
            used = together
    return [*rows, row] if row else rows


def _fill_plain_rows(units: Sequence[Sequence[Item]], max_tokens: int) -> list[list[int]]:
    host = sequences([item for unit in units for item in unit])
    rows: list[list[int]] = []
    row: list[int] = []
    distinct: set[Item] = set()
    for index, unit in enumerate(units):
        more = distinct | {host[item] for item in unit}
        if row and len(more) * max(map(row_length, more)) > max_tokens:
            rows.append(row)
            row, more = [], {host[item] for item in unit}
        row.append(index)
        distinct = more
    return [*rows, row] if row else rows


def _runs_of_one_prompt(units: Sequence[Sequence[Item]]) -> list[list[int]]:
    runs: list[list[int]] = []
    previous: Ids | None = None
    for index, unit in enumerate(units):
        prompt = unit[0][0]
        if prompt == previous:
            runs[-1].append(index)
        else:
            runs.append([index])
        previous = prompt
    return runs
