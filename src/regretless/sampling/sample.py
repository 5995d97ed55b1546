"""The sample stage: responses with token log-probabilities from prompts and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from regretless.core.errors import ConfigError, DataError
from regretless.core.terminal import print_note
from regretless.data.codec import Tokenizer
from regretless.data.prompt_templates import CHAT, TextPrompts
from regretless.data.prompts import PromptRow, PromptSource, read_prompts
from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.engine_settings import SamplingParams, SamplingServer
from regretless.sampling.engines import ENGINES, check_engine_settings
from regretless.sampling.job import SampleWork, finish

KEEPS = ("responses.parquet", "responses.parts")
"""Results that work with other settings may still cover (`sampling.kept`)."""


class SampleConfig(SamplingParams):
    """Settings of the sample stage."""

    prompts: PromptSource
    """Prompts to answer."""
    models: list[ModelConfig] = Field(min_length=1)
    """Behavior models; each answers every prompt `n` times. Only one is in memory at a time. A recipe's policy
    (`model`) by default."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in a prompt. A prompt that is longer for any of the models is rejected."""

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Settings that name what a server has."""
        return () if self.server is None else ("models",)

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        return ENGINES.check(value)

    @model_validator(mode="after")
    def _server_and_engine(self) -> Self:
        check_engine_settings(self.engine, {"server": self.server}, self.vllm)
        return self


def run(config: SampleConfig, output: Path, policy: ModelConfig | None = None) -> dict[str, Any]:
    """Answer all prompts with all models; returns counts.

    policy: the model that will be trained on pairs of the responses, to say how it will read them.
    Written into the folder `output`: responses.parquet (`Response` records, prompt by prompt) and refused.jsonl
    (prompts left out, with the reason). Unfinished work that a killed run of the same settings left there is taken up,
    and the result is the same as that of a run in one go.
    Raises DataError if no prompt is usable, ConfigError if a model is not.
    """
    tokenizers = tokenizers_of(config)
    if note := tokenizer_note(config.models, tokenizers, policy):
        print_note(note)
    prompts, refused = usable_prompts(config, tokenizers)
    report_refusals(refused, output / "refused.jsonl")
    check_some_left(prompts, refused, config.prompts.dataset)
    summary = sample_models(config.models, prompts, _params(config), output / "responses.parquet")
    return {**summary, "refused": len(refused)}


def tokenizers_of(config: SampleConfig) -> list[PreTrainedTokenizerBase | None]:
    """The tokenizers of the models in their order; None for one that only a server has. Raises ConfigError."""
    return [ENGINES.find(config.engine).tokenizer(model) for model in config.models]


def tokenizer_note(
    models: Sequence[ModelConfig], tokenizers: Sequence[PreTrainedTokenizerBase | None], policy: ModelConfig | None
) -> str | None:
    """How the policy will read responses by models with another tokenizer, as far as these are known."""
    known = [(model, tokenizer) for model, tokenizer in zip(models, tokenizers, strict=True) if tokenizer is not None]
    if policy is None or not known:
        return None
    mine = tokenizer_fingerprint(load_tokenizer(policy))
    others = [model.label for model, tokenizer in known if tokenizer_fingerprint(tokenizer) != mine]
    if not others:
        return None
    return (
        f"sample.models: {', '.join(others)} and the policy {policy.label} have different tokenizers: training "
        "tokenizes the texts of these responses again, and repo sums their log-probabilities over units, the spans "
        "between bytes where tokens of both end"
    )


def usable_prompts(
    config: SampleConfig, tokenizers: Sequence[Tokenizer | None] | None = None
) -> tuple[list[PromptRow], list[Refusal]]:
    """The prompts that every model can answer, and the rows that are left out, with reasons.

    tokenizers: those of the models, if they are loaded.
    Raises DataError if the prompts cannot be read, ConfigError for a tokenizer that cannot be loaded.
    """
    tokenizers = tokenizers_of(config) if tokenizers is None else tokenizers
    texts = asked_texts(tokenizers, config.server)
    prompts, refused = read_prompts(config.prompts, "prompts.", texts)
    prompts, unwritable = _writable(config, prompts, tokenizers)
    return prompts, refused + unwritable


def sample_models(
    models: Sequence[ModelConfig], prompts: Sequence[PromptRow], params: SamplingParams, output: Path
) -> dict[str, Any]:
    """Answers of models to prompts, written to the parquet file `output` as `Response` records; returns counts.

    Row order: prompt, model, sample. Interrupted work resumes: finished parts lie beside `output` until the file is
    written. Models' files count by name here; in a run folder (`RunFolder.do_together`) by content.
    Raises ConfigError for a model that cannot be used or prompts that do not fit its context, DataError for prompts
    of which some are strings and others conversations.
    """
    return sample_together([SampleWork(models, prompts, params, output)])[0]


def sample_together(works: Sequence[SampleWork]) -> list[dict[str, Any]]:
    """Do several works, with each model loaded once; returns the counts of each. Otherwise like `sample_models`."""
    finish(works)
    return [_counts(work) for work in works]


def _counts(work: SampleWork) -> dict[str, Any]:
    table = pq.read_table(work.output, columns=["token_ids", "logps", "finish_reason"])
    earlier = sum(row.file != work.output for row in work.kept.values())
    # A server may return no ids; without log-probabilities as well, the number of tokens is unknown.
    counts = pc.coalesce(pc.list_value_length(table["token_ids"]), pc.list_value_length(table["logps"]))
    return {
        "prompts": len(work.prompts),
        "responses": len(table),
        "tokens": pc.sum(counts).as_py() or 0,
        "cut": pc.sum(pc.equal(table["finish_reason"], "length")).as_py(),
        **({"stopped": pc.sum(pc.equal(table["finish_reason"], "stop_string")).as_py()} if work.params.stop else {}),
        **({"kept": earlier} if earlier else {}),
    }


def _params(config: SampleConfig) -> SamplingParams:
    return SamplingParams(**config.model_dump(include=set(SamplingParams.model_fields)))


def asked_texts(tokenizers: Sequence[Tokenizer | None], server: SamplingServer | None) -> TextPrompts:
    """What models are asked where a prompt is a text: a server's chat endpoint takes messages only."""
    return CHAT if server is not None and server.endpoint == "chat" else TextPrompts.of(tokenizers)


def _writable(
    config: SampleConfig, prompts: list[PromptRow], of_models: Sequence[Tokenizer | None]
) -> tuple[list[PromptRow], list[Refusal]]:
    """Prompts that every model's tokenizer can write within the limit, and the others with the first reason."""
    tokenizers = [tokenizer for tokenizer in of_models if tokenizer is not None]
    if config.max_prompt_tokens is not None and len(tokenizers) < len(of_models):
        raise ConfigError("sample: max_prompt_tokens needs the tokenizer of every model; set models.tokenizer")
    kept: list[PromptRow] = []
    refused: list[Refusal] = []
    for prompt in prompts:
        try:
            tokens = max((len(encode_prompt(tokenizer, prompt.prompt)) for tokenizer in tokenizers), default=0)
            if config.max_prompt_tokens is not None and tokens > config.max_prompt_tokens:
                raise DataError(f"prompt of {tokens} tokens; max_prompt_tokens is {config.max_prompt_tokens}")
            kept.append(prompt)
        except DataError as error:
            refused.append(Refusal(config.prompts.dataset, prompt.line, str(error), {"prompt": prompt.prompt}))
    return kept, refused
