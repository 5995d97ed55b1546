"""Resuming from a checkpoint of another training, and from a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftModel, get_peft_model
from test_trainer import Make
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.core.files import read_json, write_json
from regretless.training.resuming import FILE, Start
from regretless.training.trainer import PreferenceTrainer

SAVED = {"objective": "dpo", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def stopped(make_trainer: Make, **more: Any) -> Path:
    """The checkpoint at half of a training."""
    trainer = make_trainer(**SAVED, **more)
    trainer.train()
    return Path(trainer.args.output_dir) / "checkpoint-2"


def test_resume_when_the_model_is_the_checkpoint_then_it_is_refused_because_its_reference_is_another(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = stopped(make_trainer, lora=False)
    half_trained = type(make_trainer(lora=False).model).from_pretrained(checkpoint)
    with pytest.raises(ConfigError, match=r"checkpoint-2 was trained with another reference: .*this training began"):
        make_trainer(**SAVED, lora=False, model=half_trained).train(resume_from_checkpoint=str(checkpoint))
    capsys.readouterr()
    make_trainer(**SAVED, lora=False).train(resume_from_checkpoint=str(checkpoint))
    assert "another start" not in capsys.readouterr().err


def test_resume_when_settings_differ_from_the_checkpoint_then_a_note_names_them(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = stopped(make_trainer)
    capsys.readouterr()
    other = make_trainer(**{**SAVED, "objective": "ipo"}, adapter={"lora_alpha": 64}, seed=7)
    other.train(resume_from_checkpoint=str(checkpoint))
    assert "than this run's: objective, seeds, adapter" in " ".join(capsys.readouterr().err.split())


def test_resume_when_a_step_has_another_number_of_pairs_then_it_is_refused_with_the_value_to_set(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = stopped(make_trainer)
    started = read_json(checkpoint / FILE)
    assert started["pairs_per_step"] == 5
    trainer = make_trainer(**SAVED, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"with 5 pairs in .* has 4, .*_size 4 × 1 .*_size to 5$"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 0
    start = Start(**{**started, "pairs_per_step": 8})
    with pytest.raises(ConfigError, match=r"with 5 pairs in .* has 8, .*_size 4 × 2 .*; resume on .* divides 5$"):
        start.check(checkpoint, same_bytes=True, parts=2)
    # A checkpoint that does not say it is resumed.
    write_json(checkpoint / FILE, {name: value for name, value in started.items() if name != "pairs_per_step"})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 4 and "another start" not in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["damaged", "rank", "layers"])
def test_resume_when_the_checkpoint_does_not_fit_then_one_line_names_it(fault: str, make_trainer: Make) -> None:
    checkpoint = stopped(make_trainer)
    adapter: dict[str, Any] = {}
    if fault == "damaged":
        file = checkpoint / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:500])
    else:
        adapter = {"r": 2} if fault == "rank" else {"target_modules": ["q_proj"]}
    what = (
        "was trained with another reference" if fault == "layers" else "cannot be loaded into this model and optimizer"
    )
    with pytest.raises(ConfigError, match=f"checkpoint-2 {what}: "):
        make_trainer(**SAVED, adapter=adapter).train(resume_from_checkpoint=str(checkpoint))


def test_reference_when_an_adapters_scale_differs_then_no_values_are_shared(
    make_model: Callable[..., PreTrainedModel], make_trainer: Make
) -> None:
    def first_margin(alpha: int) -> float:
        policy: Any = get_peft_model(make_model(), LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"]))
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.data.fill_(0.1)
        trainer = make_trainer(model=policy, lora=False, objective="dpo", max_steps=1)
        trainer.train()
        assert isinstance(trainer.model, PeftModel) and isinstance(trainer, PreferenceTrainer)
        return float(trainer.state.log_history[0]["rewards/margins"])

    assert first_margin(4) == pytest.approx(0, abs=1e-6)
    assert first_margin(64) == pytest.approx(0, abs=1e-6)
