"""Sampling from an OpenAI-compatible server: chat or completions, with the log-probabilities that it returns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from regretless.core.errors import BudgetError, ConfigError, ServerError
from regretless.core.files import fingerprint
from regretless.data.records import LogpsKind, Text
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import ModelConfig, load_tokenizer, tokenizer_fingerprint
from regretless.sampling.base import Completion, Provenance, SamplingParams, SamplingServer
from regretless.sampling.openai_logprobs import (
    PROBE_TEMPERATURE,
    PROBE_TOP_P,
    Meaning,
    kind_of,
    meaning_of,
)
from regretless.servers.limits import Budget, Spending
from regretless.servers.reply import NO_LOGPS, BadReplyError, Reply
from regretless.servers.transport import Client, Unanswered

PROBE = "Name any animal."
PROBE_TOP = 5
"""Most likely tokens to request when two are needed: vLLM replaces the last one by the sampled token."""
MOST_SEED = 2**31
"""Servers accept seeds of 32 bits with sign."""


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt as it is sent; its length is in tokens if they are known, else in characters."""

    text: Text
    ids: list[int] | None

    def __len__(self) -> int:
        if self.ids is not None:
            return len(self.ids)
        return len(self.text) if isinstance(self.text, str) else sum(len(message["content"]) for message in self.text)


def local_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model on a server, if its settings name one; the server's model name is no path or hub id."""
    return load_tokenizer(config) if config.tokenizer is not None else None


