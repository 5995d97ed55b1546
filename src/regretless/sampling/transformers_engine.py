"""Sampling with a model of transformers: by the loop of `modeling.decoding`, else by the model's own `generate`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import numpy as np
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regretless.core.errors import ConfigError
from regretless.core.files import fingerprint
from regretless.core.terminal import print_note
from regretless.data.codec import codec_of
from regretless.data.columns import Text
from regretless.data.tokenization import encode_prompt
from regretless.modeling.decoding import Row, bytes_per_position, why_not
from regretless.modeling.draws import Sampler
from regretless.modeling.generation import responses
from regretless.modeling.load import ModelConfig, eos_token_ids, load_model, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.base import Completion, Provenance
from regretless.sampling.engine_settings import SamplingParams, memory_gib
from regretless.sampling.stop_strings import StopStrings


class TransformersEngine:
    """Engine for the model of a config. Raises ConfigError if it cannot be loaded or no token ends its responses.

    What a response draws follows from its own seed. Its last bits depend on the rows beside it (`whole_parts`).
    """

    whole_parts = True

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
        _adapter_in_type_of(self.model)
        reason = why_not(self.model, self.context)
        self.decodes = reason is None
        """Whether rows are decoded one by one; `generate` of transformers pads them to one batch."""
        if reason is not None:
            print_note(f"note: model {config.label}: sampled by transformers' generate, which is slower: {reason}")
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
        """One response to each prompt (token ids), in order; each draws from a seed of its own."""
        seeds = [int(fingerprint([seed, row])[:15], 16) for row in range(len(prompts))]
        completions = dict(self.stream(prompts, seeds))
        return [completions[row] for row in range(len(prompts))]

    def stream(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        """One response to each prompt, with its position, as they are finished; `params.batch_size` side by side."""
        stops = StopStrings(self.tokenizer, self.params.stop)
        whole = type(self).measure is not TransformersEngine.measure
        names = ("temperature", "top_k", "top_p", "repetition_penalty")
        shape = {name: getattr(self.params, name) for name in names}
        sampler = Sampler(
            **shape,
            measure=self.measure if whole else None,
            top=self.params.top_logps,
            top_kind=self.params.top_logps_kind,
        )
        ends = set(self.ends)

        def are_over(rows: Sequence[Row]) -> list[bool]:
            stopped = stops.end_with([row.token_ids for row in rows]) if stops.strings else [False] * len(rows)
            return [at_stop or row.token_ids[-1] in ends for at_stop, row in zip(stopped, rows, strict=True)]

        written = responses(
            self.model,
            prompts,
            seeds,
            sampler,
            self.params.max_new_tokens,
            are_over,
            slots=self._slots(prompts),
            decodes=self.decodes,
            padding=self.tokenizer.pad_token_id,
        )
        for row in written:
            yield row.number, stops.applied(self._completion(row))

    def measure(self, logits: Tensor, shaped: Tensor, tokens: Tensor) -> Mapping[str, Tensor]:
        """Further numbers (B,) of the tokens just drawn, by name; this engine records none, a subclass may.

        logits: (B, V) of the model; shaped: (B, V), what was drawn from: the logits after temperature, top-p, top-k and
        penalties; tokens: (B, 1) ids. It is called for some rows at a time, and a row may go on behind its end.
        """
        return {}

    def _slots(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many responses to these prompts are written side by side: the same on every machine."""
        gib = memory_gib(self.params.batch_size)
        if gib is None or not self.decodes:
            return self.params.batch_of_parts
        row = bytes_per_position(self.model) * (max(map(len, prompts)) + self.params.max_new_tokens)
        return max(1, min(self.params.batch_of_parts, int(gib * 2**30 / row)))

    def _completion(self, row: Row) -> Completion:
        text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(
            text=text,
            token_ids=row.token_ids,
            logps=row.logps,
            sampled_logps=row.sampled_logps if self.params.temperature > 0 else None,
            finish_reason="stop" if row.token_ids[-1] in self.ends else "length",
            prompt_token_ids=list(row.prompt),
            token_bytes=codec_of(self.tokenizer).token_bytes(row.token_ids, text),
            token_numbers=row.numbers or None,
            top_logps=np.stack(row.top).tobytes() if row.top else None,
            top_logps_kind=self.params.top_logps_kind if row.top else None,
        )


def _adapter_in_type_of(model: PreTrainedModel | PeftModel) -> None:
    """Round the adapter's weights to the type of the model's, as autocast does in training.

    peft loads them in float32, and would convert every layer's input and output.
    """
    if isinstance(model, PeftModel):
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(model.dtype)
