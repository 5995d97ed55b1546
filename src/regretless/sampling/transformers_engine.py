"""Sampling with `model.generate` of transformers; log-probabilities are recorded on the way."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from regretless.core.errors import ConfigError
from regretless.data.columns import Text
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, eos_token_ids, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.base import Completion, Provenance
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.stop_strings import StopStrings

Measure = Callable[[Tensor, Tensor, Tensor], Mapping[str, Tensor]]
"""(logits (B, V), the same shaped to draw from (B, V), drawn token ids (B, 1)) → further numbers (B,) by name."""


class TransformersEngine:
    """Engine for the model of a config. Raises ConfigError if it cannot be loaded or no token ends its responses."""

    def __init__(self, config: ModelConfig, params: SamplingParams) -> None:
        self.params = params
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config)
        self.model: PreTrainedModel | PeftModel = load_model(config)
        self.ends = sorted(eos_token_ids(self.model, self.tokenizer))
        if not self.ends:
            raise ConfigError(
                f"model {config.label}: neither the model nor its tokenizer names an end-of-sequence token, so no "
                "response can end; set eos_token in the tokenizer's folder"
            )
        self.provenance = Provenance(
            model=config.label,
            revision=config.revision or getattr(self.model.config, "_commit_hash", None),
            dtype=str(self.model.dtype).removeprefix("torch."),
            engine=params.engine,
            tokenizer=tokenizer_fingerprint(self.tokenizer),
        )

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and response together: the positions that the model was made for."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def encode(self, prompt: Text) -> list[int]:
        """Token ids of a prompt, by its chat template if it is a conversation."""
        return encode_prompt(self.tokenizer, prompt)

    def with_params(self, params: SamplingParams) -> Self:
        """This engine with other settings of sampling."""
        other = copy.copy(self)
        other.params = params
        return other

    def generate(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Completion]:
        """One response to each prompt (token ids), in order; the batch is padded on the left."""
        width = max(len(prompt) for prompt in prompts)
        pads = [width - len(prompt) for prompt in prompts]
        pad_id = self.tokenizer.pad_token_id
        rows = [[pad_id] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
        device = self.model.device
        input_ids = torch.tensor(rows, device=device)
        padding = torch.tensor(pads, device=device)
        mask = (torch.arange(width, device=device) >= padding[:, None]).long()
        recorder = LogpRecorder(self.params, padding, self.measure)
        stops = StopStrings(self.tokenizer, self.params.stop)
        with torch.inference_mode(), _seeded(device, seed), self._own_settings_only():
            output = self.model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                logits_processor=LogitsProcessorList([_Shape(recorder)]),
                stopping_criteria=StoppingCriteriaList(
                    [_Record(recorder), *([_Stop(stops, width)] if stops.strings else [])]
                ),
            )
        tokens = output[:, width:]
        raw, sampled = recorder.logps(tokens.shape[1])
        drawn = None if sampled is None else sampled.tolist()
        numbers = {name: rows.tolist() for name, rows in recorder.token_numbers(tokens.shape[1]).items()}
        return [
            stops.applied(completion)
            for completion in self._completions(prompts, tokens.tolist(), raw.tolist(), drawn, numbers)
        ]

    def measure(self, logits: Tensor, shaped: Tensor, tokens: Tensor) -> Mapping[str, Tensor]:
        """Further numbers (B,) of the tokens just drawn, by name; this engine records none, a subclass may.

        logits: (B, V) of the model; shaped: (B, V), what was drawn from: the logits after temperature, top-p, top-k and
        penalties; tokens: (B, 1) ids. Rows go through it until the longest response of the batch is complete.
        """
        return {}

    def _completions(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: list[list[int]],
        raw: list[list[float]],
        sampled: list[list[float]] | None,
        numbers: Mapping[str, list[list[float]]],
    ) -> list[Completion]:
        ends = set(self.ends)
        stops = [next((at for at, token in enumerate(row) if token in ends), None) for row in tokens]
        lengths = [len(row) if stop is None else stop + 1 for row, stop in zip(tokens, stops, strict=True)]
        ids = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [
            Completion(
                text=texts[row],
                token_ids=ids[row],
                logps=raw[row][:length],
                sampled_logps=None if sampled is None else sampled[row][:length],
                finish_reason="length" if stops[row] is None else "stop",
                prompt_token_ids=list(prompts[row]),
                token_numbers={name: values[row][:length] for name, values in numbers.items()} or None,
            )
            for row, length in enumerate(lengths)
        ]

    @contextlib.contextmanager
    def _own_settings_only(self) -> Iterator[None]:
        """Set the model's generation settings to those of this engine only, within the block.

        What a checkpoint's generation_config.json sets (Qwen: repetition penalty, top-k) would otherwise fill whatever
        the call leaves open, on top of the processors here.
        """
        draws = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        settings = GenerationConfig(
            max_new_tokens=self.params.max_new_tokens,
            eos_token_id=self.ends,
            pad_token_id=self.tokenizer.pad_token_id,
            **(draws if self.params.temperature > 0 else {}),
        )
        inner = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        holders = [self.model] if inner is self.model else [self.model, inner]
        before = [holder.generation_config for holder in holders]
        try:
            for holder in holders:
                holder.generation_config = settings
            yield
        finally:
            for holder, original in zip(holders, before, strict=True):
                holder.generation_config = original


class LogpRecorder:
    """Shapes the sampling distribution, and records the log-probabilities of the sampled tokens.

    `shape` is the only logits processor of a call: it sees the model's own logits (B, V), applies what `params` asks
    for in the order that transformers and vLLM use, and remembers both until the token is known. `record` is a stopping
    criterion, called right after that, which stops nothing: it keeps the token's two log-probabilities and lets the
    logits go. Memory: two (B, V) tensors and two numbers a token, where `output_logits` would keep steps × B × V.

    padding: (B,) number of padding tokens before each prompt, which are not part of the text.
    measure: further numbers of each token, computed while the logits are there.
    """

    def __init__(self, params: SamplingParams, padding: Tensor, measure: Measure) -> None:
        self.padding, self.measure = padding, measure
        penalty = float(params.repetition_penalty)
        self.penalty = RepetitionPenaltyLogitsProcessor(penalty) if penalty != 1 else None
        self.draws = params.temperature > 0
        self.warpers: list[LogitsProcessor] = []
        if self.draws and params.temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if self.draws and params.top_k > 0:
            self.warpers.append(TopKLogitsWarper(params.top_k))
        if self.draws and params.top_p < 1:
            top_p = float(params.top_p)
            self.warpers.append(TopPLogitsWarper(top_p) if params.top_k == 0 else TopPAmongFew(top_p))
        self.pending: tuple[Tensor, Tensor] | None = None
        self.raw: list[Tensor] = []
        self.sampled: list[Tensor] = []
        self.measured: list[Mapping[str, Tensor]] = []

    def shape(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores to sample from, for the model's logits (B, V) after input_ids (B, S)."""
        shaped = scores
        if self.penalty is not None:
            # Padding is replaced by the prompt's first token here: a token is penalized once however often it occurs.
            first = input_ids.gather(1, self.padding[:, None])
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            shaped = self.penalty(torch.where(positions < self.padding[:, None], first, input_ids), shaped)
        for warper in self.warpers:
            shaped = warper(input_ids, shaped)
        self.pending = (scores, shaped)
        return shaped

    def record(self, input_ids: Tensor) -> None:
        """Record the log-probabilities of the token that is now at the end of each row of input_ids (B, S)."""
        assert self.pending is not None  # shape was called for this token
        raw, shaped = self.pending
        self.pending = None
        chosen = input_ids[:, -1:]
        self.raw.append(_chosen_logps(raw, chosen))
        if self.draws:
            self.sampled.append(_chosen_logps(shaped, chosen))
        self.measured.append(self.measure(raw, shaped, chosen))

    def logps(self, steps: int) -> tuple[Tensor, Tensor | None]:
        """(B, steps) nats of the tokens: in the model's distribution, and the one sampled from (None: greedy)."""
        raw = torch.stack(self.raw[:steps], dim=1)
        return raw, torch.stack(self.sampled[:steps], dim=1) if self.draws else None

    def token_numbers(self, steps: int) -> dict[str, Tensor]:
        """(B, steps) of each further number, by name."""
        names = self.measured[0]
        return {name: torch.stack([row[name] for row in self.measured[:steps]], dim=1) for name in names}


