"""The trainer checks its model where it trains: placed, in the training precision, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from regretless import PreferenceConfig, PreferenceTrainer
from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling import model_check


def trainer_of(model: PreTrainedModel, tokenizer: Any, pairs: Any, folder: Path, **more: Any) -> PreferenceTrainer:
    arguments = {"max_steps": 1, "report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 4}
    return PreferenceTrainer(
        model,
        args=PreferenceConfig(output_dir=str(folder), save_strategy="no", **(arguments | more)),
        train_dataset=pairs,
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("objective", ["dpo", "sft"])
def test_training_when_a_layer_mixes_tokens_then_it_is_refused_before_references_and_steps(
    objective: str,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model()
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, output: output + 1e-4 * output.roll(1, dims=1))
    trainer = trainer_of(model, tokenizer, pairs, tmp_path, objective=objective)
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp \(\w+\) mixes tokens"):
        trainer.train()
    assert not (tmp_path / "reference").exists()
    with pytest.raises(ConfigError, match="mixes tokens"):
        trainer.evaluate(pairs)


@pytest.mark.parametrize("bf16", [False, True])
def test_training_when_it_begins_then_the_model_has_passed_once_in_the_precision_that_trains(
    bf16: bool,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[TokenizedPair],
    make_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[bool] = []
    run = model_check.ModelCheck.run
    monkeypatch.setattr(
        model_check.ModelCheck,
        "run",
        lambda self: (runs.append(torch.is_autocast_enabled(self.device.type)), run(self))[1],
    )
    model = make_model()
    trainer = trainer_of(model, tokenizer, pairs, tmp_path, objective="kto", bf16=bf16, use_cpu=True, max_steps=2)
    assert runs == []
    trainer.train()
    assert runs == [bf16]
    assert trainer._rows == "grouped"
    lengths = [len(p.prompt_ids) + max(len(p.chosen.ids), len(p.rejected.ids or ())) for p in pairs]
    assert trainer.train_dataset.longest >= max(lengths)
