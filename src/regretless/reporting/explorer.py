"""Token rewards as input of the page's explorer: the analysis results without what the browser can compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from regretless.data.messages import full_text
from regretless.data.regret_table import READINGS
from regretless.reporting.collect import main_model, measure_of
from regretless.reporting.views import cut

DIGITS = 4
"""Decimal places of log-probabilities on the page (nats)."""
SHADE_QUANTILE = 0.98
"""Quantile of the sizes that gets the full shade: with the largest, a few extremes would leave all else pale."""
MEASURED = ("regret", "regret_low", "regret_high", "local", "future")
"""Numbers of a measured unit, behind its first token and the one after its last; behind them, for each model, what the
methods of `READINGS` read into it."""
LABEL_LENGTH = 60
"""Characters of a prompt's label in the list of pairs."""


def explorer(
    content: Mapping[str, Any], folder: str, objectives: Mapping[str, str], *, pairs: int, tokens: int
) -> dict[str, Any]:
    """Data of at most `pairs` pairs and `tokens` tokens per response, and what the explorer opens on.

    content: token_rewards.json. Log-probabilities are in nats, one list per model in the order of `models`. The page
    computes the terms of reward and regret, also between two trained models. `folder` is removed from the reference's
    name. objectives: what each model was trained with, by its name.
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
        "opening": _opening(content, included, objectives),
    }


def _opening(
    content: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]], objectives: Mapping[str, str]
) -> dict[str, Any]:
    """Model, measure and pair to open on: the run's own method, where its values tell the responses apart most.

    The pair is the one with the largest mean value per token of the chosen response minus that of the rejected one;
    masked pairs, whose responses share their tokens, count only where there are no others. Where no pair has the
    measure, because the behavior policy is unknown, it is the reward.
    """
    models = list(content["policies"])
    main = main_model(models, objectives)
    if main is None:
        return {"policy": 0, "measure": "reward", "pair": 0}
    candidates = [index for index, pair in enumerate(pairs) if pair["kind"] != "masked"] or range(len(pairs))
    leads: dict[int, float] = {}
    for measure in dict.fromkeys((measure_of(main, objectives), "reward")):
        for index in candidates:
            chosen, rejected = (
                _mean(response, main, measure, content["beta"]) for response in pairs[index]["responses"]
            )
            if chosen is not None and rejected is not None:
                leads[index] = chosen - rejected
        if leads:
            break
    return {"policy": models.index(main), "measure": measure, "pair": max(leads, key=leads.__getitem__, default=0)}


def _mean(response: Mapping[str, Any], model: str, measure: str, beta: float) -> float | None:
    """Mean value per token of a response, in nats; None where it is unknown."""
    scores = response["policies"][model]
    if measure == "det":
        far = (beta * weight * logp for weight, logp in zip(response["weights"], scores["logps"], strict=True))
        values = [local + later for local, later in zip(scores["reward"], far, strict=True)]
    else:
        values = scores[measure]
    return None if values is None else fmean(values)


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
        **_measured(response, limit),
        "logps": [_rounded(scores["logps"][:limit]) for scores in response["policies"].values()],
    }


def _measured(response: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The units whose regret was measured, as far as their tokens are shown; nothing for other responses."""
    if "measured" not in response:
        return {}
    units = [
        [
            *(unit["start"], unit["end"], *_rounded([unit[name] for name in MEASURED])),
            [
                [_known(read.get(method)) for method in READINGS]
                for read in (unit["policies"][name] for name in response["policies"])
            ],
        ]
        for unit in response["measured"]["units"]
        if unit["end"] <= limit
    ]
    return {"alpha": response["measured"]["alpha"], "units": units}


def _known(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, DIGITS) for value in values]


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Role and text of each message; a plain-text prompt has no role."""
    messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": message["role"], "content": cut(full_text(message))} for message in messages]


def _label(prompt: Any) -> str:
    text = " ".join((prompt if isinstance(prompt, str) else full_text(prompt[-1])).split())
    return text if len(text) <= LABEL_LENGTH else f"{text[:LABEL_LENGTH]}…"
