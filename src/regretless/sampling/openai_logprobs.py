"""Log-probabilities of an OpenAI-compatible server: how they are read, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from regretless.core.errors import ConfigError
from regretless.data.columns import LogpsKind
from regretless.sampling.engine_settings import SamplingParams

Meaning = Literal["raw", "processed", "temperature"]
"""What log-probabilities reflect: the model alone, everything that shapes sampling, or only the temperature."""
PROBE_TEMPERATURE, PROBE_TOP_P = 2.0, 1e-6
"""Top-p so small that one token is left, however flat the distribution: some token of a million is this likely."""
CERTAIN = -0.02
"""Nats; a more likely first token is inconclusive: its log-probability is close to 0 in any case."""
CLOSE = 0.02
"""Nats and relative; servers that batch requests do not reproduce a number exactly."""


def meaning_of(neutral: Sequence[float], shaped: Sequence[float]) -> Meaning | None:
    """What a server's log-probabilities reflect, from the two most likely first tokens of one prompt; None: unclear.

    neutral: (2,) nats at temperature 1 and nothing else. shaped: (2,) nats at PROBE_TEMPERATURE and PROBE_TOP_P. If
    top-p is reflected, only the most likely token is left, with log-probability 0; if only the temperature is, it
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


def kind_of(params: SamplingParams, said: Literal["raw", "processed"] | None, meaning: Meaning | None) -> LogpsKind:
    """Distribution that the log-probabilities of sampled tokens belong to, for the records.

    said: by the user. meaning: as probing the server shows. Raises ConfigError if it is unknown, if the two contradict
    each other, and if the server's numbers belong to neither distribution.
    """
    if params.is_plain:
        return "raw"
    if meaning == "temperature":
        if params.top_p == 1 and params.top_k == 0 and params.repetition_penalty == 1:
            meaning = "processed"
        else:
            raise ConfigError(
                "server: its log-probabilities follow the temperature but not top-p, top-k and penalties, so they are "
                "neither the model's nor those of sampling; set top_p: 1, top_k: 0 and repetition_penalty: 1, "
                "or start the server so that it returns the model's own (SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB=1)"
            )
    if said is not None and meaning is not None and said != meaning:
        raise ConfigError(
            f"server.logprobs_mode: {said}, but the server's log-probabilities are {meaning}; correct either"
        )
    meaning = said or meaning
    if meaning is None:
        raise ConfigError(
            "server.logprobs_mode: cannot be determined from this server; set whether its log-probabilities are the "
            "model's own (raw) or those after temperature, top-p, top-k and penalties (processed). vLLM: what "
            "--logprobs-mode is, raw by default; llama.cpp: raw; or sample with temperature: 1, top_p: 1, top_k: 0 "
            "and repetition_penalty: 1, where both are the same"
        )
    return "raw" if meaning == "raw" else "sampled"
