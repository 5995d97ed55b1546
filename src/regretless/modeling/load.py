"""Models and tokenizers: from the hub, a folder, an adapter, or an architecture with random weights."""

from __future__ import annotations

import difflib
import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from peft import PeftConfig, PeftModel
from pydantic import model_validator
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils.logging import disable_progress_bar

from regretless.core.errors import ConfigError, RegretlessError, error_line, reject
from regretless.core.files import fingerprint
from regretless.core.hub import one_attempt, why
from regretless.core.paths import PathSetting
from regretless.core.settings import DECIDED, Section
from regretless.core.terminal import print_note
from regretless.modeling import kept_models
from regretless.modeling.chat_templates import choose_pad_token, set_chat_template, set_template_arguments, turn_end_ids
from regretless.modeling.quantization import Quantization, for_transformers, keep_weights_as_loaded, quantization_of
from regretless.workflow.run_folder import content

T = TypeVar("T")
ADAPTER = "adapter_config.json"
"""File that tells an adapter's folder from a model's."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def quiet_libraries() -> None:
    """Turn off what the libraries print in a program that says everything itself."""
    disable_progress_bar()  # transformers' bars for loading and saving; the stages have their own
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # peft calls it on transformers


class ModelConfig(Section):
    """A model: its weights, and its tokenizer."""

    name_or_path: PathSetting | None = None
    """Hub id or folder of a model, or of an adapter, whose base model is then loaded as well."""
    adapter: PathSetting | None = None
    """Hub id or folder of a peft adapter to put on the model."""
    revision: str | None = None
    """Branch, tag or commit of `name_or_path` on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights; `auto` takes the checkpoint's own, and float32 for random weights."""
    tokenizer: PathSetting | None = None
    """Hub id or folder of the tokenizer; the model's own by default."""
    chat_template: PathSetting | None = None
    """Chat template: chatml, llama3, gemma, or the path of a Jinja file; the tokenizer's own by default."""
    chat_template_kwargs: Annotated[dict[str, bool | int | str] | None, DECIDED] = None
    """Arguments of the chat template for all prompts and responses, such as `{enable_thinking: false}`, by which the
    assistant's reasoning is left out of both sides of a pair; those of a row have precedence."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
    architecture: Annotated[dict[str, Any] | None, DECIDED] = None
    """A transformers configuration with its `model_type`, for a model with random weights in place of `name_or_path`.
    Vocabulary size and special token ids come from `tokenizer` where they are not given."""
    init_seed: int = 0
    """Random seed of the weights of `architecture`."""
    quantization: Quantization | None = None
    """Load the weights of `name_or_path` in 4 bits, for example `{load_in_4bit: true}`; then only an adapter can be
    trained (QLoRA). By default as the base of the adapter was in training, else as they are stored."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.name_or_path is None) == (self.architecture is None):
            count = "neither" if self.architecture is None else "both"
            raise ValueError(f"expected either name_or_path or architecture, got {count}")
        if self.architecture is not None and self.quantization is not None:
            raise ValueError("quantization: weights are quantized while they are read; not possible with architecture")
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError(f"architecture: model_type is missing; found {', '.join(self.architecture) or 'no keys'}")
        return self

    @property
    def label(self) -> str:
        """Short name of the model for records and reports."""
        base = self.name_or_path or f"{(self.architecture or {})['model_type']} (random weights, seed {self.init_seed})"
        return f"{base} + {self.adapter}" if self.adapter else base


@dataclass(frozen=True)
class Origin:
    """Origin of weights: a base model and the adapter on it, each with its revision."""

    base: str
    revision: str | None
    adapter: str | None
    adapter_revision: str | None = None

    def quantization(self, config: ModelConfig) -> Quantization | None:
        """The quantization that a config with this origin sets, else that of the adapter's base in training."""
        return config.quantization or quantization_of(self.adapter, self.adapter_revision)

    def refuse_quantization(self, config: ModelConfig, program: str) -> None:
        """Raise ConfigError if the base is in 4 bits, for a program that would load it in full size."""
        if self.quantization(config) is not None:
            raise ConfigError(
                f"model {config.label}: {program} would load its base in full size, and it was trained in 4 bits: "
                "merge the adapter first (regretless merge) and name the merged model"
            )


