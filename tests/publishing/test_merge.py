"""Adapters merged into their base: equal log-probabilities, and refused where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft.tuners.lora.layer
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from regretless.core.errors import ConfigError, RegretlessError
from regretless.publishing.merge import TOLERANCE, merge_adapter


def save_adapter(base: Path, folder: Path, *, size: float = 0.1, dtype: torch.dtype = torch.float32) -> Path:
    """A base model in a type, and an adapter on it with weights that do something."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(folder / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "base")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    adapted = get_peft_model(loaded, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=size)
    adapted.save_pretrained(folder / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_when_done_then_transformers_computes_what_the_adapter_did_in_the_bases_type(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    adapter = save_adapter(model, tmp_path, dtype=getattr(torch, dtype))
    result = merge_adapter(adapter, tmp_path / "merged")
    assert result.dtype == dtype
    assert result.difference <= TOLERANCE[dtype]
    assert result.change > 10 * result.difference
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == getattr(torch, dtype)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == (
        AutoTokenizer.from_pretrained(adapter).get_vocab()
    )
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, adapter)(ids).logits.log_softmax(-1)
        found = merged.float()(ids).logits.log_softmax(-1)
    assert (expected - found).abs().mean() <= TOLERANCE[dtype]


def test_merge_with_a_wrong_scale_when_checked_then_nothing_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(model, tmp_path)
    right = peft.tuners.lora.layer.Linear.get_delta_weight
    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "get_delta_weight", lambda self, name: 1.5 * right(self, name))
    with pytest.raises(RegretlessError, match="not written, because the merged model is another one"):
        merge_adapter(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


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
