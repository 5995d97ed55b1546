"""The interface of every sampling engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, TypeVar, runtime_checkable

from regretless.core.errors import ServerError
from regretless.data.columns import FinishReason, LogpsKind, Text
from regretless.sampling.engine_settings import SamplingParams

MOST_NAMED = 10
"""Prompts without a response that a message names."""
P = TypeVar("P", bound=Sized)
"""A prompt in the engine's form; its length orders prompts, and counts where an engine has a limit."""


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
    """One response: its text, and its tokens, including an end-of-sequence token if one was generated.

    Of a response that a stop string ended, the text before that string, and the tokens wholly before it.
    """

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
    token_bytes: list[int] | None = None
    """Bytes that each token adds to the text (`Codec.token_bytes`), for policies with another tokenizer."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token by name, for objectives that name them in `needs`."""
    top_logps: bytes | None = None
    """The `SamplingParams.top_logps` most likely tokens in the place of each token (`core.top_logps.packed`)."""
    top_logps_kind: LogpsKind | None = None
    """Distribution that they belong to: `SamplingParams.top_logps_kind`."""


class Engine(Protocol[P]):
    """Runs one model. Built from a ModelConfig and SamplingParams; `sampling.engines` lists them."""

    @property
    def provenance(self) -> Provenance:
        """Provenance that is written into the responses."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and response together, if the model has a known limit."""

    def encode(self, prompt: Text) -> P:
        """A prompt as the model receives it: token ids, if they are known. Raises DataError if it cannot be written.

        An engine in whose form a list of token ids is no prompt has `encode_ids` as well (`TextEngine`).
        """

    def with_params(self, params: SamplingParams) -> Self:
        """The same model, already loaded, with other settings of sampling; `engine`, `server` and `vllm` are equal."""

    def generate(self, prompts: Sequence[P], seed: int) -> list[Completion]:
        """One response to each prompt, in order. Equal prompts and an equal seed give equal responses."""


@runtime_checkable
class StreamingEngine(Engine[P], Protocol[P]):
    """An engine that takes any number of requests, each with a seed of its own, and keeps itself busy."""

    def stream(self, prompts: Sequence[P], seeds: Sequence[int]) -> Iterator[tuple[int, Completion]]:
        """One response to each prompt, with its position, as they are finished."""


@runtime_checkable
class PartEngine(StreamingEngine[P], Protocol[P]):
    """A streaming engine in which a response's last bits depend on those that are computed side by side with it.

    It is given the requests of one part at a time, so that an interrupted and resumed run has the same bytes.
    """

    whole_parts: Literal[True]


@runtime_checkable
class StoringEngine(StreamingEngine[P], Protocol[P]):
    """An engine whose responses cost money, and which therefore stores them one by one until their part is written."""

    def with_replies(self, file: Path) -> Self:
        """The same model, with a file of replies: those in it are not asked for again."""

    def forget(self, prompts: Sequence[P], seeds: Sequence[int]) -> None:
        """Remove what the file has of these requests."""


@runtime_checkable
class TextEngine(Engine[P], Protocol[P]):
    """An engine whose prompts are texts, or have them beside their token ids."""

    def encode_ids(self, ids: Sequence[int]) -> P:
        """The prompt of these token ids. Raises ConfigError if the engine takes none."""


class PromptsUnansweredError(ServerError):
    """Prompts that got no response, after all others were asked. `problems`: why not, by the prompt's position."""

    def __init__(self, start: str, problems: Mapping[int, str], advice: str) -> None:
        self.start, self.problems, self.advice = start, problems, advice
        super().__init__(self._message(lambda number: f"prompt {number + 1}"))

    def naming(self, name: Callable[[int], str], order: Callable[[int], int]) -> ServerError:
        """The error with other names of prompts and in another order; `name` and `order` make them of positions."""
        return ServerError(self._message(name, order))

    def _message(self, name: Callable[[int], str], order: Callable[[int], int] = int) -> str:
        named = sorted(self.problems, key=order)[:MOST_NAMED]
        lines = [f"{name(number)}: {self.problems[number]}" for number in named]
        if len(self.problems) > MOST_NAMED:
            lines.append(f"and {len(self.problems) - MOST_NAMED} more")
        return "\n  - ".join([self.start, *lines]) + f"\n{self.advice}"
