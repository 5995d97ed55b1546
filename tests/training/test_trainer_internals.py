"""What training needs of transformers' private parts, and what is said when another version has them no longer."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from transformers import PretrainedConfig, Trainer, TrainingArguments

from regretless.core.errors import ConfigError
from regretless.training.trainer import PreferenceTrainer
from regretless.training.trainer_internals import METHODS, HookedTrainer, check_internals, internal_problems

OVERRIDDEN = {name: method for name, method in vars(HookedTrainer).items() if name in METHODS}


def test_private_methods_when_overridden_then_each_is_listed_and_called_by_transformers() -> None:
    """An override of a name that transformers does not call any more would do nothing, without an error."""
    overrides = {
        name
        for kind in (HookedTrainer, PreferenceTrainer)
        for name in vars(kind)
        if name.startswith("_") and not name.startswith("__") and hasattr(Trainer, name)
    }
    assert overrides - {"_tag_names"} <= METHODS.keys()
    source = inspect.getsource(transformers.trainer)
    called = {name for name in METHODS if f"self.{name}(" in source}
    assert called == METHODS.keys()


def test_training_when_it_saves_and_resumes_then_every_overridden_method_is_called(
    make_trainer: Callable[..., Any], pairs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(self, *args, **kwargs)

        return call

    for name, method in OVERRIDDEN.items():
        monkeypatch.setattr(HookedTrainer, name, counted(name, method))
    monkeypatch.setattr(HookedTrainer, "init_hf_repo", lambda self, **_: setattr(self, "push_in_progress", None))
    monkeypatch.setattr(HookedTrainer, "_upload", lambda *_, **__: None)
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    settings |= {"push_to_hub": True, "hub_model_id": "someone/model", "hub_token": "hf_none"}
    settings |= {"load_best_model_at_end": True, "lora": False, "objective": "dpo", "eval_dataset": pairs}
    make_trainer(**settings).train()
    make_trainer(**settings).train(resume_from_checkpoint=True)
    assert calls.keys() == OVERRIDDEN.keys()


class _Changed(Trainer):
    """A Trainer of another version: one method is gone, another one has other parameters."""

    _run_epoch = None

    def _get_grad_norm(self, model: Any) -> Any:
        """As before, without the norm."""


def linear(step: int) -> float:
    """Of 12 steps, the first 3 warmup."""
    return step / 3 if step < 3 else (12 - step) / 9


def cosine(step: int) -> float:
    return step / 3 if step < 3 else (1 + math.cos(math.pi * (step - 3) / 9)) / 2


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_schedule_when_trainings_have_parts_of_it_then_each_goes_on_where_the_one_before_ended_resumed_or_not(
    schedule: Callable[[int], float], make_trainer: Callable[..., Any]
) -> None:
    settings = {"objective": "dpo", "max_steps": 4, "learning_rate": 0.01, "warmup_steps": 0.25, "save_steps": 2}
    settings |= {"lr_scheduler_type": schedule.__name__, "save_strategy": "steps"}

    def rates(number: int, checkpoint: str | None = None) -> list[float]:
        trainer = make_trainer(**settings, schedule_part=[number, 3])
        trainer.train(resume_from_checkpoint=checkpoint and f"{trainer.args.output_dir}/{checkpoint}")
        return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]

    expected = [0.01 * schedule(step) for step in range(12)]
    found = [rate for number in (1, 2, 3) for rate in rates(number)]
    assert found == pytest.approx(expected, rel=1e-9)
    assert rates(3, "checkpoint-2") == pytest.approx(expected[8:], rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schedule_part": [3, 2]}, r"schedule_part: expected .* \[3, 2\]"),
        ({"schedule_part": [0, 2]}, r"schedule_part: expected .* \[0, 2\]"),
        ({"schedule_part": [1.0, 2]}, r"schedule_part: expected .* \[1.0, 2\]"),
        ({"schedule_part": [2]}, r"schedule_part: expected .* \[2\]"),
        (
            {"schedule_part": [1, 2], "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "schedule_part: .* follows what is measured",
        ),
    ],
)
def test_schedule_when_it_has_no_such_part_then_construction_says_so(
    arguments: dict[str, Any], said: str, make_trainer: Callable[..., Any], pairs: list[Any]
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trainer(objective="dpo", max_steps=2, eval_dataset=pairs, **arguments)


def test_schedule_when_a_script_passes_one_then_a_part_of_it_is_refused(
    make_trainer: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    passed = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    with pytest.raises(ConfigError, match="schedule_part: a schedule was passed"):
        make_trainer(objective="dpo", model=model, lora=False, optimizers=passed, schedule_part=[1, 2])


def test_trainer_when_transformers_has_changed_then_construction_names_the_methods_and_what_to_do(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert internal_problems() == []
    with pytest.raises(ConfigError, match=r"^transformers \d.*: 2 problem\(s\)") as caught:
        check_internals(_Changed)
    gone, other = caught.value.problems
    assert gone.startswith("Trainer._run_epoch is gone; it is needed so that a checkpoint after the last step")
    assert other.startswith("Trainer._get_grad_norm has no parameter grad_norm; it is needed so that training stops")
    assert "; install transformers 5.17.0 to 5.24.0, or adapt training/trainer_internals.py" in gone
    monkeypatch.delattr(Trainer, "_finish_current_push")
    with pytest.raises(ConfigError, match=r"Trainer\._finish_current_push is gone"):
        make_trainer(objective="dpo")


@pytest.mark.parametrize("name", ["_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"])
def test_checkpoint_when_a_sum_of_the_loss_has_another_name_then_it_is_said_and_not_left_out(
    name: str, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(objective="dpo", max_steps=1)
    trainer.train()
    delattr(trainer, name)
    with pytest.raises(ConfigError, match=rf"Trainer has no {name} in training, which checkpoints hold; install"):
        trainer._log_state.save(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "user"),
    [
        (PretrainedConfig, "_attn_implementation", "modeling/forward.py replaces the attention by it"),
        (torch.nn.Module, "_compiled_call_impl", "modeling/compiled_layers.py compiles layers by it"),
        (TrainingArguments, "_VALID_DICT_FIELDS", "PreferenceConfig reads JSON by it"),
    ],
)
def test_private_attribute_when_a_module_needs_it_then_the_library_has_it(owner: type, name: str, user: str) -> None:
    assert hasattr(owner, name), f"{owner.__name__}.{name} is gone: {user}"
