"""What goes to the hub: the model and what says how it was made, and nothing that holds training data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.hf_api
import pytest
from huggingface_hub import CommitInfo, HfApi, RepoUrl
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from regretless.modeling.load import ModelConfig
from regretless.training import train as stage
from regretless.training.train_config import TrainConfig
from regretless.training.trainer import PreferenceTrainer

WORDS = ["w4", "w5", "w6", "w8", "w9"]
ROWS = [{"prompt": a, "chosen": f"{a} {b} w8", "rejected": f"{b} w9"} for a in WORDS for b in WORDS]
REFUSED = {"prompt": "w4", "chosen": "w5", "rejected": "w5"}
HUB: dict[str, Any] = {"push_to_hub": True, "hub_model_id": "someone/model", "hub_token": "hf_none"}


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Content of every file that the hub was sent, by its place there: only the network is not real."""
    found: dict[str, bytes] = {}

    def create_repo(self: HfApi, repo_id: str, **_: Any) -> RepoUrl:
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self: HfApi, repo_id: str, operations: Any, **_: Any) -> CommitInfo:
        for operation in operations:
            with operation.as_file() as handle:
                found[operation.path_in_repo] = handle.read()
        url = f"https://huggingface.co/{repo_id}/commit/0"
        return CommitInfo(commit_url=url, commit_message="", commit_description="", oid="0")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda *_, **__: None)  # asks the hub about the model card
    monkeypatch.setattr(huggingface_hub.hf_api, "is_xet_available", lambda: False, raising=False)
    return found


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, REFUSED]))
    return tmp_path / "pairs.jsonl"


def assert_without_data(uploaded: dict[str, bytes], caches: Path) -> None:
    """Nothing of the caches was sent, nor the text of a row; and the caches are there."""
    kept = [path for path in caches.rglob("*") if path.is_file()]
    assert {"records.bin", "index.npz", "refused.jsonl"} <= {path.name for path in kept}
    assert any(path.name.startswith("part-") for path in kept)
    assert any(path.name.startswith("refused-") for path in kept)
    assert not {path.name for path in kept} & {Path(name).name for name in uploaded}
    for path in kept:
        content = path.read_bytes()
        assert not content or content not in uploaded.values(), path
    for name, content in uploaded.items():
        assert b"w4 w5 w8" not in content, name


@pytest.mark.parametrize("strategy", ["every_save", "all_checkpoints"])
def test_trainer_when_it_pushes_then_the_model_is_sent_and_no_training_data(
    strategy: str, uploaded: dict[str, bytes], make_trainer: Callable[..., PreferenceTrainer], pairs_file: Path
) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "hub_strategy": strategy, **HUB}
    trainer = make_trainer(data=str(pairs_file), objective="dpo", **options)
    trainer.train()
    trainer._finish_current_push()
    assert "adapter_model.safetensors" in uploaded
    trainer.push_to_hub()
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= uploaded.keys()
    assert any(name.startswith("checkpoint-") for name in uploaded) == (strategy == "all_checkpoints")
    assert_without_data(uploaded, trainer.args.cache_dir)


def test_stage_when_it_pushes_then_the_model_is_sent_once_and_no_training_data(
    uploaded: dict[str, bytes],
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    pairs_file: Path,
    tmp_path: Path,
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = TrainConfig(lora=None, objective="dpo", max_steps=2, eval_pairs=5, use_cpu=True, **HUB)
    model = ModelConfig(name_or_path=str(tmp_path / "model"))
    stage.run(config, "dpo", model, pairs_file, tmp_path / "run" / "dpo")
    weights = [name for name in uploaded if name.endswith(".safetensors")]
    assert weights == ["model.safetensors"]
    assert uploaded["model.safetensors"] == (tmp_path / "run" / "dpo" / "model.safetensors").read_bytes()
    assert_without_data(uploaded, tmp_path / "run" / "dpo.cache")