def load_model(
    config: ModelConfig, *, for_training: bool = False, base_stays: bool = False
) -> PreTrainedModel | PeftModel:
    """Model of a config, with its adapter (trainable with `for_training`).

    It comes in evaluation mode on the best device; `for_training` leaves it in training mode on the CPU, because the
    trainer decides where its parts belong. base_stays: what will be trained is an adapter that the trainer puts on it.
    Within `kept_models.models_stay_loaded`, the base's weights are read from its files once; an adapter's, every time.
    Raises ConfigError if weights, adapter or architecture cannot be loaded.
    """
    if config.architecture is not None:
        model = _random_model(config, config.architecture)
        adapter, adapter_revision = config.adapter, None
    else:
        origin = weights_of(config)
        adapter, adapter_revision = origin.adapter, origin.adapter_revision
        model = _kept_model(config, origin, reading=not for_training or base_stays or adapter is not None)
    if adapter is not None:
        model = put_adapter(model, adapter, adapter_revision, for_training)
    if for_training and adapter is not None:
        for weight in model.parameters():  # some adapters train weights of the base along, such as biases
            if weight.requires_grad:
                weight.data = weight.data.clone()
    if for_training:
        return model.train()
    say_if_slow(model.dtype, "set the model's dtype to float32, which takes twice the memory")
    # Quantized weights were put onto the device while they were read.
    return (model if getattr(model, "is_quantized", False) else model.to(best_device())).eval()


def _kept_model(config: ModelConfig, origin: Origin, *, reading: bool) -> PreTrainedModel:
    """The base of a config, from memory if models stay loaded. reading: its weights will not be written to."""
    models = kept_models.kept()
    if models is None or origin.quantization(config) is not None:  # quantized weights are no plain tensors
        return _pretrained_model(config, origin)
    folder = Path(origin.base)
    made_of = content(folder) if folder.is_dir() else None
    key = fingerprint([origin.base, origin.revision, made_of, config.dtype, config.trust_remote_code])
    give = models.reading if reading else models.writing
    return give(key, lambda: _pretrained_model(config, origin).to(best_device()))


def in_one_dtype(configs: Sequence[ModelConfig]) -> list[ModelConfig]:
    """The same models, in float32 if `auto` would load them in different types.

    For models whose log-probabilities are compared: weights trained in float32, and the bfloat16 ones they come from,
    would differ by the rounding of the type as well. A type that is given stays.
    Raises ConfigError if a model does not exist.
    """
    stored = {stored_dtype(config) for config in configs if config.dtype == "auto"}
    if len(stored) < 2:
        return list(configs)
    return [config.model_copy(update={"dtype": "float32"}) if config.dtype == "auto" else config for config in configs]


