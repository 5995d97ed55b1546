"""The reference of adapters that do not leave the model's own weights alone, and checkpoints under other names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_trainer import Make, chosen_logps, logits_of, weights_of
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError, NonFiniteLossError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.training_folder import list_files, load_weights
from regretless.training import trainer as trainer_module
from regretless.training.reference import ReferenceLogps
from regretless.training.trainer import PreferenceTrainer

MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def furthest_reference(trainer: PreferenceTrainer, model: PreTrainedModel, pairs: list[TokenizedPair]) -> float:
    """Nats by which a reference log-probability differs from that of `model`, at most."""
    known = trainer._reference_logps
    assert known is not None
    responses = [(pair.prompt_ids, side.ids) for pair in pairs for side in (pair.chosen, pair.rejected)]
    gaps = [chosen_logps(logits_of(model, *one), one[1]).detach() - torch.from_numpy(known[one]) for one in responses]
    return float(torch.cat(gaps).abs().max())


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_adapter_when_it_takes_a_part_of_the_weights_then_the_reference_is_the_model_that_was_given(
    start: str, make_trainer: Make, make_model: Callable[..., PreTrainedModel], pairs: list[TokenizedPair]
) -> None:
    # TDPO reads the reference's distributions at every step, for which it needs a copy.
    for method in ("dpo", "tdpo"):
        trainer = make_trainer(adapter={"init_lora_weights": start}, objective=method, eval_dataset=pairs[:6])
        before = trainer.evaluate()
        assert furthest_reference(trainer, make_model(), pairs[:6]) < 1e-4
        assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
        trainer.train()
        assert furthest_reference(trainer, make_model(), pairs) < 1e-4


def test_adapter_when_biases_are_trained_too_then_the_reference_keeps_those_of_the_start_and_is_cached_by_them(
    make_trainer: Make, make_model: Callable[..., PreTrainedModel], pairs: list[TokenizedPair], tmp_path: Path
) -> None:
    def biased(by: float) -> PreTrainedModel:
        model = make_model(model_type="qwen2")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("bias"):
                    weight.fill_(by)
        return model

    options: dict[str, Any] = {"adapter": {"bias": "all"}, "objective": "tdpo"}
    trainer = make_trainer(model=biased(0.5), **options)
    trainer.train()
    assert trainer.reference.frozen is not None
    assert furthest_reference(trainer, biased(0.5), pairs) < 1e-4
    frozen = {name: weight for name, weight in trainer.reference.frozen.named_parameters() if name.endswith("bias")}
    assert frozen and all(bool((weight == 0.5).all()) for weight in frozen.values())
    # Models that differ in trained biases only have no values in common.
    for by in (0.0, 1.0):
        trainer = make_trainer(
            model=biased(by), adapter={"bias": "all"}, objective="dpo", reference_cache_dir=str(tmp_path / "one")
        )
        trainer.prepare_reference()
        assert furthest_reference(trainer, biased(by), pairs) < 1e-4


def test_mixture_when_all_weights_are_trained_then_resuming_and_the_best_model_have_their_experts(
    make_trainer: Make, make_model: Callable[..., PreTrainedModel], pairs: list[TokenizedPair], tmp_path: Path
) -> None:
    def make(folder: str, **more: Any) -> PreferenceTrainer:
        options: dict[str, Any] = {"lora": False, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}
        return make_trainer(model=make_model(**MIXTURE), output_dir=str(tmp_path / folder), **(options | more))

    whole = make("whole")
    whole.train()
    expected = weights_of(whole)
    with safe_open(tmp_path / "whole" / "checkpoint-3" / "model.safetensors", "pt") as file:
        assert not any("experts.gate_up_proj" in name for name in file.keys())  # noqa: SIM118
    resumed = make("whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert {name: torch.equal(weight, expected[name]) for name, weight in weights_of(resumed).items()} == dict.fromkeys(
        expected, True
    )
    # The first evaluation is the best one: with this rate, training makes it worse.
    evaluated = {"eval_dataset": pairs[:6], "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    best = make("best", **evaluated, metric_for_best_model="eval_rewards/margins", greater_is_better=False)
    best.train()
    assert best.state.best_model_checkpoint is not None
    kept = make_model(**MIXTURE)
    load_weights(kept, Path(best.state.best_model_checkpoint))
    found = dict(kept.named_parameters())
    assert all(torch.equal(weight, found[name]) for name, weight in weights_of(best).items())
    assert best.state.best_global_step < best.state.global_step

    # A checkpoint without a weight is refused: what is not loaded would stay as it was.
    file = tmp_path / "whole" / "checkpoint-3" / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    list_files(file.parent)
    with pytest.raises(ConfigError, match=r"missing_keys: model\.norm\.weight"):
        make("whole").train(resume_from_checkpoint=str(file.parent))


@pytest.mark.parametrize("scale", [2.0**127, 1.0])
def test_gradient_in_fp16_when_it_overflows_then_the_step_is_skipped_as_long_as_the_scale_can_fall(
    scale: float, make_trainer: Make
) -> None:
    # Accelerate makes a scaler on GPUs only.
    trainer = make_trainer(objective="dpo", num_train_epochs=1, fp16=True)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-120)
    trainer.accelerator.native_amp = True
    if scale == 1:
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * float("inf"))
        with pytest.raises(NonFiniteLossError, match="step 1: gradient norm is"):
            trainer.train()
        return
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**7
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert not math.isfinite(norms[0]) and math.isfinite(norms[-1]) and norms[-1] > 0


def test_prediction_when_rows_are_given_then_it_has_their_rewards(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    trainer = make_trainer(objective="dpo", eval_dataset=pairs[:4])
    trainer.train()
    found = trainer.predict(pairs[:4])
    assert found.predictions.shape == (4, 2)
    margins = found.predictions[:, 0] - found.predictions[:, 1]
    assert found.metrics["test_rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert abs(margins).max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_single_tokens_when_trained_beside_an_adapter_then_they_learn(
    tied: bool, make_trainer: Make, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model(model_type="llama", tie_word_embeddings=tied)
    trainer = make_trainer(model=model, adapter={"trainable_token_indices": [5, 6, 7]}, objective="dpo")
    before = weights_of(trainer)
    trainer.train()
    moved = [name for name, weight in weights_of(trainer).items() if not torch.equal(weight, before[name])]
    assert any("trainable_tokens" in name for name in moved)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_training_step_when_the_reference_is_not_computed_then_it_says_what_to_call(
    objective: str, make_trainer: Make
) -> None:
    trainer = make_trainer(objective=objective)
    with pytest.raises(ConfigError, match=r"call prepare_reference\(\) first"):
        trainer.training_step(trainer.model, list(trainer.train_dataset))


def test_reference_when_another_run_writes_into_its_folder_then_what_was_there_at_its_opening_counts(
    tmp_path: Path,
) -> None:
    items, values = [((1,), (2, 3)), ((1,), (4,))], [np.float32([-1, -2]), np.float32([-3])]
    opened, other = ReferenceLogps(tmp_path), ReferenceLogps(tmp_path)
    other.compute(items, lambda part: values)
    other.mark("data")
    assert not opened.covers("data") and list(opened.missing(items)) == items
    again = ReferenceLogps(tmp_path)
    assert other.covers("data") and again.covers("data") and again[items[1]].tolist() == [-3]
    # A process that does not write knows it too; and one where another process does not see the mark does not.
    opened.mark("more", writes=False)
    assert opened.covers("more") and not (tmp_path / "more.complete").exists()
    behind = ReferenceLogps(tmp_path, lambda names: [name for name in names if name.startswith("part-")])
    assert not behind.covers("data") and not list(behind.missing(items))


def test_reference_when_another_process_sees_fewer_values_then_all_compute_what_it_lacks(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scored: list[int] = []

    def prepare(others: Callable[[list[str]], list[str]]) -> None:
        monkeypatch.setattr(trainer_module, "gather_object", lambda seen: [*seen, *map(others, seen)])
        trainer = make_trainer(objective="dpo", reference_cache_dir=str(tmp_path / "reference"))
        score = trainer._score_reference
        monkeypatch.setattr(trainer, "_score_reference", lambda items: scored.append(len(items)) or score(items))
        trainer.prepare_reference()

    prepare(list)
    prepare(list)
    assert len(scored) == 1 and scored[0] > 40
    prepare(lambda names: [])
    assert scored == [scored[0]] * 2


def test_runtime_when_the_reference_was_computed_before_the_steps_then_it_and_the_speeds_include_that(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(objective="dpo", max_steps=2)
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=iter([5.0, 105.0]).__next__))
    metrics = trainer.train().metrics
    (line,) = [line for line in trainer.state.log_history if "train_runtime" in line]
    assert metrics["train_runtime"] == line["train_runtime"] > line["reference_runtime"] == 100.0
    # Two steps of five pairs.
    assert line["train_samples_per_second"] == pytest.approx(10 / line["train_runtime"], abs=1e-3)
    assert line["train_steps_per_second"] == pytest.approx(2 / line["train_runtime"], abs=1e-3)