def _chosen_logps(scores: Tensor, chosen: Tensor) -> Tensor:
    """(B,) log-probability of each row's chosen token (B, 1) under softmax of scores (B, V)."""
    # Rounding can put a certain token slightly above 0.
    return (scores.gather(1, chosen).squeeze(1) - scores.logsumexp(dim=1)).clamp(max=0)


class TopPAmongFew(TopPLogitsWarper):
    """transformers' top-p for rows with few tokens left, as behind top-k: sorts those instead of the vocabulary.

    It leaves the same tokens. Where the limit is among equal scores, the unstable order of the full sort decides which
    of them are left; such rows are left to transformers.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores without the least likely tokens, which together have at most 1 - top_p."""
        # More than k where tokens tie with the last of the top k.
        left = max(1, int(scores.isfinite().sum(dim=1).max()))
        values, places = scores.topk(left)
        values, places = values.flip(1), places.flip(1)
        removed = values.softmax(dim=1).cumsum(dim=1) <= 1 - self.top_p
        removed[:, -1] = False
        # What was removed before is -inf already.
        shaped = scores.scatter(1, places, values.masked_fill(removed, -math.inf))
        tied = removed[:, :-1] & ~removed[:, 1:] & (values[:, :-1] == values[:, 1:])
        rows = tied.any(dim=1).nonzero()[:, 0]
        if len(rows):
            shaped[rows] = super().__call__(input_ids, scores[rows])
        return shaped


class _Shape(LogitsProcessor):
    def __init__(self, recorder: LogpRecorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.recorder.shape(input_ids, scores)


class _Record(StoppingCriteria):
    def __init__(self, recorder: LogpRecorder) -> None:
        self.recorder = recorder

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        self.recorder.record(input_ids)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class _Stop(StoppingCriteria):
    """Ends the rows whose newest token completes a stop string. width: number of positions before the first token."""

    def __init__(self, stops: StopStrings, width: int) -> None:
        self.stops, self.width = stops, width

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        generated = list(input_ids[:, self.width :].cpu().numpy())
        return torch.tensor(self.stops.end_with(generated), device=input_ids.device)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from a seed within the block, the caller's afterwards."""
    # fork_rng keeps the states of devices that have one for each index; the others' is set by manual_seed all the same.
    indexed = device.type in {"cuda", "xpu"}
    kind = device.type if indexed else "cuda"
    with torch.random.fork_rng(devices=[device] if indexed else [], device_type=kind):
        torch.manual_seed(seed)
        yield
