"""Choice between shared-prefix and plain rows for a model; plain ones come with a note."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.core.terminal import print_note
from regretless.modeling.forward import causal_model
from regretless.modeling.layout import Item, token_count
from regretless.modeling.model_check import CANNOT_SHARE, check_grouped, longest_sequence, place_of
from regretless.modeling.plain_check import check_plain
from regretless.modeling.rows import RowChoice, RowKind

_refused: WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], tuple[int, str]]] = WeakKeyDictionary()
"""Length from which a model cannot share rows and why, keyed by device and precision."""
_noted: WeakSet[PreTrainedModel] = WeakSet()


def choose_rows(model: nn.Module, longest: int | None = None, rows: RowChoice = "auto") -> RowKind:
    """The rows to compute a model in; sequences have at most `longest` tokens (None: as many as its context).

    `auto`: grouped if `check_grouped` finds that correct, else plain if `check_plain` does. A choice by name is only
    checked. The answer is remembered with the model. Raises ConfigError, with the reasons, if neither is correct, and
    for sequences that are longer than the model's position embeddings.
    """
    _check_positions(causal_model(model), longest)
    if rows == "plain":
        check_plain(model, longest)
        return "plain"
    if rows == "grouped":
        check_grouped(model, longest)
        return "grouped"
    inner = causal_model(model)
    length, setting = longest_sequence(inner, longest), place_of(model, inner)
    refused = _refused.setdefault(inner, {})
    if setting not in refused or length < refused[setting][0]:
        try:
            check_grouped(model, longest)
        except ConfigError as error:
            refused[setting] = length, str(error)
        else:
            return "grouped"
    try:
        check_plain(model, longest)
    except ConfigError as error:
        raise ConfigError(f"{refused[setting][1]}. Nor one by one: {error}") from error
    return "plain"


def _check_positions(model: PreTrainedModel, longest: int | None) -> None:
    """Raise ConfigError for tokens that a model with learned positions (GPT-2, OPT) has no embedding of."""
    count = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    # A response's last token is not read.
    if longest is None or count is None or longest - 1 <= count:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and any(part in name for part in ("wpe", "position")):
            raise ConfigError(
                f"{type(model).__name__} has embeddings of {count:,} positions, and the longest prompt with a response "
                f"has {longest:,} tokens; set max_length to {count}"
            )


def why_not_grouped(model: nn.Module) -> str:
    """Why the model cannot share rows, as `choose_rows` found it; empty if it can, or has not been checked."""
    reasons = [reason for _, reason in _refused.get(causal_model(model), {}).values()]
    return reasons[-1].partition(CANNOT_SHARE)[2] if reasons else ""


def note_plain_rows(model: nn.Module, computed: int, items: Sequence[Item]) -> None:
    """Print, once for each model, why it is computed in plain rows, and what that costs for these items.

    computed: tokens of their plain rows, padding included.
    """
    inner, why = causal_model(model), why_not_grouped(model)
    if inner in _noted or not why:
        return
    _noted.add(inner)
    shared = token_count(items)
    print_note(
        f"note: {type(inner).__name__}: each sequence is computed in a row of its own, because rows cannot be shared: "
        f"{why}. Results are the same; {computed:,} tokens are computed instead of {shared:,} "
        f"({computed / shared:.1f} times as many)"
    )