class OpenAIEngine:
    """Engine on a server, for the model of that name (`name_or_path`).

    Raises ConfigError for settings that the server does not support, and if the meaning of its log-probabilities
    cannot be determined.
    """

    context: int | None = None

    def __init__(self, config: ModelConfig, params: SamplingParams) -> None:
        if config.name_or_path is None or config.adapter is not None or params.server is None:
            raise ConfigError(
                f"model {config.label}: the engine openai needs the server's name for it in name_or_path; "
                "remove architecture and adapter"
            )
        self.config, self.model, self.params = config, config.name_or_path, params
        self.server: SamplingServer = params.server.model_copy(
            update={"base_url": params.server.base_urls.get(self.model, params.server.base_url)}
        )
        elsewhere = self.server.base_url is not None or bool(os.environ.get("OPENAI_BASE_URL"))
        self.extensions = elsewhere if self.server.extensions is None else self.server.extensions
        if not self.extensions and (params.top_k or params.repetition_penalty != 1):
            raise ConfigError(
                f"model {self.model}: this server has no top_k and no repetition_penalty; set top_k: 0 and "
                "repetition_penalty: 1, or server.extensions: true if it has"
            )
        if config.chat_template_kwargs and self.server.endpoint == "chat":
            raise ConfigError(
                f"model {self.model}: chat_template_kwargs are for a chat template that is applied here, and endpoint: "
                "chat has the server's own; set endpoint: completions and the model's tokenizer"
            )
        self.tokenizer = local_tokenizer(config)
        self.provenance = Provenance(
            model=config.label,
            revision=None,
            dtype=None,
            engine="openai",
            tokenizer=None if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer),
        )
        self.spent = Spending()
        self.kind: LogpsKind | None = self._find_kind() if self.server.logprobs else None

    def encode(self, prompt: Text) -> ServerPrompt:
        """A prompt as it is sent. Raises ConfigError if the endpoint does not accept it."""
        if self.server.endpoint == "chat":
            if isinstance(prompt, str):
                raise ConfigError(
                    "server.endpoint: chat needs messages, and the prompts are plain texts; set prompts.template "
                    "(user, assistant, math), or endpoint: completions"
                )
            return ServerPrompt(prompt, None)
        if self.tokenizer is not None:
            return ServerPrompt(prompt, encode_prompt(self.tokenizer, prompt))
        if not isinstance(prompt, str):
            raise ConfigError(
                "server.endpoint: completions needs plain texts, and the prompts are messages; set the model's "
                "tokenizer in models.tokenizer, whose chat template writes them, or set endpoint: chat"
            )
        return ServerPrompt(prompt, None)

    def with_params(self, params: SamplingParams) -> Self:
        """This engine with other settings of sampling, which are checked again; what is spent counts for both."""
        if params == self.params:
            return self
        other = type(self)(self.config, params)
        self.spent.add(other.spent)
        other.spent = self.spent
        return other

    def generate(self, prompts: Sequence[ServerPrompt], seed: int) -> list[Completion]:
        """One response to each prompt, in order, `server.concurrency` at a time.

        Raises ServerError when one is refused or cannot be had, BudgetError when the budget is used up.
        """
        params = self.params
        drawn = {"temperature": params.temperature, "top_p": params.top_p}
        shape = self._shape(params.top_k, params.repetition_penalty)
        bodies = [
            self._body(
                prompt,
                params.max_new_tokens,
                {**drawn, **shape, "seed": int(fingerprint([seed, row])[:15], 16) % MOST_SEED},
            )
            for row, prompt in enumerate(prompts)
        ]
        try:
            replies = self._ask(bodies, params.max_new_tokens)
        except Unanswered as error:
            raise ServerError(
                f"model {self.model}: a prompt got no response: {error}; check the server, or remove the prompt, "
                "and run again"
            ) from None
        return [self._completion(prompt, reply) for prompt, reply in zip(prompts, replies, strict=True)]

    def _shape(self, top_k: int, repetition_penalty: float) -> dict[str, Any]:
        """Parameters beyond OpenAI's own. All are sent: vLLM reads omitted ones from the checkpoint's settings."""
        if not self.extensions:
            return {}
        off = -1
        return {"top_k": top_k or off, "min_p": 0.0, "repetition_penalty": repetition_penalty, "return_token_ids": True}

    def _body(self, prompt: ServerPrompt, most_tokens: int, drawn: dict[str, Any], top: int = 0) -> dict[str, Any]:
        """A request; `top`: number of most likely tokens to return for each position."""
        if self.server.endpoint == "chat":
            body = {"model": self.model, "messages": prompt.text, self.server.limit_parameter: most_tokens, **drawn}
            logprobs: dict[str, Any] = {"logprobs": True, **({"top_logprobs": top} if top else {})}
        else:
            written = prompt.text if prompt.ids is None else prompt.ids
            body = {"model": self.model, "prompt": written, "max_tokens": most_tokens, **drawn}
            logprobs = {"logprobs": max(top, 1)}
        return {**body, **logprobs} if self.server.logprobs else body

    def _ask(self, bodies: Sequence[dict[str, Any]], most_tokens: int) -> list[Reply]:
        """The replies to requests, in order. Raises Unanswered for the first one without a reply."""

        async def ask() -> list[Reply]:
            places = asyncio.Semaphore(self.server.concurrency)
            async with Client(self.server, Budget(self.server, self.spent)) as client:

                async def one(body: dict[str, Any]) -> Reply:
                    async with places:
                        return await client.ask(self.server.endpoint, body, most_tokens, self._check_ids)

                return await asyncio.gather(*map(one, bodies))

        try:
            return asyncio.run(ask())
        except (BudgetError, ServerError) as error:
            raise type(error)(f"model {self.model}: {error}") from None
        except Unanswered as error:
            if error.reason != NO_LOGPS:
                raise
            raise ServerError(
                f"model {self.model}: the server returns no log-probabilities; start it so that it does, or set "
                "server.logprobs: false for data without them (for repo_det and the baselines)"
            ) from None

    def _check_ids(self, reply: Reply) -> None:
        """Raise BadReplyError for an id that the configured tokenizer does not have: it has no text."""
        ids = reply.choice.ids
        if self.tokenizer is not None and ids and max(ids) >= (size := len(self.tokenizer)):
            detail = f"{max(ids)}, and the tokenizer {self.provenance.tokenizer} has {size}; set the model's own"
            raise BadReplyError("token id beyond the vocabulary", detail)

    def _completion(self, prompt: ServerPrompt, reply: Reply) -> Completion:
        choice = reply.choice
        if reply.thoughts and self.server.logprobs:
            raise ServerError(
                f"model {self.model}: the server removes the model's thoughts from the text but not from the "
                "log-probabilities; start it without a reasoning parser, or set server.logprobs: false"
            )
        # Ids that include thoughts do not match a text that does not.
        ids = None if reply.thoughts else choice.ids
        logps = choice.logps
        if self.server.logprobs and logps is None:
            raise ServerError(
                f"model {self.model}: a filter of the server ended an answer before its first token; remove the "
                "prompt, and run again"
            )
        has_draw = self.params.temperature > 0 and (self.kind == "sampled" or self.params.is_plain)
        return Completion(
            text=reply.content,
            token_ids=ids,
            logps=logps,
            sampled_logps=logps if has_draw else None,
            # A response that a filter ended, for example, is as incomplete as one that reached the limit.
            finish_reason="stop" if reply.finish_reason == "stop" else "length",
            logps_kind=None if logps is None else self.kind,
            prompt_token_ids=prompt.ids or reply.prompt_token_ids,
            tokens=None if ids is not None or logps is None else choice.strings,
        )

    def _find_kind(self) -> LogpsKind:
        found = None if self.params.is_plain else self._find_meaning()
        try:
            return kind_of(self.params, self.server.logprobs_mode, found)
        except ConfigError as error:
            raise ConfigError(f"model {self.model}: {error}") from None

    def _find_meaning(self) -> Meaning | None:
        """Request one token twice, once with a changed distribution: do the server's log-probabilities change too?"""
        chat: Text = [{"role": "user", "content": PROBE}]
        prompt = ServerPrompt(chat if self.server.endpoint == "chat" else PROBE, None)
        settings = ({"temperature": 1.0, "top_p": 1.0}, {"temperature": PROBE_TEMPERATURE, "top_p": PROBE_TOP_P})
        shape = self._shape(0, 1.0)
        try:
            replies = self._ask([self._body(prompt, 1, {**drawn, **shape}, top=PROBE_TOP) for drawn in settings], 1)
        except Unanswered as error:
            if not error.is_refusal:
                raise ServerError(f"model {self.model}: the server does not answer: {error}") from None
            # Some servers reject what this needs: a limit of one token, alternatives.
            return None
        neutral, shaped = ([top.logprob for top in reply.choice.likeliest] for reply in replies)
        return meaning_of(neutral, shaped)
