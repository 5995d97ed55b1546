"""The interface of every sampling engine."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from regretless.core.settings import Section
from regretless.data.records import FinishReason, LogpsKind, Text
from regretless.servers.server_settings import ServerConfig

P = TypeVar("P", bound=Sized)
"""A prompt in the engine's form; its length orders prompts, and counts where an engine has a limit."""


class SamplingServer(ServerConfig):
    """The server that an engine uses, and the meaning of its log-probabilities."""

    base_urls: dict[str, str] = Field(default={})
    """Addresses of models that run elsewhere than at `base_url`, by model name."""
    endpoint: Literal["chat", "completions"] = "chat"
    """`chat` sends messages, for the server's chat template. `completions` sends plain text, or the token ids of the
    tokenizer that the model's settings name."""
    logprobs: bool = True
    """Whether to ask for log-probabilities; some hosted models give none, which leaves data for the methods that need
    none."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """What the server's log-probabilities mean: `raw`, the model's own distribution; `processed`, the one that is drawn
    from, after temperature, top-p, top-k and penalties. Found out by two small requests where that is possible, and
    checked against what is said here."""
    extensions: bool | None = None
    """Whether the server knows the parameters top_k, min_p, repetition_penalty and return_token_ids, as vLLM and SGLang
    do; unless given, any server but OpenAI's own is taken to."""


class SamplingParams(Section):
    """How responses are sampled. The defaults are the paper's (appendix, data generation)."""

    engine: str = "transformers"
    """What runs the model: `transformers`, `openai` for an OpenAI-compatible server, or the name of a plug-in."""
    server: SamplingServer | None = None
    """The server, for an engine that asks one."""
    n: int = Field(default=8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(default=0.7, ge=0)
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Draws from the most likely tokens that together have this probability; 1 is off."""
    top_k: int = Field(default=40, ge=0)
    """Draws from this many most likely tokens; 0 is off."""
    repetition_penalty: float = Field(default=1.05, gt=0)
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or response so far; 1 is off.
    It counts in greedy decoding too."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """A response that has no end after this many tokens is cut there."""
    batch_size: int = Field(default=64, ge=1)
    """Responses written at the same time. Other sizes draw other responses from the same seed."""
    seed: int = Field(default=0, ge=0)
    """Equal seeds and settings draw equal responses."""

    @model_validator(mode="after")
    def _greedy_once(self) -> Self:
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n: with temperature 0 all {self.n} responses to a prompt are the same; set n to 1")
        return self

    @property
    def is_plain(self) -> bool:
        """True if tokens are sampled from the model's own distribution, without any change."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == 0 and self.repetition_penalty == 1


@dataclass(frozen=True)
class Provenance:
    """Provenance of a response: the columns of `Response` that are the same for all of an engine's responses."""

    model: str
    revision: str | None
    dtype: str | None
    engine: str
    tokenizer: str | None
    """Fingerprint of the tokenizer."""


@dataclass(frozen=True)
class Completion:
    """One response: its text, and its tokens, including an end-of-sequence token if one was generated."""

    text: str
    token_ids: list[int] | None
    logps: list[float] | None
    """Nats per token; `logps_kind` names the distribution."""
    sampled_logps: list[float] | None
    """Nats per token in the distribution it was sampled from; None for greedy decoding, which does not sample."""
    finish_reason: FinishReason
    logps_kind: LogpsKind | None = "raw"
    """`raw`: the model's own distribution. `sampled`: the one it was sampled from, if no other is known."""
    prompt_token_ids: list[int] | None = None
    """The prompt's token ids as the model received them."""
    tokens: list[str] | None = None
    """Token strings, if there are no ids."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token by name, for objectives that name them in `needs`."""


class Engine(Protocol[P]):
    """Runs one model. Built from a ModelConfig and SamplingParams; `sampling.engines` lists them."""

    @property
    def provenance(self) -> Provenance:
        """Provenance that is written into the responses."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and response together, if the model has a known limit."""

    def encode(self, prompt: Text) -> P:
        """A prompt as the model receives it: token ids, if they are known. Raises DataError if it cannot be written."""

    def generate(self, prompts: Sequence[P], seed: int) -> list[Completion]:
        """One response to each prompt, in order. Equal prompts and an equal seed give equal responses."""
