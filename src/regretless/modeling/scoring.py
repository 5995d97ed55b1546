"""Log-probabilities of fixed responses under a model; each distinct token is computed once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from regretless.core.terminal import bar
from regretless.modeling.forward import causal_model, grouped, response_scores
from regretless.modeling.layout import Ids, Item, lay_out, token_count
from regretless.modeling.model_check import check_grouped


def score_responses(
    model: nn.Module,
    items: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_tokens: int = 4096,
    description: str | None = None,
) -> list[NDArray[np.float32]]:
    """Log-probability (nats) of every token of each response, one float32 array per (prompt, response) pair of ids.

    No gradient, dropout off. Rows hold up to `max_tokens` tokens; a prompt's responses share a row if they fit.
    `description` labels a progress bar. Raises ValueError for an empty prompt or response, and ConfigError for a model
    that rows which share prompts would give other values for (`check_grouped`, at a model's first call).
    """
    keyed = [(tuple(prompt), tuple(response)) for prompt, response in items]
    if not keyed:
        return []
    check_grouped(model, max(len(prompt) + len(response) for prompt, response in keyed))
    order = sorted(range(len(keyed)), key=lambda index: keyed[index][0])
    results: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(keyed)
    device = causal_model(model).device
    training = model.training
    model.eval()
    shown = bar(description, len(keyed)) if description else contextlib.nullcontext(lambda _: None)
    try:
        with torch.no_grad(), grouped(model), shown as advance:
            for rows in fill_rows([[keyed[index]] for index in order], max_tokens):
                chosen = [order[row] for row in rows]
                layout, places = lay_out([keyed[index] for index in chosen])
                logps = response_scores(model, layout.to(device)).logps.float().cpu().numpy()
                for index, place in zip(chosen, places, strict=True):
                    results[index] = logps[place.start : place.start + place.length].copy()
                advance(len(chosen))
    finally:
        model.train(training)
    return results


def fill_rows(units: Sequence[Sequence[Item]], max_tokens: int) -> list[list[int]]:
    """Split units (groups of responses), in order, into rows of at most `max_tokens` tokens.

    Neighboring units of one prompt share a row if all of them fit into one; a unit that is larger than a row
    gets a row of its own. Returns the units' indices, row by row.
    """
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
        for index in run:
            together = token_count([item for other in (*row, index) for item in units[other]])
            if row and together > max_tokens:
                rows.append(row)
                row, together = [], token_count(units[index])
            row.append(index)
            used = together
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
