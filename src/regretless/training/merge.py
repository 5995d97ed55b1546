"""An adapter merged into its base model's weights, checked by log-probabilities before and after."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from regretless.core.errors import ConfigError, RegretlessError
from regretless.modeling.load import (
    ADAPTER,
    ModelConfig,
    best_device,
    load_model,
    load_tokenizer,
    put_adapter,
    stored_dtype,
)
from regretless.modeling.quantization import quantization_of
from regretless.training.model_card import CARD, read_facts, write_card
from regretless.training.upload import tokenizer_files

MERGE_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Most that the mean |difference| of a token's log-probability (nats) may be, by the type of the merged weights: they
are rounded once, to 24, 11 or 8 bits."""
SHARE = 0.25
"""Most that this difference may be of the change that the adapter makes: an adapter of small weights would otherwise
pass whatever became of it."""
ROUNDING_NOISE = 1e-5
"""Nats; a change of this size cannot be told from rounding in float32."""
CHECKED_SEQUENCES, CHECKED_LENGTH = 8, 48


@dataclass(frozen=True)
class Merged:
    """A merged model, and how it compares with the adapter on its base."""

    folder: Path
    dtype: str
    difference: float
    """Mean |difference| of a token's log-probability between adapter and merged model, nats."""
    largest: float
    """The largest of these differences."""
    change: float
    """Mean |difference| between the base model and the adapter on it: what the adapter does."""

    def __str__(self) -> str:
        return (
            f"mean |difference| of log-probabilities {self.difference:.2g} nats per token (largest {self.largest:.2g}; "
            f"tolerance {MERGE_TOLERANCE[self.dtype]:g} in {self.dtype}), where the adapter changes them by "
            f"{self.change:.2g}"
        )


