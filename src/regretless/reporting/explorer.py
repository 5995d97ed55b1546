"""Token rewards as input of the page's explorer: the analysis results without what the browser can compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regretless.reporting.token_figures import SHADE_QUANTILE
from regretless.reporting.views import cut

DIGITS = 4
"""Decimal places of log-probabilities on the page (nats)."""
LABEL = 60
"""Characters of a prompt's label in the list of pairs."""


def explorer(content: Mapping[str, Any], folder: str, *, pairs: int, tokens: int) -> dict[str, Any]:
    """Data of at most `pairs` pairs and `tokens` tokens per response.

    content: token_rewards.json. Log-probabilities are in nats, one list per model in the order of `models`. The page
    computes the terms of reward and regret, also between two trained models. `folder` is removed from the reference's
    name.
    """
    included = content["pairs"][:pairs]
    return {
        "beta": content["beta"],
        "reference": content["reference"].removeprefix(folder),
        "models": list(content["policies"]),
        "shade_quantile": SHADE_QUANTILE,
        "pairs": [
            {
                "kind": pair["kind"],
                "label": _label(pair["prompt"]),
                "prompt": _messages(pair["prompt"]),
                "responses": [_response(response, tokens) for response in pair["responses"]],
            }
            for pair in included
        ],
        "hidden": len(content["pairs"]) - len(included),
    }


def _response(response: Mapping[str, Any], limit: int) -> dict[str, Any]:
    behavior = response["behavior"]
    return {
        "side": response["side"],
        # A special token, or a part of a character, has no text of its own: its name is displayed instead.
        "tokens": [
            text or name for text, name in zip(response["tokens"][:limit], response["names"][:limit], strict=True)
        ],
        "special": [index for index, text in enumerate(response["tokens"][:limit]) if not text],
        "hidden": max(0, len(response["tokens"]) - limit),
        "reference": _rounded(response["reference"][:limit]),
        "behavior": None if behavior is None else _rounded(behavior[:limit]),
        "weights": _rounded(response["weights"][:limit]),
        "logps": [_rounded(scores["logps"][:limit]) for scores in response["policies"].values()],
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Role and text of each message; a plain-text prompt has no role."""
    messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": message["role"], "content": cut(message["content"])} for message in messages]


def _label(prompt: Any) -> str:
    text = " ".join((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())
    return text if len(text) <= LABEL else f"{text[:LABEL]}…"
