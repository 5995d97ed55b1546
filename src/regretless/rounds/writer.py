"""Who wrote a round's responses: checked before they are trained on, with the writer's distance to the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regretless.core.errors import DataError
from regretless.core.files import write_json
from regretless.core.intervals import mean_by_prompt
from regretless.data.columns import Response
from regretless.data.responses import read_responses
from regretless.modeling.load import ModelConfig, load_model, stored_dtype
from regretless.modeling.scoring import score_responses

FILE = "measures.json"
RE_SCORED = 16
"""Responses that their writer scores again."""
MOST_MISMATCH, MOST_IN_FLOAT32 = 0.1, 0.01
"""Nats per token that rounding may explain: half precision and other kernels leave some hundredths, float32 far less.
"""


def run(
    responses: Path, writer: ModelConfig, start: ModelConfig | None, most: int, seed: int, output: Path
) -> dict[str, Any]:
    """Write measures.json into the folder `output`: `mismatch` and `kl_to_start`; returns the plain numbers of it.

    writer: the model that should have written the responses, which scores some of them. start: the recipe's model,
    which scores at most `most` of them, drawn at random; None where that is the writer.
    Raises DataError for responses without token ids and log-probabilities, and for ones that another model has written.
    """
    scored = drawn_rows(responses, read_responses(responses)[0], most, seed)
    distance = mismatch(responses, writer, scored[:RE_SCORED])
    divergence = kl(scored, None if start is None else score(start, scored, "re-score: start"))
    write_json(output / FILE, {"mismatch": distance, "kl_to_start": divergence})
    return {"mismatch": distance, "kl_to_start": divergence["value"]}


def drawn_rows(responses: Path, rows: Sequence[Response], most: int, seed: int) -> list[Response]:
    """At most `most` of a file's responses, drawn at random, in their order.

    Raises DataError if none has token ids and log-probabilities.
    """
    usable = [row for row in rows if row.token_ids and row.prompt_token_ids and drawn_logps(row)]
    if not usable:
        raise DataError(
            f"{responses}: no response has token ids and log-probabilities; sample with an engine that records both"
        )
    return [usable[index] for index in sorted(Random(seed).sample(range(len(usable)), min(most, len(usable))))]


def drawn_logps(row: Response) -> list[float]:
    """Log-probabilities (nats) of a response's tokens in the distribution that they were drawn from; else the model's.

    Empty if neither is recorded.
    """
    return row.sampled_logps or row.logps or []


def mismatch(responses: Path, writer: ModelConfig, rows: Sequence[Response]) -> float | None:
    """Mean distance (nats per token) of recorded log-probabilities to those that training's passes give the writer.

    It is what sampling and training round differently. None where none of the model's own are recorded. Raises
    DataError for a distance that rounding does not explain: what samples is not what was trained.
    """
    rows = [row for row in rows if row.logps]
    if not rows:
        return None
    scores = token_logps(writer, rows, "re-score: writer")
    recorded = [logp for row in rows for logp in row.logps or ()]
    distance = float(np.abs(np.array(recorded) - np.concatenate(scores)).mean())
    dtypes = {stored_dtype(writer) if writer.dtype == "auto" else writer.dtype, *(row.dtype for row in rows)}
    most = MOST_IN_FLOAT32 if dtypes == {"float32"} else MOST_MISMATCH
    if not distance <= most:
        raise DataError(
            f"{responses}: the log-probabilities of its tokens are {distance:.3g} nats per token away from those of "
            f"{writer.label}, which should have written them, and rounding explains {most:g} at most: another "
            f"model, or another state of it, has; delete {responses.parent}, and the same command samples again"
        )
    return distance


def token_logps(model: ModelConfig, rows: Sequence[Response], description: str) -> list[NDArray[np.float32]]:
    """Log-probabilities (nats) of each response's tokens under a model."""
    items = [(row.prompt_token_ids or [], row.token_ids or []) for row in rows]
    return score_responses(load_model(model), items, description=description)


def score(model: ModelConfig, rows: Sequence[Response], description: str) -> list[float]:
    """Log-probability (nats) of each response under a model."""
    return [float(values.astype(np.float64).sum()) for values in token_logps(model, rows, description)]


def kl(rows: Sequence[Response], start: Sequence[float] | None) -> dict[str, Any]:
    """KL divergence of the writer to the start, in nats per response, with an interval over prompts.

    The mean of log μ − log π_start over responses that the writer μ has drawn: without bias, and below 0 by chance
    where the two are close. Exactly 0 where the start is the writer (`start` is None).
    """
    logratios = [0.0] * len(rows)
    if start is not None:
        logratios = [sum(drawn_logps(row)) - value for row, value in zip(rows, start, strict=True)]
    return mean_by_prompt(logratios, [1.0] * len(rows), [row.prompt_id for row in rows])