def stored_dtype(config: ModelConfig) -> str:
    """Type of a config's weights as they are stored (`float32`, `bfloat16`, …).

    Raises ConfigError when the model cannot be found.
    """
    if config.architecture is not None:
        return "float32"
    origin = weights_of(config)
    stored = _load(
        "model",
        origin.base,
        lambda: AutoConfig.from_pretrained(
            origin.base, revision=origin.revision, trust_remote_code=config.trust_remote_code
        ),
    )
    return str(stored.get_text_config().dtype or stored.dtype).removeprefix("torch.")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Tokenizer of a config, with the chosen chat template and always with a padding token from its vocabulary.

    A preset template brings its end-of-turn token along as the end-of-sequence token: a model trained with it has to
    learn to end its turn. Raises ConfigError if the tokenizer or the template cannot be used.
    """
    source, revision = _tokenizer_source(config)
    tokenizer = _load(
        "tokenizer",
        source,
        lambda: AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code),
    )
    if config.chat_template is not None:
        set_chat_template(tokenizer, config.chat_template)
    if config.chat_template_kwargs:
        set_template_arguments(tokenizer, config.chat_template_kwargs)
    if tokenizer.pad_token_id is None:
        choose_pad_token(tokenizer, source)
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the base vocabulary and its merges: equal if plain text has equal ids, whatever tokens were added.

    Models of one family often differ only in tokens added behind a common vocabulary (Qwen2, Qwen2.5, Qwen3).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        added = tokenizer.get_added_vocab()
        return fingerprint({token: number for token, number in tokenizer.get_vocab().items() if token not in added})
    content = json.loads(backend.to_str())["model"]
    # Newer files hold merges as pairs, older ones as texts "left right".
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content.get("merges") or ()]
    return fingerprint({"type": content["type"], "vocab": content["vocab"], "merges": merges})


PROBE = "Ab\n\n  cé ß 12"
"""A text that tokenizers write differently by their options: case, accents, spaces."""


def probe_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of a fixed text with all special tokens: they change with options that change how texts are written."""
    text = "".join((PROBE, *tokenizer.all_special_tokens, PROBE))
    return tuple(tokenizer(text, verbose=False)["input_ids"])


def eos_token_ids(*sources: PreTrainedModel | PreTrainedTokenizerBase) -> set[int]:
    """Ids of all tokens that end a response, according to models and tokenizers; empty if they name none."""
    end_ids: set[int] = set()
    for source in sources:
        for holder in (source, getattr(source, "config", None), getattr(source, "generation_config", None)):
            ids = getattr(holder, "eos_token_id", None)
            end_ids.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
        # Base models often have a chat template whose end of turn is not configured as an end of sequence.
        if isinstance(source, PreTrainedTokenizerBase):
            end_ids.update(turn_end_ids(source))
    return end_ids


def best_device() -> torch.device:
    """The accelerator of this process (by its local rank if there are several processes), or the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type, int(os.environ.get("LOCAL_RANK", "0")))


def is_slow_here(dtype: torch.dtype) -> bool:
    """True for half precision where a CPU has no instructions for it: float32 is several times as fast there."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    has_instructions = getattr(torch.ops.mkldnn, name, None) if name else None
    return has_instructions is not None and best_device().type == "cpu" and not has_instructions()


def say_if_slow(dtype: torch.dtype, advice: str) -> None:
    """Print once that a type is slow on this CPU (`is_slow_here`), and the advice."""
    if is_slow_here(dtype):
        _say_slow(dtype, advice)


@functools.cache
def _say_slow(dtype: torch.dtype, advice: str) -> None:
    print_note(
        f"note: this CPU has no instructions for {str(dtype).removeprefix('torch.')} and computes it several times as "
        f"slowly as float32: {advice}"
    )


