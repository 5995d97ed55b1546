"""Token log-probabilities of other models in pairs, in place of those that were recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Pair, Side, SideName
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.modeling.scoring import score_responses

ANY = "*"
"""Key for the responses of all models that have no key of their own."""
_Key = tuple[str, str | None, tuple[int, ...]]
"""A prompt id, the fingerprint of a tokenizer, and the token ids of a response."""


def rescore(pairs: Sequence[Pair], models: Mapping[str, ModelConfig]) -> tuple[list[Pair], dict[str, Any]]:
    """Pairs whose token log-probabilities (nats) are those that `models` assign, and counts for each model.

    models: by the recorded name of the model that wrote the response, its last part (`writer` for `runs/x/writer`), or
    `*` for all others. Responses without a key keep what they have. Each distinct response is scored once.
    Raises ConfigError for a key that no response has and for a model with another vocabulary, DataError for responses
    without token ids.
    """
    keys = {side.model: _key(side.model, models) for pair in pairs for side in pair.sides.values()}
    if unknown := sorted(set(models) - set(keys.values())):
        raise ConfigError(
            f"pair.rescore: {', '.join(unknown)}: no paired response was written by a model of that name; "
            f"the responses name {', '.join(sorted(map(str, keys)))}"
        )
    # Score each distinct response once, one model after the other.
    logps: dict[_Key, list[float]] = {}
    counts: dict[str, Any] = {}
    for key, model in models.items():
        tokenizer = load_tokenizer(model)
        fingerprint = tokenizer_fingerprint(tokenizer)
        items: dict[_Key, tuple[list[int], tuple[int, ...]]] = {}
        for pair in pairs:
            for name, side in pair.sides.items():
                if keys[side.model] != key:
                    continue
                key_of_response = _response_key(pair, name, side)
                if pair.tokenizer_of(name) not in (None, fingerprint):
                    raise ConfigError(
                        f"pair.rescore.{key}: {model.label} has another vocabulary than the token ids of its responses"
                    )
                prompt = pair.prompt_token_ids or encode_prompt(tokenizer, pair.prompt, pair.chat_template_kwargs)
                items[key_of_response] = (prompt, key_of_response[2])
        scored = score_responses(load_model(model), list(items.values()), description=f"re-score: {key}"[:28])
        logps |= {key_of_response: values.tolist() for key_of_response, values in zip(items, scored, strict=True)}
        counts[key] = {
            "model": model.label,
            "responses": len(items),
            "nats_per_token": float(np.mean(np.concatenate(scored))),
        }

    # Put the new log-probabilities into the pairs.
    def changed(pair: Pair, name: SideName, side: Side) -> Side:
        if keys[side.model] is None:
            return side
        # Lists and continuations are of the distribution that the old log-probabilities belong to.
        new = logps[_response_key(pair, name, side)]
        return replace(side, logps=new, top_logps=None, top_logps_kind=None, continuations=None)

    return [
        replace(
            pair,
            chosen=changed(pair, "chosen", pair.chosen),
            rejected=pair.rejected and changed(pair, "rejected", pair.rejected),
            logps_kind="raw",
        )
        for pair in pairs
    ], counts


def _key(name: str | None, models: Mapping[str, ModelConfig]) -> str | None:
    """The key of `models` that stands for the responses of a model."""
    candidates = (name, name.rpartition("/")[2] if name else None, ANY)
    return next((key for key in candidates if key in models), None)


def _response_key(pair: Pair, name: SideName, side: Side) -> _Key:
    if side.token_ids is None:
        raise DataError(
            f"pair.rescore: response {side.id} has no token ids; sample it with an engine that records them"
        )
    return str(pair.prompt_id), pair.tokenizer_of(name), tuple(side.token_ids)
