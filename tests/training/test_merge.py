"""Adapters merged into their base: equal log-probabilities, and refused where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft.tuners.lora.layer
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from regretless.core.errors import ConfigError, RegretlessError
from regretless.training.merge import MERGE_TOLERANCE, merge_adapter

TEMPLATES = {"default": "{{ messages }}", "tool_use": "{{ tools }}{{ messages }}"}


def save_adapter(
    base: Path, folder: Path, *, size: float = 0.1, dtype: torch.dtype = torch.float32, **settings: Any
) -> Path:
    """A base model in a type, and an adapter on it, with these settings and with weights that do something."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "base")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(loaded, LoraConfig(**(lora | settings)))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            weight.data = size * torch.randn_like(weight) + (0 if "lora_" in name else weight.data)
    adapted.save_pretrained(folder / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATES
    tokenizer.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_when_done_then_transformers_computes_what_the_adapter_did_in_the_bases_type(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(model, tmp_path, dtype=getattr(torch, dtype))
    result = merge_adapter(adapter, tmp_path / "merged")
    assert result.dtype == dtype
    assert result.difference <= MERGE_TOLERANCE[dtype]
    assert result.change > 10 * result.difference
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(adapter).get_vocab()
    assert tokenizer.chat_template == TEMPLATES
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, adapter)(ids).logits.log_softmax(-1)
        found = merged.float()(ids).logits.log_softmax(-1)
    assert (expected - found).abs().mean() <= MERGE_TOLERANCE[dtype]


def test_merge_with_a_wrong_scale_when_checked_then_nothing_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(model, tmp_path)
    right = peft.tuners.lora.layer.Linear.get_delta_weight
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "get_delta_weight", lambda self, name: 1.5 * right(self, name))
    with pytest.raises(RegretlessError, match="not written, because the merged model does not compute what"):
        merge_adapter(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.fixture(scope="module")
def tied(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model whose head has the weights of its input embeddings."""
    folder = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("base", ["model", "tied"])
@pytest.mark.parametrize(
    ("settings", "stays_tied"),
    [
        ({}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"trainable_token_indices": [5, 6, 7]}, True),
    ],
    ids=["none", "head", "embeddings", "whole head", "tokens"],
)
def test_merge_when_embeddings_are_adapted_then_head_and_embeddings_keep_what_each_has(
    base: str, settings: dict[str, Any], stays_tied: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    adapter = save_adapter(request.getfixturevalue(base), tmp_path, **settings)
    assert merge_adapter(adapter, tmp_path / "merged").difference <= MERGE_TOLERANCE["float32"]
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    is_tied = base == "tied" and stays_tied
    assert merged.config.tie_word_embeddings == is_tied
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == is_tied


def test_merge_when_peft_cannot_then_its_reason_is_given(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(model, tmp_path, lora_bias=True)
    with pytest.raises(ConfigError, match=r"peft cannot merge this adapter: .*base layer has no bias"):
        merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_small_adapter_when_rounding_would_lose_it_then_a_wider_type_is_advised(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(model, tmp_path, size=0.005, dtype=torch.bfloat16)
    with pytest.raises(RegretlessError, match="--dtype float32"):
        merge_adapter(adapter, tmp_path / "merged")
    assert merge_adapter(adapter, tmp_path / "merged", dtype="float32").dtype == "float32"


def test_merge_when_the_folders_are_wrong_then_it_says_what_was_expected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a whole model needs no merging"):
        merge_adapter(model, tmp_path / "merged")
    adapter = save_adapter(model, tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        merge_adapter(adapter, tmp_path / "base")
    with pytest.raises(ConfigError, match="dtype: expected auto, float32, float16, bfloat16, got int8"):
        merge_adapter(adapter, tmp_path / "merged", dtype="int8")