def default_architecture(model_type: str) -> PretrainedConfig:
    """Configuration of a model type, with transformers' own defaults. Raises ConfigError for unknown types."""
    types = list(CONFIG_MAPPING.keys())
    if model_type not in types:
        close = difflib.get_close_matches(model_type, types, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "expected a name such as qwen3, llama or gemma2"
        raise ConfigError(f"model.architecture.model_type: transformers knows no {model_type!r}; {hint}")
    return AutoConfig.for_model(model_type)


def check_architecture(config: ModelConfig) -> None:
    """Raise ConfigError for an `architecture` that cannot be built, before there are weights or a tokenizer."""
    assert config.architecture is not None
    model_type, values = _architecture(config.architecture)
    with torch.random.fork_rng(), torch.device("meta"):
        _build(model_type, values, torch.float32)


def _random_model(config: ModelConfig, architecture: Mapping[str, Any]) -> PreTrainedModel:
    model_type, values = _architecture(architecture)
    if config.tokenizer is not None:
        _fit_to_tokenizer(values, load_tokenizer(config))
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    with torch.random.fork_rng():
        torch.manual_seed(config.init_seed)
        return _build(model_type, values, dtype)


def _architecture(architecture: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Model type and the other keys of an architecture. Raises ConfigError for ones that transformers does not know."""
    values = dict(architecture)
    model_type = str(values.pop("model_type"))
    default = default_architecture(model_type)
    # transformers stores every key, so a misspelled size would silently leave the default.
    unknown = [key for key in values if not hasattr(default, key) and key not in {"rope_theta", "rope_scaling"}]
    names = list(default.to_dict())
    close = {key: difflib.get_close_matches(key, names, 1) for key in unknown}
    reject(
        f"model.architecture ({model_type})",
        [f"unknown key {key}" + (f"; did you mean {match[0]}?" if match else "") for key, match in close.items()],
    )
    return model_type, values


def _build(model_type: str, values: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=dtype)
    # The exception for a bad size depends on where in the model it is detected.
    except Exception as error:
        raise ConfigError(f"model.architecture ({model_type}): cannot be built from {values}: {error}") from error


def _pretrained_model(config: ModelConfig, origin: Origin) -> PreTrainedModel:
    quantization = origin.quantization(config)
    quantized: dict[str, Any] = {}
    if quantization is not None:
        quantized = {"quantization_config": for_transformers(quantization), "device_map": {"": best_device()}}

    def load() -> Any:
        _refuse_kernels(origin)
        return AutoModelForCausalLM.from_pretrained(
            origin.base,
            revision=origin.revision,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **quantized,
        )

    model, info = _load("model", origin.base, load)
    keep_weights_as_loaded(model)
    # Without this check, weights that are not in the files would be random.
    if absent := sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]):
        raise ConfigError(
            f"model {origin.base}: {len(absent)} weight(s) of {type(model).__name__} are missing or of another shape, "
            f"such as {absent[0]}; use a complete causal language model"
        )
    return model


def _refuse_kernels(origin: Origin) -> None:
    """Raise ConfigError if the model's configuration names code on the hub that would compute its layers."""
    values, _ = PretrainedConfig.get_config_dict(origin.base, revision=origin.revision)
    for name, value in values.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ConfigError(
                f"model {origin.base}: its config.json names a kernel on the hub, whose code would run here "
                f"({name}: {value!r:.80}); remove {name} from the file"
            )


def put_adapter(model: PreTrainedModel, adapter: str, revision: str | None, trainable: bool) -> PeftModel:
    """The model with this adapter on it. Raises ConfigError if it cannot be loaded, or is that of another model.

    The model's embeddings are resized where those in the adapter have other rows: it was trained with added tokens.
    """

    def put() -> PeftModel:
        _resize_embeddings(model, adapter, revision)
        return PeftModel.from_pretrained(model, adapter, is_trainable=trainable, revision=revision)

    with warnings.catch_warnings():
        # The adapter of another model would otherwise load without effect.
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        return _load("adapter", adapter, put)


def _resize_embeddings(model: PreTrainedModel, adapter: str, revision: str | None) -> None:
    try:
        path = cached_file(adapter, ADAPTER_WEIGHTS, revision=revision)
    except OSError:
        return  # weights in another form, or none; peft says which
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in embeddings]
    with safe_open(path, framework="pt") as weights:
        stored = {f"base_model.model.{name}{layer}.weight" for name in names for layer in ("", ".base_layer")}
        rows = [weights.get_slice(name).get_shape()[0] for name in sorted(stored.intersection(weights.keys()))]
    if rows and rows[0] != len(embeddings[0].weight):
        # The adapter brings the new rows. Where it is off, as for the reference, they are these, the same every time.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.resize_token_embeddings(rows[0], mean_resizing=False)


def _fit_to_tokenizer(values: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    size = len(tokenizer)
    if values.setdefault("vocab_size", size) < size:
        raise ConfigError(
            f"model.architecture.vocab_size: expected at least {size}, the tokenizer's; got {values['vocab_size']}"
        )
    for name in ("bos_token_id", "eos_token_id"):
        values.setdefault(name, getattr(tokenizer, name))
    # A padding row of the embedding is zero and is never trained: right for a token that is only padding.
    only_pads = tokenizer.pad_token_id not in {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    values.setdefault("pad_token_id", tokenizer.pad_token_id if only_pads else None)


def weights_of(config: ModelConfig) -> Origin:
    """Where the weights of a config with `name_or_path` come from.

    Raises ConfigError when an adapter names no base model, or is itself to carry an adapter.
    """
    name = str(config.name_or_path)
    if not _load("model", name, lambda: find_adapter_config_file(name, revision=config.revision)):
        # Plain text: vLLM hands the path to its engine with a serializer that refuses subclasses of str.
        return Origin(name, config.revision, None if config.adapter is None else str(config.adapter))
    if config.adapter is not None:
        raise ConfigError(f"model.name_or_path: {name} is itself an adapter, so model.adapter cannot be put on it")
    adapter = _load("adapter", name, lambda: PeftConfig.from_pretrained(name, revision=config.revision))
    if not adapter.base_model_name_or_path:
        raise ConfigError(
            f"{name}: its adapter_config.json names no base model; set model.name_or_path to the base "
            "and model.adapter to the adapter"
        )
    return Origin(adapter.base_model_name_or_path, adapter.revision, name, config.revision)


def _tokenizer_source(config: ModelConfig) -> tuple[str, str | None]:
    if config.tokenizer is not None:
        return config.tokenizer, None
    if config.name_or_path is None:
        raise ConfigError(
            "model.tokenizer: required next to model.architecture; set it to a tokenizer's folder or hub id"
        )
    origin = weights_of(config)
    if origin.adapter == config.name_or_path and not (Path(origin.adapter) / "tokenizer_config.json").is_file():
        return origin.base, origin.revision
    return config.name_or_path, config.revision


def _broken_file(folder: Path) -> str | None:
    """The first file of a model's or adapter's folder that cannot be read, with the reason; None if all can."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for file in files:
        try:
            if file.name in ("config.json", ADAPTER):
                if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                    return f"{file}: expected a JSON object; copy the file again"
            elif file.suffix == ".safetensors":
                with safe_open(file, framework="pt"):
                    pass
            elif file.match("pytorch_model*.bin") or file.match("adapter_model*.bin"):
                torch.load(file, map_location="meta", weights_only=True)
        except UnpicklingError:
            return (
                f"{file}: holds something other than tensors, which could be code that runs when it is read, or is no "
                "file of weights; use weights in safetensors"
            )
        except Exception as error:  # what is raised depends on the file's kind and on what it lacks
            return f"{file}: cannot be read, perhaps because it was cut ({error_line(error)}); copy it again"
    if any(file.name == ADAPTER for file in files) and not any(file.stem == "adapter_model" for file in files):
        return f"{folder}: has {ADAPTER}, and no {ADAPTER_WEIGHTS}; copy the weights too"
    return None


def _load(kind: str, source: str, action: Callable[[], T]) -> T:
    """Result of an action; library errors for missing or unusable files become one message with advice."""
    if Path(source).is_absolute() and not Path(source).exists():
        raise ConfigError(f"{kind} {source}: no such folder; check the path, or run the stage that makes it")
    try:
        with one_attempt(source) as offline:
            return action()
    except RegretlessError:
        raise
    # Readers of weights raise what they like: UnpicklingError, EOFError, SafetensorError, ImportError.
    except Exception as error:
        if (broken := _broken_file(Path(source))) is not None:
            raise ConfigError(f"{kind} {broken}") from error
        raise ConfigError(
            f"{kind} {source}: cannot be loaded: {why(error, offline)}\n  expected an existing folder (relative to "
            f"{Path.cwd()}) or a hub id that can be downloaded; without a network, download it elsewhere and set the "
            "folder instead; for a gated one, log in with `hf auth login`"
        ) from error
