"""Resuming from a checkpoint of another training, and from a damaged one."""

from __future__ import annotations

import filecmp
import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_trainer import Make, weights_of
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.training_folder import checkpoint_problem, last_complete_checkpoint, list_files
from regretless.training.resuming import START_FILE, Start
from regretless.training.trainer import PreferenceTrainer

SAVED = {"objective": "dpo", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def stopped(make_trainer: Make, **more: Any) -> Path:
    """The checkpoint at half of a training."""
    trainer = make_trainer(**SAVED, **more)
    trainer.train()
    return Path(trainer.args.output_dir) / "checkpoint-2"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the training of `checkpoint` is kept once it is made."""
    return tmp_path_factory.mktemp("stopped") / "out"


@pytest.fixture
def checkpoint(kept: Path, make_trainer: Make, tmp_path: Path) -> Path:
    """The same of plain settings, a copy for each test."""
    if not kept.is_dir():
        shutil.copytree(stopped(make_trainer).parent, kept)
    return Path(shutil.copytree(kept, tmp_path / "out", dirs_exist_ok=True)) / "checkpoint-2"


def test_resume_when_the_model_is_the_checkpoint_then_it_is_refused_because_its_reference_is_another(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = stopped(make_trainer, lora=False)
    half_trained = type(make_trainer(lora=False).model).from_pretrained(checkpoint)
    with pytest.raises(ConfigError, match=r"checkpoint-2 was trained with another reference: .*this training began"):
        make_trainer(**SAVED, lora=False, model=half_trained).train(resume_from_checkpoint=str(checkpoint))
    capsys.readouterr()
    make_trainer(**SAVED, lora=False).train(resume_from_checkpoint=str(checkpoint))
    assert "note: " not in capsys.readouterr().err


FAULTS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "of another step": lambda file: shutil.copy(Path(str(file).replace("checkpoint-4", "checkpoint-2")), file),
}


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "all weights"])
def test_resume_when_files_of_the_last_checkpoint_are_damaged_then_the_one_before_gives_the_undisturbed_weights(
    lora: bool, make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {**SAVED, "max_steps": 6, "lora": lora, "dropout": 0.3 if lora else 0.0}
    whole, out = make_trainer(**options), tmp_path / "out"
    whole.train()
    expected = weights_of(whole)
    shutil.rmtree(out / "checkpoint-6")
    shutil.copytree(out, tmp_path / "kept")
    last, kept = out / "checkpoint-4", tmp_path / "kept" / "checkpoint-4"
    files = [file.name for file in sorted(kept.iterdir())]
    states = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "log_state.json"}
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert {*states, weights, "files.json", "started_with.json"} <= {*files}
    for (fault, damage), name in itertools.product(FAULTS.items(), files):
        damage(last / name)
        chosen, problems = last_complete_checkpoint(out)
        if (last / name).is_file() and filecmp.cmp(last / name, kept / name, False):
            assert (chosen, problems) == (str(last), []), "the file of the other step is the same"
        else:
            # With the list of another step, the first file of the list is not as that one was.
            named = "README.md" if (fault, name) == ("of another step", "files.json") else name
            assert chosen == str(out / "checkpoint-2") and len(problems) == 1, fault
            assert problems[0].startswith(f"checkpoint-4: {named} "), fault
        shutil.copy(kept / name, last / name)
    for damage, name in zip(itertools.cycle(FAULTS.values()), files, strict=False):
        damage(last / name)
    capsys.readouterr()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-4: trainer_state.json is " in said and "; it is not resumed from" in said
    found = weights_of(resumed)
    assert {key: torch.equal(value, found[key]) for key, value in expected.items()} == dict.fromkeys(expected, True)
    assert checkpoint_problem(last) is None, "it was written anew"


def test_resume_when_no_checkpoint_is_complete_then_the_reasons_are_said(
    checkpoint: Path, make_trainer: Make, tmp_path: Path
) -> None:
    (checkpoint / "optimizer.pt").unlink()
    (checkpoint.with_name("checkpoint-4") / "scheduler.pt").unlink()
    problem = (
        r"no complete checkpoint .*\(checkpoint-4: scheduler.pt cannot be .*; checkpoint-2: optimizer.pt cannot be"
    )
    with pytest.raises(ConfigError, match=problem):
        make_trainer(**SAVED).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"checkpoint-2: no complete checkpoint is there: optimizer.pt cannot"):
        make_trainer(**SAVED).train(resume_from_checkpoint=str(checkpoint))


def test_best_model_when_its_checkpoint_is_damaged_then_the_last_model_does_not_take_its_place(
    make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    best: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "eval_rewards/margins", "greater_is_better": False, "eval_dataset": pairs[:6]}
    checkpoint = stopped(make_trainer, **best)
    trainer = make_trainer(**SAVED, **best)
    (checkpoint / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"best_model_at_end: .*checkpoint-2: adapter_model.safetensors cannot be"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(checkpoint)


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt", "rng_state.pth", None])
def test_resume_when_another_trainer_wrote_the_checkpoint_then_its_states_are_required_and_the_rest_is_said(
    missing: str | None, checkpoint: Path, make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("files.json", "log_state.json", "started_with.json"):
        (checkpoint / name).unlink()
    trainer = make_trainer(**SAVED)
    if missing is None:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert "was written by another Trainer: " in capsys.readouterr().err
    else:
        (checkpoint / missing).unlink()
        with pytest.raises(ConfigError, match=f"checkpoint-2: no complete .*: there is no {missing[:9]}"):
            trainer.train(resume_from_checkpoint=str(checkpoint))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 2e-2}, "learning_rate 0.01 then and 0.02 now"),
    "steps": ({"max_steps": 8}, "steps of the whole training 4 then and 8 now"),
    "epochs": ({"max_steps": -1, "num_train_epochs": 1}, "steps of the whole training 4 then and 8 now"),
    "schedule": ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type linear then and cosine now"),
    "warmup": ({"warmup_steps": 2}, "warmup_steps 0 then and 2 now"),
    "optimizer": ({"optim": "sgd"}, "optim adamw_torch(_fused)? then and sgd now"),
    "decay": ({"weight_decay": 0.1}, "weight_decay 0.0 then and 0.1 now"),
    "part": ({"schedule_part": [2, 3]}, "schedule_part not set then and 2 of 3 now"),
    "betas": ({"adam_beta2": 0.9}, "adam_beta2 0.999 then and 0.9 now"),
}
"""Settings that a checkpoint's optimizer and schedule bring with them, and what is said of others."""
NOTED: dict[str, tuple[dict[str, Any], str]] = {
    "objective": ({"objective": "ipo"}, ".*objective.name dpo then and ipo now"),
    "beta": ({"objective_kwargs": {"beta": 0.5}}, "objective.beta 0.1 then and 0.5 now"),
    "seed": ({"seed": 7}, "seed 0 then and 7 now"),
    "alpha": ({"adapter": {"lora_alpha": 64}}, "adapter.0.default.lora_alpha 8 then and 64 now"),
    "clipping": ({"max_grad_norm": 0.5}, "max_grad_norm 1.0 then and 0.5 now"),
}
"""Settings that are in effect from the next step on, and what is said of others."""


@pytest.mark.parametrize(("changed", "said"), OTHERS.values(), ids=OTHERS)
def test_resume_when_optimizer_or_schedule_differ_then_it_is_refused_with_both_values(
    changed: dict[str, Any], said: str, checkpoint: Path, make_trainer: Make
) -> None:
    trainer = make_trainer(**{**SAVED, **changed})
    with pytest.raises(ConfigError, match=f"checkpoint-2 was trained with another optimizer or schedule .*{said}"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(("changed", "said"), NOTED.values(), ids=NOTED)
def test_resume_when_settings_of_the_next_steps_differ_then_a_note_has_both_values(
    changed: dict[str, Any], said: str, checkpoint: Path, make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    make_trainer(**{**SAVED, **changed}).train(resume_from_checkpoint=str(checkpoint))
    note = " ".join(capsys.readouterr().err.split())
    assert re.search(f"with other settings than those of the next steps: {said}", note), note


def test_resume_when_pairs_are_others_then_a_note_says_so(
    checkpoint: Path, make_trainer: Make, pairs: list[TokenizedPair], capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(**SAVED, data=pairs[:-1]).train(resume_from_checkpoint=str(checkpoint))
    assert "data.pairs 40 then and 39 now" in " ".join(capsys.readouterr().err.split())


def test_resume_when_the_schedule_has_no_end_then_training_may_be_longer_and_equals_one_that_was_from_the_start(
    make_trainer: Make, tmp_path: Path
) -> None:
    whole = make_trainer(**{**SAVED, "max_steps": 6}, lr_scheduler_type="constant", output_dir=str(tmp_path / "whole"))
    whole.train()
    checkpoint = stopped(make_trainer, lr_scheduler_type="constant").with_name("checkpoint-4")
    longer = make_trainer(**{**SAVED, "max_steps": 6}, lr_scheduler_type="constant")
    longer.train(resume_from_checkpoint=str(checkpoint))
    expected, found = weights_of(whole), weights_of(longer)
    assert {key: torch.equal(value, found[key]) for key, value in expected.items()} == dict.fromkeys(expected, True)


@pytest.mark.parametrize("given", ["optimizer", "kind"])
def test_resume_when_a_script_has_chosen_the_optimizer_then_its_settings_are_compared(
    given: str, make_model: Callable[..., PreTrainedModel], make_trainer: Make
) -> None:
    def made(rate: float) -> PreferenceTrainer:
        model = make_model()
        chosen: dict[str, Any] = (
            {"optimizers": (torch.optim.Adagrad(model.parameters(), lr=rate), None)}
            if given == "optimizer"
            else {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": rate})}
        )
        return make_trainer(**SAVED, **chosen, model=model, lora=False)

    made(0.1).train()
    with pytest.raises(ConfigError, match=r"optimizer or schedule .*: lr 0.1 then and 0.2 now"):
        made(0.2).train(resume_from_checkpoint=True)
    made(0.1).train(resume_from_checkpoint=True)


def test_resume_when_a_step_has_another_number_of_pairs_then_it_is_refused_with_the_value_to_set(
    checkpoint: Path,
    make_trainer: Make,
) -> None:
    started = read_json(checkpoint / START_FILE)
    assert started["pairs_per_step"] == 5
    trainer = make_trainer(**SAVED, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"with 5 pairs in .* has 4, .*_size 4 × 1 .*_size to 5$"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 0
    start = Start(**{**started, "pairs_per_step": 8})
    with pytest.raises(ConfigError, match=r"with 5 pairs in .* has 8, .*_size 4 × 2 .*; resume on .* divides 5$"):
        start.check(checkpoint, same_bytes=True, parts=2)


@pytest.mark.parametrize("fault", ["damaged", "rank", "layers"])
def test_resume_when_the_checkpoint_does_not_fit_then_one_line_names_it(
    fault: str, checkpoint: Path, make_trainer: Make
) -> None:
    adapter: dict[str, Any] = {}
    if fault == "damaged":
        file = checkpoint / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:500])
        list_files(checkpoint)
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
