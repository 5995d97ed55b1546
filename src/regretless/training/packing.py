"""Packs an optimizer step's pairs into as few rows as their lengths allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from regretless.modeling.layout import Ids, Item, by_prompt, token_count
from regretless.modeling.output_layer import decoder_of
from regretless.modeling.prefix_tree import hosts, prefix_tree
from regretless.modeling.rows import RowKind, computed_tokens, row_length, sequences
from regretless.modeling.scoring import fill_rows

T = TypeVar("T")
COST_WITH_GRADIENT = 2
"""Forward passes that a token with gradient costs: its own, and the backward pass (two if all weights are trained)."""
MOST_CPU, MOST_GPU = 4096, 16384
"""Tokens of a micro-batch at most, if nothing is set: of one prompt on a CPU, of any number of them on a GPU."""
FILLED = (1024, 2048)
"""Tokens of a micro-batch of several prompts on a CPU, if nothing is set: of wide layers and of narrow ones."""
WORK = 4 * 10**8
"""Multiply-adds of a layer's products in a row: with so many, PyTorch's own time per operation does not matter."""


def most_tokens(device: torch.device) -> int:
    """Tokens of a micro-batch at most on a device, if nothing is set."""
    return MOST_GPU if device.type == "cuda" else MOST_CPU


def filled_tokens(model: PreTrainedModel, device: torch.device) -> int:
    """Tokens up to which micro-batches of several prompts are filled on a device, if nothing is set.

    On CPUs, larger ones are not faster and need more memory, as soon as a layer's matrix products take much longer than
    PyTorch's calls.
    """
    if device.type == "cuda":
        return MOST_GPU
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
    weights = decoder_of(model).num_parameters(exclude_embeddings=True) // max(1, layers)
    least, most = FILLED
    return min(most, max(least, WORK // max(1, weights)))


def pack_rows(
    units: Sequence[Sequence[Item]], max_tokens: int, kind: RowKind = "grouped", filled: int | None = None
) -> list[list[int]]:
    """Split units (the responses of one pair each) into micro-batches of at most `max_tokens` distinct tokens.

    Those of several prompts, and all of plain rows, have at most `filled` tokens (by default `max_tokens`).
    Neighboring units of one prompt stay together if they fit. Else they become one micro-batch, whose responses
    `cut_rows` spreads over rows, or several, each with some of the units and all of their responses: whichever costs
    less. The longest are placed first, each in the first micro-batch with enough space. Plain rows are computed
    together by length, so that few are padded. Returns the units' indices by micro-batch.
    """
    filled = min(max_tokens, filled or max_tokens)
    if kind == "plain":
        order = sorted(range(len(units)), key=lambda index: -max(map(row_length, units[index])))
        packed = fill_rows([units[index] for index in order], filled, kind)
        return [[order[number] for number in row] for row in packed]
    pieces: list[tuple[int, list[int]]] = []
    for _, run in groupby(range(len(units)), key=lambda index: units[index][0][0]):
        # Units of one prompt: one micro-batch if they fit.
        together = list(run)
        items = list(dict.fromkeys(item for index in together for item in units[index]))
        size = token_count(items)
        parts = [(size, together)]
        if size > max_tokens:
            # Else several, each with all responses of its units. Pairs of one chosen response come together.
            order_of = {item: number for number, item in enumerate(items)}
            order = sorted(together, key=lambda index: order_of[units[index][0]])
            rows = [[order[number] for number in row] for row in fill_rows([units[i] for i in order], max_tokens)]
            apart = [(token_count([item for index in row for item in units[index]]), row) for row in rows]
            # Or one whose responses are spread over rows.
            cut = [token_count(row) for row in cut_rows(items, max_tokens)]
            # All rows but the first are computed without gradient before (`training.passes`).
            cost = COST_WITH_GRADIENT * sum(cut) + sum(cut[1:])
            limit = max(max_tokens, cut[0])
            fits = all(used <= limit for used, _ in apart)
            if fits and COST_WITH_GRADIENT * sum(used for used, _ in apart) <= cost:
                parts = apart
        pieces += parts
    return [row for _, row in _first_fit(pieces, filled)]


def cut_rows(items: Sequence[Item], max_tokens: int, kind: RowKind = "grouped") -> list[list[Item]]:
    """Split responses into rows of at most `max_tokens` distinct tokens, the largest row first.

    Each distinct response is in one row, together with those that are a beginning of it. The responses to a prompt
    share a row if they fit, and so do those that share a beginning; every row computes its prompts and beginnings. A
    row is larger if one prompt with one response is. Plain rows are split into groups of rows that together have so
    many tokens, by length.
    """
    distinct = list(dict.fromkeys(items))
    if kind == "plain":
        return _cut_plain_rows(distinct, max_tokens)
    if token_count(distinct) <= max_tokens:
        return [distinct]
    pieces: list[tuple[int, list[Item]]] = []
    for prompt, responses in by_prompt(distinct).items():
        space = max_tokens - len(prompt)
        pieces += [(len(prompt) + used, row) for used, row in _first_fit(_parts(prompt, responses, space), space)]
    rows = sorted(_first_fit(pieces, max_tokens), key=lambda row: -row[0])
    return [row for _, row in rows]


def _parts(prompt: Ids, responses: Sequence[Ids], space: int) -> list[tuple[int, list[Item]]]:
    """Responses to a prompt that belong in one row, with their tokens: those that share a beginning, if they fit."""
    host = hosts(responses)
    whole: dict[Ids, list[Item]] = defaultdict(list)
    for response in responses:
        whole[host[response]].append((prompt, response))
    branches = prefix_tree(list(whole))
    parts: list[list[tuple[int, list[Item]]]] = [[] for _ in branches]
    top: list[tuple[int, list[Item]]] = []
    # From the last branch to the first: what continues a branch comes before it.
    for number, branch in reversed([*enumerate(branches)]):
        ends = [(0, whole[branch.response])] if branch.is_end else _first_fit(parts[number], space - branch.stop)
        pieces = [(branch.stop - branch.start + used, row) for used, row in ends]
        (top if branch.parent is None else parts[branch.parent])[:0] = pieces
    return top


def _cut_plain_rows(distinct: list[Item], max_tokens: int) -> list[list[Item]]:
    if computed_tokens(distinct, "plain") <= max_tokens:
        return [distinct]
    together: dict[Item, list[Item]] = defaultdict(list)
    for item, host in sequences(distinct).items():
        together[host].append(item)
    units = [together[host] for host in sorted(together, key=row_length, reverse=True)]
    cut = [[item for index in row for item in units[index]] for row in fill_rows(units, max_tokens, "plain")]
    return sorted(cut, key=lambda row: -computed_tokens(row, "plain"))


def _first_fit(pieces: Sequence[tuple[int, list[T]]], space: int) -> list[tuple[int, list[T]]]:
    """Pieces (size, members) joined into rows of at most `space`: longest first, each in the first row it fits in."""
    rows: list[tuple[int, list[T]]] = []
    for size, piece in sorted(pieces, key=lambda entry: -entry[0]):
        fitting = next((number for number, (used, _) in enumerate(rows) if used + size <= space), None)
        if fitting is None:
            rows.append((size, piece))
        else:
            used, row = rows[fitting]
            rows[fitting] = (used + size, row + piece)
    return rows
