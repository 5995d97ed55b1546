from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from regretless.world.tiny_models import smoke_architecture

WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(14))]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small stage: 12 prompts of one to four words, two samples each from one model."""
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [{"prompt": " ".join(["w1"] * (1 + number % 4)), "answer": number} for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    architecture = {**smoke_architecture("qwen3", len(WORDS)), "initializer_range": 0.2}
    return {
        "prompts": {"dataset": str(tmp_path / "prompts.jsonl"), "answer_column": "answer"},
        "models": [{"architecture": architecture, "tokenizer": str(tmp_path / "tokenizer")}],
        "n": 2,
        "max_new_tokens": 6,
        "batch_size": 5,
        "seed": 3,
    }
