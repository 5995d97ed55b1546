"""Token rewards as the page's explorer reads them: what the analysis found, without what a browser can work out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regretless.reporting.token_figures import SHADE_QUANTILE
from regretless.reporting.views import cut

DIGITS = 4
"""Decimals of the log-probabilities on the page (nats)."""
LABEL = 60
"""Characters of a prompt in the list of pairs."""


def explorer(content: Mapping[str, Any], folder: str, *, pairs: int, tokens: int) -> dict[str, Any]:
    """Data of up to `pairs` pairs and `tokens` tokens of each response.

    content: token_rewards.json. Log-probabilities are in nats, one list a model in the order of `models`; the terms of
    reward and regret are left to the page, which also takes them between two trained models. `folder` is cut from
    the reference's name.
    """
    shown = content["pairs"][:pairs]
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
            for pair in shown
        ],
        "hidden": len(content["pairs"]) - len(shown),
    }


def _response(response: Mapping[str, Any], limit: int) -> dict[str, Any]:
    behavior = response["behavior"]
    return {
        "side": response["side"],
        # A special token, or a part of a character, has no text of its own: its name stands for it.
        "tokens": [
            text or name for text, name in zip(response["tokens"][:limit], response["names"][:limit], strict=True)
        ],
        "special": [place for place, text in enumerate(response["tokens"][:limit]) if not text],
        "hidden": max(0, len(response["tokens"]) - limit),
        "reference": _rounded(response["reference"][:limit]),
        "behavior": None if behavior is None else _rounded(behavior[:limit]),
        "weights": _rounded(response["weights"][:limit]),
        "logps": [_rounded(scores["logps"][:limit]) for scores in response["policies"].values()],
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Role and text of each message; a prompt that is a text has no role."""
    messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": message["role"], "content": cut(message["content"])} for message in messages]


def _label(prompt: Any) -> str:
    text = " ".join((prompt if isinstance(prompt, str) else prompt[-1]["content"]).split())
    return text if len(text) <= LABEL else f"{text[:LABEL]}…"
