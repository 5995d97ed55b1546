"""Stored log-probabilities of the behaviour policy, against the reference and against a re-score by their author."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regretless.analysis.first_step import Reference, spread
from regretless.core.errors import ConfigError
from regretless.data.records import SIDES, Pair, SideName
from regretless.data.tokenization import TokenizedPair, encode_prompt
from regretless.modeling.layout import Ids
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.scoring import score_responses

FAR = 0.1
"""Difference (nats) of two log-probabilities of one token from which on they count as different."""
UNKNOWN = "unknown model"


@dataclass(frozen=True)
class Labelled:
    """A distinct response with behaviour log-probabilities."""

    side: SideName
    prompt_ids: Ids
    ids: Ids
    logps: tuple[float, ...]
    row: Pair
    """A pair that it stands in."""

    @property
    def model(self) -> str | None:
        """Name of the model that generated it."""
        return self.row.sides[self.side].model


def labelled(pairs: Sequence[tuple[TokenizedPair, Pair]]) -> list[Labelled]:
    """Distinct responses, side by side, that have behaviour log-probabilities."""
    found: dict[tuple[Any, ...], Labelled] = {}
    for pair, row in pairs:
        # A masked response is the beginning of one that is there already.
        sides = pair.sides if pair.kind == "original" else (pair.chosen,)
        for name, side in zip(SIDES, sides, strict=False):
            if side.logps is not None:
                response = Labelled(name, pair.prompt_ids, side.ids, side.logps, row)
                found.setdefault((name, pair.prompt_ids, side.ids, side.logps), response)
    return list(found.values())


def gap(responses: Sequence[Labelled], reference: Reference) -> dict[str, Any]:
    """Behaviour minus reference log-probability of each token (nats), by side."""
    found: dict[str, Any] = {}
    for side in ("chosen", "rejected"):
        own = [response for response in responses if response.side == side]
        behavior = _joined([response.logps for response in own])
        scored = _joined([reference[response.prompt_ids, response.ids] for response in own])
        found[side] = {
            "responses": len(own),
            "tokens": behavior.size,
            # Models are hardly ever this certain: many are the sign of padding that was recorded as tokens.
            "share_of_exact_zeros": float(np.mean(behavior == 0)) if own else None,
            "nats_per_token": spread(behavior - scored),
        }
    return found


def rescored(
    responses: Sequence[Labelled], behavior: ModelConfig | None, fingerprint: str
) -> dict[str, dict[str, Any]]:
    """Stored minus re-scored log-probability of each token (nats), by the model that wrote the responses.

    behavior: the model that wrote all of them, wherever it lies now; else each is loaded by the name it was recorded
    under, and responses without one are only counted. fingerprint: of the tokenizer that the token ids belong to.
    Raises ConfigError for a model with another vocabulary, and for one `behavior` next to several recorded names.
    """
    named: dict[str | None, list[Labelled]] = {}
    for response in responses:
        named.setdefault(response.model, []).append(response)
    if behavior is not None and len(named.keys() - {None}) > 1:
        raise ConfigError(
            f"inspect.behavior: the responses were written by several models ({', '.join(sorted(map(str, named)))}); "
            "leave it out, so that each is loaded by its name"
        )
    if behavior is not None:
        return {behavior.label: _difference(responses, behavior, fingerprint)} if responses else {}
    return {
        name or UNKNOWN: {"responses": len(own)}
        if name is None
        else _difference(own, ModelConfig(name_or_path=name), fingerprint)
        for name, own in named.items()
    }


def _difference(responses: Sequence[Labelled], model: ModelConfig, fingerprint: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(model)
    if tokenizer_fingerprint(tokenizer) != fingerprint:
        raise ConfigError(f"inspect.rescore: {model.label} has another vocabulary than the token ids of its responses")
    # What it was given then, where that is recorded; else what its own chat template makes of the prompt.
    rows = [response.row for response in responses]
    items = [
        (row.prompt_token_ids or encode_prompt(tokenizer, row.prompt, row.chat_template_kwargs), response.ids)
        for row, response in zip(rows, responses, strict=True)
    ]
    scored = score_responses(load_model(model), items, description=f"re-score: {model.label}"[:28])
    difference = _joined([response.logps for response in responses]) - _joined(scored)
    distance = np.abs(difference)
    return {
        "responses": len(responses),
        "tokens": difference.size,
        "mean": float(difference.mean()),
        "mean_distance": float(distance.mean()),
        "q95_distance": float(np.quantile(distance, 0.95)),
        "max_distance": float(distance.max()),
        "share_far": float(np.mean(distance > FAR)),
    }


def _joined(parts: Sequence[Any]) -> Any:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts]) if parts else np.empty(0)
