"""A tiny writer and a tiny reference over sixteen words, and responses of which some are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from regretless.data.columns import Verdict
from regretless.labeling.base import Check, Verifier
from regretless.labeling.verifiers import VERIFIERS
from regretless.modeling.load import ModelConfig
from regretless.world.tiny_models import smoke_architecture

WORDS = ["<end>", "a", "b", "\n", "7"]
"""Texts are a few of these, without spaces; a response is right if it has a 7."""


def _checked(response: str, answer: str) -> Check:
    return Check(Verdict.CORRECT if answer in response else Verdict.WRONG, "looked for", answer)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], ModelConfig]:
    """Models with random weights, by their seed; the verifier `has` looks for the answer."""
    monkeypatch.setitem(VERIFIERS, "has", Verifier(check=_checked, quick=_checked))
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<end>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    architecture = {**smoke_architecture("qwen3", len(WORDS)), "initializer_range": 0.3}

    def model(seed: int) -> ModelConfig:
        return ModelConfig(architecture=architecture, tokenizer=str(tmp_path / "tokenizer"), init_seed=seed)

    return model


@pytest.fixture
def prompts(tmp_path: Path) -> dict[str, Any]:
    """Four prompts with the answer 7, as settings."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in ("a", "ab", "ba", "bb")))
    return {"dataset": str(path), "answer_column": "answer"}