def merge_adapter(adapter: Path, out: Path, *, base: str | None = None, dtype: str = "auto") -> Merged:
    """Merge an adapter into the weights of `base` (default: the one that it names) and write the model to `out`.

    The sum is taken in float32 and rounded once, to `dtype` (auto: the type of the base's weights). An adapter that was
    trained on a base in 4 bits is merged into the weights that these stand for, unless `base` names another: the merged
    model has the full size. Tokenizer and card come along. The written model is read back and compared with the adapter
    on its base, on random token sequences.
    Raises ConfigError for what cannot be merged; RegretlessError, with nothing written, if the two differ by more than
    the rounding of the type explains.
    """
    config = _config(adapter)
    _check_out(out)
    name = base or str(config.base_model_name_or_path or "")
    if not name:
        raise ConfigError(f"{adapter}: its {ADAPTER} names no base model; name one with --base")
    if dtype not in ("auto", *MERGE_TOLERANCE):
        raise ConfigError(f"dtype: expected auto, {', '.join(MERGE_TOLERANCE)}, got {dtype}")
    settings = ModelConfig(name_or_path=name, revision=None if base else config.revision, dtype="float32")
    kind = stored_dtype(settings) if dtype == "auto" else dtype
    if kind not in MERGE_TOLERANCE:
        raise ConfigError(f"{name}: its weights are {kind}; name the type of the merged ones with --dtype")
    quantization = None if base else quantization_of(str(adapter), None)
    if quantization is not None:
        # Computed in float32, so that the two differ by the rounding of the merged weights alone.
        exact = quantization.model_copy(update={"bnb_4bit_compute_dtype": "float32"})
        settings = settings.model_copy(update={"quantization": exact})
    loaded: Any = load_model(settings)
    if quantization is None and getattr(loaded.config, "quantization_config", None) is not None:
        raise ConfigError(f"{name}: its weights are quantized; name the model that was quantized with --base")
    model: Any = put_adapter(loaded, str(adapter), None, trainable=False).eval()
    has_own = (adapter / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(ModelConfig(name_or_path=name, tokenizer=str(adapter) if has_own else None))
    tokens = _some_tokens(model, tokenizer)
    before = _logps(model, tokens)
    with model.disable_adapter():
        change = float((_logps(model, tokens) - before).abs().mean())
    if quantization is not None:
        # peft would quantize the sum again, with an error that is larger than what many adapters change.
        plain: Any = load_model(settings)
        model = put_adapter(plain.dequantize(dtype=torch.float32), str(adapter), None, trainable=False).eval()
    merged: PreTrainedModel = _merge(model, adapter).to(getattr(torch, kind))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        staging = Path(temporary) / "model"
        merged.save_pretrained(staging)
        del model, merged
        _copy_tokenizer(adapter if has_own else None, tokenizer, staging)
        difference = (_logps(_read_back(staging), tokens) - before).abs()
        result = Merged(out, kind, float(difference.mean()), float(difference.max()), change)
        _check(result)
        _copy_card(adapter, staging, result)
        if out.is_dir():
            out.rmdir()
        staging.rename(out)
    return result


def _config(adapter: Path) -> Any:
    if not (adapter / ADAPTER).is_file():
        raise ConfigError(
            f"{adapter}: expected an adapter's folder, found no {ADAPTER}; a whole model needs no merging"
        )
    return PeftConfig.from_pretrained(str(adapter))


def _check_out(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out}: exists already; choose another folder, or remove it")


def _merge(model: PeftModel, adapter: Path) -> Any:
    merge = getattr(model.base_model, "merge_and_unload", None)
    if merge is None:
        raise ConfigError(f"{adapter}: peft cannot merge an adapter of this kind ({type(model.base_model).__name__})")
    tying = _untie(model)
    try:
        merged: Any = merge(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{adapter}: peft cannot merge this adapter: {error}") from error
    if tying and torch.equal(merged.get_output_embeddings().weight, merged.get_input_embeddings().weight):
        merged.get_output_embeddings().weight = merged.get_input_embeddings().weight
        for config in tying:
            config.tie_word_embeddings = True
    return merged


def _untie(model: PeftModel) -> list[PretrainedConfig]:
    """Give the head its own weights where it shares those of the input embeddings; the configurations that said so.

    A merge would otherwise change both where the adapter changes one of them.
    """
    configs = [model.config, model.config.get_text_config()]
    tying = [config for config in configs if getattr(config, "tie_word_embeddings", False)]
    if tying:
        head = _without_peft(model.get_output_embeddings())
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in tying:
        config.tie_word_embeddings = False
    return tying


def _without_peft(layer: Any) -> Any:
    """A layer without what peft has put around it."""
    while (inner := getattr(layer, "base_layer", None) or getattr(layer, "original_module", None)) is not None:
        layer = inner
    return layer


def _some_tokens(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(sequences, length) random ids without special ones: any text has such tokens, and no data is needed."""
    # Not the layer's own number: peft's layers around it have none.
    size = min(len(tokenizer), model.config.get_text_config().vocab_size)
    special = set(tokenizer.all_special_ids)
    usable = torch.tensor([number for number in range(size) if number not in special])
    drawn = torch.randint(len(usable), (CHECKED_SEQUENCES, CHECKED_LENGTH), generator=torch.Generator().manual_seed(0))
    return usable[drawn]


@torch.no_grad()
def _logps(model: Any, tokens: Tensor) -> Tensor:
    """(sequences, length − 1) log-probability (nats) of each token after those before it, in float32."""
    tokens = tokens.to(model.device)
    rows = [model(input_ids=row.unsqueeze(0)).logits[0, :-1].float().log_softmax(dim=-1) for row in tokens]
    return torch.stack([row.gather(1, ids[1:, None])[:, 0] for row, ids in zip(rows, tokens, strict=True)]).cpu()


def _read_back(folder: Path) -> Any:
    """The model as transformers reads it, computing in float32: what differs is the rounding of the weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(best_device()).eval()


def _check(result: Merged) -> None:
    too_far = not result.difference <= MERGE_TOLERANCE[result.dtype]  # NaN too
    lost = result.change > 2 * ROUNDING_NOISE and not result.difference <= SHARE * result.change
    if too_far or lost:
        advice = (
            f"rounding to {result.dtype} may lose small changes: try --dtype float32"
            if result.dtype != "float32"
            else "the base may not be the one that the adapter was trained on; name it with --base"
        )
        raise RegretlessError(
            f"{result.folder}: not written, because the merged model does not compute what base and adapter do: "
            f"{result}, of which at most {SHARE:.0%} may be lost; {advice}"
        )


def _copy_tokenizer(source: Path | None, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """The adapter's own tokenizer files as they are; else the base's tokenizer."""
    if source is None:
        tokenizer.save_pretrained(target)
        return
    for name in tokenizer_files(source):
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _copy_card(adapter: Path, target: Path, result: Merged) -> None:
    facts = read_facts(adapter)
    if facts is not None:
        said = f"Adapter and merged model differ in a {result}."
        write_card(target, dataclasses.replace(facts, name=f"{facts.name}-merged", merged=said, report=None))
    elif (adapter / CARD).is_file():
        shutil.copyfile(adapter / CARD, target / CARD)
