"""What an OpenAI-compatible server says about the tokens it wrote, and what its log-probabilities mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from regretless.errors import ConfigError, ServerError
from regretless.records import LogpsKind
from regretless.sampling.engine import SamplingParams
from regretless.schema import logps_problem

Meaning = Literal["raw", "processed", "temperature"]
"""What log-probabilities follow: the model alone, everything that shapes the draw, or of that the temperature alone."""
PROBE_TEMPERATURE, PROBE_TOP_P = 2.0, 1e-6
"""So small a top-p leaves one token, however flat the distribution: a vocabulary of a million has one this likely."""
CERTAIN = -0.02
"""Nats; a first token more likely than this tells nothing: its log-probability is close to 0 in any case."""
CLOSE = 0.02
"""Nats and relative; servers that batch requests do not repeat a number exactly."""
ID_PREFIX = "token_id:"


@dataclass(frozen=True)
class Tokens:
    """The tokens of one answer."""

    strings: list[str] | None
    ids: list[int] | None
    logps: list[float] | None
    """Nats per token."""


def read_tokens(choice: Mapping[str, Any]) -> Tokens:
    """Tokens of an answer in any of the forms that servers use. Raises ServerError when they do not fit together."""
    try:
        strings, ids, logps = _parts(choice)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ServerError(f"log-probabilities in an unknown form: {choice.get('logprobs')!r:.200}") from None
    problem = logps_problem("logprobs", strings if ids is None else ids, logps)
    if problem is not None:
        raise ServerError(f"log-probabilities that the server gave cannot be used: {problem}")
    # As the local engine does: rounding can put a certain token a hair above 0.
    return Tokens(strings, ids, None if logps is None else [min(value, 0.0) for value in logps])


def _parts(choice: Mapping[str, Any]) -> tuple[list[str] | None, list[int] | None, list[float] | None]:
    """Token strings, ids and log-probabilities of an answer, as far as it has them."""
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content")
    ids = choice.get("token_ids")
    strings: list[str] | None
    logps: list[float] | None
    if isinstance(entries, list):
        strings = [str(entry["token"]) for entry in entries]
        logps = [entry["logprob"] for entry in entries]
        if ids is None and entries and all("id" in entry for entry in entries):
            ids = [entry["id"] for entry in entries]
    else:
        strings, logps = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if ids is None and strings and all(string.startswith(ID_PREFIX) for string in strings):
        ids = [int(string.removeprefix(ID_PREFIX)) for string in strings]
    return strings, ids, logps


def meaning_of(neutral: Sequence[float], shaped: Sequence[float]) -> Meaning | None:
    """What a server's log-probabilities follow, from the two likeliest first tokens of one prompt; None: unclear.

    neutral: (2,) nats at temperature 1 and nothing else. shaped: (2,) nats at PROBE_TEMPERATURE and PROBE_TOP_P. The
    cut leaves the likeliest token alone, with log-probability 0, where it counts; where only the temperature does, it
    divides the gap between the two.
    """
    if len(neutral) < 2 or not shaped or neutral[0] > CERTAIN:
        return None
    if shaped[0] > CERTAIN / 10:
        return "processed"
    gap = neutral[0] - neutral[1]
    if len(shaped) < 2 or gap < 10 * CLOSE:
        return None
    shaped_gap = shaped[0] - shaped[1]
    if _close(shaped_gap, gap) and _close(shaped[0], neutral[0]):
        return "raw"
    return "temperature" if _close(shaped_gap, gap / PROBE_TEMPERATURE) else None


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=CLOSE, abs_tol=CLOSE)


def likeliest(choice: Mapping[str, Any]) -> list[float]:
    """Log-probabilities (nats) of the likeliest first tokens of an answer, highest first; empty if it does not tell."""
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content")
    if isinstance(entries, list):
        values = [entry["logprob"] for entry in entries[0].get("top_logprobs") or ()] if entries else []
    else:
        first = (logprobs.get("top_logprobs") or [None])[0]
        values = list(first.values()) if isinstance(first, Mapping) else []
    return sorted((float(value) for value in values), reverse=True)


def kind_of(params: SamplingParams, said: Literal["raw", "processed"] | None, found: Meaning | None) -> LogpsKind:
    """Which distribution the log-probabilities of sampled tokens belong to, for the records.

    said: by the user. found: by asking the server. Raises ConfigError when it is not known, when the two contradict
    each other, and when the server's numbers belong to neither distribution.
    """
    if params.is_plain:
        return "raw"
    if found == "temperature":
        if params.top_p == 1 and params.top_k == 0 and params.repetition_penalty == 1:
            found = "processed"
        else:
            raise ConfigError(
                "server: its log-probabilities follow the temperature but not top-p, top-k and penalties, so they are "
                "neither the model's nor those of what is sampled; set top_p: 1, top_k: 0 and repetition_penalty: 1, "
                "or start the server so that it gives the model's own (SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)"
            )
    if said is not None and found is not None and said != found:
        raise ConfigError(
            f"server.logprobs_mode: {said}, but the server's log-probabilities are {found}; correct either"
        )
    meaning = said or found
    if meaning is None:
        raise ConfigError(
            "server.logprobs_mode: cannot be found out from this server; say whether its log-probabilities are the "
            "model's own (raw) or those after temperature, top-p, top-k and penalties (processed). vLLM: what "
            "--logprobs-mode says, raw by default; llama.cpp: raw; or sample with temperature: 1, top_p: 1, top_k: 0 "
            "and repetition_penalty: 1, where both are the same"
        )
    return "raw" if meaning == "raw" else "sampled"
