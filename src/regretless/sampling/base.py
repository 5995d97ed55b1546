"""The interface of every sampling engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import AfterValidator, Field, model_validator

from regretless.core.errors import ServerError
from regretless.core.settings import DECIDED, Section, Seed
from regretless.data.records import FinishReason, LogpsKind, Text
from regretless.servers.server_settings import ServerConfig

MOST_STOPS = 16
"""Stop strings of one setting: each is looked for after every token."""
LOWEST_TEMPERATURE = 1e-6
"""Above greedy decoding: logits divided by less may leave the range of float32."""
Penalty = Annotated[float, Field(ge=1e-3, le=1e3)]
"""A repetition penalty; others can take logits out of the range of float32."""
MOST_NAMED = 10
"""Prompts without a response that a message names."""


def _distinct(strings: list[str]) -> list[str]:
    if repeated := [string for string in dict.fromkeys(strings) if strings.count(string) > 1]:
        raise ValueError(f"expected different strings, got {repeated[0]!r} twice")
    return strings


StopSetting = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS), AfterValidator(_distinct)
]
"""Different texts, none of them empty."""
P = TypeVar("P", bound=Sized)
"""A prompt in the engine's form; its length orders prompts, and counts where an engine has a limit."""


class SamplingServer(ServerConfig):
    """The server that an engine uses, and the meaning of its log-probabilities."""

    base_urls: dict[str, str] = Field(default={})
    """Server addresses by model name, for models that do not run at `base_url`."""
    endpoint: Literal["chat", "completions"] = "chat"
    """API endpoint. `chat` sends messages, which the server formats with its chat template. `completions` sends plain
    text, or token ids if the model's settings name a tokenizer."""
    logprobs: bool = True
    """Whether to ask for log-probabilities. Some hosted models give none; their responses can only be used for
    objectives that need none."""
    logprobs_mode: Literal["raw", "processed"] | None = None
    """What the server's log-probabilities refer to: `raw` is the model's own distribution; `processed` is the one that
    tokens are drawn from, after temperature, top-p, top-k and penalties. By default two small requests find it out
    where that is possible; a value given here is checked by them."""
    extensions: bool | None = None
    """Whether the server knows the parameters top_k, min_p, repetition_penalty and return_token_ids, as vLLM and SGLang
    do. By default this is assumed of every server but OpenAI's own."""
    send_seed: bool = True
    """Whether to send a seed with each request. Some servers refuse it; without it, a response that has to be requested
    again is another one."""


class VllmOptions(Section):
    """Settings of vLLM in this process, for the engine `vllm`."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs over which each layer of the model is spread."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and response together, for which vLLM reserves memory; the model's own limit by default."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that vLLM takes for weights, keys and values."""
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Log-probabilities that vLLM records; it has one kind at a time. `raw`: of the model's own distribution, which
    regret needs. `processed`: of the distribution that is sampled from, after temperature, top-p, top-k, penalties."""
    engine_args: Annotated[dict[str, Any], DECIDED] = Field(default={})
    """Any other argument of vLLM's `LLM`, as `max_num_seqs` or `enforce_eager`."""


class SamplingParams(Section):
    """How responses are sampled. The defaults are the paper's (appendix, data generation)."""

    engine: str = "transformers"
    """Software that runs the model: `transformers`, `vllm`, `openai` for an OpenAI-compatible server, or the name of a
    plug-in."""
    server: SamplingServer | None = None
    """Server to ask, for an engine that uses one."""
    vllm: VllmOptions | None = None
    """Settings of vLLM, for the engine `vllm`."""
    n: int = Field(default=8, ge=1)
    """Number of responses per prompt."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature, by which the logits are divided; 0 means greedy decoding."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Tokens are drawn from the most likely ones that together have this probability; 1 turns this off."""
    top_k: int = Field(default=40, ge=0)
    """Tokens are drawn from this many most likely ones; 0 turns this off."""
    repetition_penalty: Penalty = 1.05
    """Divisor of positive logits, and factor of negative ones, for tokens that the prompt or response already contains;
    1 turns this off. It also applies to greedy decoding."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Most tokens in a response; a longer one is cut there."""
    stop: StopSetting = Field(default=[])
    """Texts that end a response, as `["\\n\\nQuestion:"]` for a pretrained model that goes on with its own question.
    The response is what comes before the first of them; it is complete, and training puts no end token behind it."""
    batch_size: int = Field(default=64, ge=1)
    """Number of responses generated at the same time. Another size rounds otherwise, which now and then changes a
    token."""
    seed: Seed = 0
    """Random seed; equal seeds and settings give equal responses."""

    @model_validator(mode="after")
    def _temperature_works(self) -> Self:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature: expected 0 (greedy), or {LOWEST_TEMPERATURE:g} or more, got {self.temperature:g}"
            )
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
