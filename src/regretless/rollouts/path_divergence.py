"""KL-to-go of sampled continuations: that of the next token, exact in every context that a continuation visits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regretless.core.progress import Advance
from regretless.modeling.load import ModelConfig, load_model
from regretless.sampling.engine_settings import SamplingParams


def path_divergences(
    writer: ModelConfig,
    reference: ModelConfig,
    params: SamplingParams,
    paths: Sequence[tuple[Sequence[int], Sequence[int]]],
    advance: Advance = lambda *_: None,
) -> list[float]:
    """Σ_t KL(μ ‖ π_ref) in nats over the tokens of each continuation, given as (context ids, continuation ids).

    μ is what the writer samples from under `params`, π_ref the reference's own distribution. The mean over μ's
    continuations of a context is its KL-to-go, with less noise than that of their log-ratios. Equal continuations are
    computed once. Both models are in memory at the same time. Raises ConfigError for a model that cannot be loaded.
    """
    given = [(tuple(context), tuple(written)) for context, written in paths]
    models = [load_model(config) for config in (writer, reference)]
    shape = _shaped_by(params)
    found = {}
    with torch.inference_mode():
        for (context, written), count in Counter(given).items():
            ids = torch.tensor([[*context, *written]], device=models[0].device)
            ours, theirs = (_next_token_logits(model, ids, len(written)) for model in models)
            logps = shape(ids[0], ours).log_softmax(dim=1)
            # Tokens that μ never writes count nothing.
            terms = logps.exp() * (logps - theirs.log_softmax(dim=1))
            found[context, written] = float(terms.masked_fill(logps == -math.inf, 0.0).sum())
            advance(count)
    return [found[path] for path in given]


def _next_token_logits(model: PreTrainedModel | PeftModel, ids: Tensor, count: int) -> Tensor:
    """(count, V) float32 logits from which the last `count` tokens of ids (1, S) were drawn."""
    logits: Tensor = model(input_ids=ids.to(model.device)).logits
    return logits[0, -count - 1 : -1].float()


def _shaped_by(params: SamplingParams) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of ids (S,) and the logits (n, V) of its last n tokens: the scores that were sampled from."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(params.temperature))]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(float(params.top_p))] if params.top_p < 1 else []
    penalty = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))

    def shaped(ids: Tensor, logits: Tensor) -> Tensor:
        if params.repetition_penalty != 1:
            first = len(ids) - len(logits)
            rows = [penalty(ids[None, : first + row], logits[row : row + 1]) for row in range(len(logits))]
            logits = torch.cat(rows)
        for warper in warpers:
            logits = warper(ids[None], logits)
        return logits

    return shaped
