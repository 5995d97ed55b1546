"""Settings of sampling: those of every engine, and those that an engine has of its own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from regretless.core.errors import ConfigError
from regretless.core.settings import DECIDED, Section, Seed
from regretless.data.columns import LogpsKind
from regretless.servers.server_settings import ServerConfig

MOST_STOPS = 16
"""Stop strings of one setting: each is looked for after every token."""
LOWEST_TEMPERATURE = 1e-6
"""Above greedy decoding: logits divided by less may leave the range of float32."""
Penalty = Annotated[float, Field(ge=1e-3, le=1e3)]
"""A repetition penalty; others can take logits out of the range of float32."""


USUAL_BATCH = 64
"""Responses generated at the same time, at most where a memory is set."""
AUTO_GIB = 4.0
"""Memory for keys and values of `batch_size: auto`."""


def _distinct(strings: list[str]) -> list[str]:
    if repeated := [string for string in dict.fromkeys(strings) if strings.count(string) > 1]:
        raise ValueError(f"expected different strings, got {repeated[0]!r} twice")
    return strings


StopSetting = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_STOPS), AfterValidator(_distinct)
]
"""Different texts, none of them empty."""


def memory_gib(batch_size: int | str) -> float | None:
    """GiB of keys and values that a `batch_size` allows; None if it is a number of responses."""
    if batch_size == "auto":
        return AUTO_GIB
    return None if isinstance(batch_size, int) else float(batch_size.removesuffix("GiB"))


def _count_or_memory(value: int | str) -> int | str:
    value = int(value) if isinstance(value, str) and value.isdecimal() else value
    is_right = value >= 1 if isinstance(value, int) else re.fullmatch(r"auto|(\d+|\d*\.\d+)GiB", value)
    if not is_right or memory_gib(value) == 0:
        raise ValueError(f"expected a number of at least 1, auto, or a memory such as 8GiB, got {value!r}")
    return value


BatchSize = Annotated[int | str, AfterValidator(_count_or_memory)]
"""A number of responses, or the memory for their keys and values."""


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
    top_logps: int = Field(default=0, ge=0)
    """Most likely tokens that are recorded in the place of each token, with their log-probabilities, 8 bytes each; 0
    records none. `estimator: topk` of repo reads them."""
    top_logps_kind: LogpsKind = "raw"
    """Distribution that `top_logps` records: `raw` is the model's own; `sampled` the one that tokens are drawn from,
    after temperature, top-p, top-k and penalties, in which a list of `top_k` tokens has all of it."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Most tokens in a response; a longer one is cut there."""
    stop: StopSetting = Field(default=[])
    """Texts that end a response, as `["\\n\\nQuestion:"]` for a pretrained model that goes on with its own question.
    The response is what comes before the first of them; it is complete, and training puts no end token behind it."""
    batch_size: BatchSize = USUAL_BATCH
    """Number of responses generated at the same time. Another size rounds otherwise, which now and then changes a
    token. `auto` is 64, or as many as 4 GiB of keys and values allow, by the longest prompts and `max_new_tokens`;
    `8GiB` sets another memory. It concerns the engine `transformers`; others take 64 then."""
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
        if self.temperature == 0 and self.top_logps and self.top_logps_kind == "sampled":
            raise ValueError("top_logps_kind: with temperature 0 nothing is drawn from a distribution; set it to raw")
        return self

    @property
    def batch_of_parts(self) -> int:
        """Responses of a batch, whatever the model: the work is divided into parts before one is loaded."""
        return self.batch_size if isinstance(self.batch_size, int) else USUAL_BATCH

    @property
    def is_plain(self) -> bool:
        """True if tokens are sampled from the model's own distribution, without any change."""
        return self.temperature == 1 and self.top_p == 1 and self.top_k == 0 and self.repetition_penalty == 1


def check_top_kind(params: SamplingParams, kind: LogpsKind, setting: str) -> None:
    """Raise ConfigError if lists of `top_logps_kind` are wanted from an engine that tells those of another kind.

    setting: what decides on the kind.
    """
    if params.top_logps and not params.is_plain and kind != params.top_logps_kind:
        raise ConfigError(
            f"top_logps_kind: {params.top_logps_kind}, but with this {setting} log-probabilities are {kind}; "
            "change one of the two"
        )
