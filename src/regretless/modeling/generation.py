"""Responses of a model: by the loop of `modeling.decoding` where that is right, else by the model's own `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from regretless.modeling.decoding import AreOver, Decoder, Row, decode, draw_next
from regretless.modeling.draws import Sampler, uniform_numbers
from regretless.modeling.forward import causal_model


def responses(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampler: Sampler,
    most: int,
    are_over: AreOver,
    *,
    slots: int,
    decodes: bool,
    padding: int,
) -> Iterator[Row]:
    """A response to each prompt (token ids), as they are finished; `slots` are written side by side.

    seeds, most, are_over: as for `decode`. decodes: whether the model's rows can be decoded one by one (`why_not`);
    otherwise its own `generate` takes one batch after another, padded on the left with the token id `padding`.
    """
    if decodes:
        return decode(Decoder(model, min(slots, len(prompts))), prompts, seeds, sampler, most, are_over)
    rows = [
        Row(number, prompt, uniform_numbers(seed, most))
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    batches = [rows[first : first + slots] for first in range(0, len(rows), slots)]
    return (row for batch in batches for row in _generated(model, batch, sampler, most, are_over, padding))


def _generated(
    model: PreTrainedModel | PeftModel,
    rows: Sequence[Row],
    sampler: Sampler,
    most: int,
    are_over: AreOver,
    padding: int,
) -> Iterator[Row]:
    """A batch of rows by the model's `generate`."""
    device, width = model.device, max(len(row.prompt) for row in rows)
    before = torch.tensor([width - len(row.prompt) for row in rows], device=device)
    padded = [[padding] * (width - len(row.prompt)) + list(row.prompt) for row in rows]
    end = _End(rows, are_over)
    with torch.inference_mode(), _only_these_settings(model, GenerationConfig(max_new_tokens=most)):
        model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=(torch.arange(width, device=device) >= before[:, None]).long(),
            logits_processor=LogitsProcessorList([_Draw(sampler, rows, before)]),
            stopping_criteria=StoppingCriteriaList([end]),
        )
    # Rows go on behind their ends until all of the batch have ended.
    for row in rows:
        yield row.cut(end.lengths.get(row.number, most))


@contextlib.contextmanager
def _only_these_settings(model: PreTrainedModel | PeftModel, settings: GenerationConfig) -> Iterator[None]:
    """Set the model's generation settings to these, within the block.

    What a checkpoint's generation_config.json sets (Qwen: repetition penalty, top-k) would otherwise fill whatever
    the call leaves open.
    """
    holders = {id(holder): holder for holder in (model, causal_model(model))}.values()
    before = [holder.generation_config for holder in holders]
    try:
        for holder in holders:
            holder.generation_config = settings
        yield
    finally:
        for holder, original in zip(holders, before, strict=True):
            holder.generation_config = original


class _Draw(LogitsProcessor):
    """Draws the tokens of a call of `generate`, and leaves it nothing but to take them.

    before: (B,) number of padding tokens before each prompt, which are not part of the text.
    """

    def __init__(self, sampler: Sampler, rows: Sequence[Row], before: Tensor) -> None:
        self.sampler, self.rows, self.before = sampler, rows, before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # Padding is replaced by the prompt's first token: a token is penalized once however often it occurs.
        first = input_ids.gather(1, self.before[:, None])
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = torch.where(positions < self.before[:, None], first, input_ids)
        tokens = draw_next(self.sampler, scores, seen, self.rows)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0)


class _End(StoppingCriteria):
    """Ends the rows that are over, and notes at which number of tokens each was."""

    def __init__(self, rows: Sequence[Row], are_over: AreOver) -> None:
        self.rows, self.are_over = rows, are_over
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: Any) -> Tensor:
        over = self.are_over(self.rows)
        for row, ends in zip(self.rows, over, strict=True):
            if ends:
                self.lengths.setdefault(row.number, len(row.token_ids))
        return torch.tensor(over, device=input_ids.device)
