"""Weights that come in bfloat16: what is trained changes, what is frozen stays, and what is lost is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from regretless.core.files import write_jsonl
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.load import ModelConfig, load_model
from regretless.training import train as stage
from regretless.training.arguments import PreferenceConfig
from regretless.training.precision import keeps_small_updates, set_trained_dtype, share_lost
from regretless.training.train_config import TrainConfig
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]
SMALL: dict[str, Any] = {"objective": "dpo", "learning_rate": 5e-6, "lr_scheduler_type": "constant", "max_steps": 10}
QUIET: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}


@pytest.fixture
def checkpoint(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., Any]) -> Path:
    """A model as the hub has them: in bfloat16."""
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def numbers(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])


def changed(before: nn.Module, after: nn.Module) -> float:
    return float((numbers(before) != numbers(after)).double().mean())


@pytest.mark.parametrize("route", ["name", "object", "mixed precision", "stage"])
def test_full_training_when_the_checkpoint_is_bfloat16_then_small_updates_reach_the_weights(
    route: str, checkpoint: Path, make_trainer: Make, pairs: list[TokenizedPair], tmp_path: Path
) -> None:
    start = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert start.dtype == torch.bfloat16
    if route == "stage":
        words = ["w4", "w5", "w6", "w8", "w9"]
        rows = [{"prompt": a, "chosen": f"{a} {b} w8", "rejected": f"{b} w9"} for a in words for b in words]
        write_jsonl(tmp_path / "pairs.jsonl", rows)
        # The type in which the other stages load the model says nothing about its training.
        model = ModelConfig(name_or_path=str(checkpoint), dtype="bfloat16")
        config = TrainConfig(lora=None, save_strategy="no", use_cpu=True, **SMALL)
        stage.run(config, "dpo", model, tmp_path / "pairs.jsonl", tmp_path / "out")
        trained: nn.Module = load_model(ModelConfig(name_or_path=str(tmp_path / "out")))
    else:
        given: Any = AutoModelForCausalLM.from_pretrained(checkpoint) if route == "object" else str(checkpoint)
        trainer = make_trainer(model=given, lora=False, bf16=route == "mixed precision", **SMALL)
        trainer.train()
        trained = trainer.model
        trainer.save_model()
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(numbers(saved), numbers(trained))
    assert next(trained.parameters()).dtype == torch.float32
    # Tokens that no pair has, and what is zero in the embedding of the padding, get no gradient.
    assert changed(start, trained) > 0.9


def test_training_when_bfloat16_is_asked_for_then_it_is_used_and_the_share_that_rounding_loses_is_said(
    checkpoint: Path, make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    start = AutoModelForCausalLM.from_pretrained(checkpoint)
    for asked in ({"model_init_kwargs": {"dtype": "bfloat16"}}, {"trained_dtype": "bfloat16"}):
        capsys.readouterr()
        trainer = make_trainer(model=str(checkpoint), lora=False, **(SMALL | {"max_steps": 1}), **asked)
        expected = share_lost(trainer.model.parameters(), 5e-6)
        said = capsys.readouterr().err
        assert trainer.model.dtype == torch.bfloat16
        assert f"the trained weights are bfloat16: at learning rate 5e-06, {expected:.1%} of the updates" in said
        trainer.train()
        # A first step of Adam moves a weight by the learning rate, less where its gradient is small.
        assert 0.95 < expected <= 1 - changed(start, trainer.model) < 1
    make_trainer(model=str(checkpoint), lora=False, trained_dtype="bfloat16", optim="stable_adamw", objective="dpo")
    assert "of the updates" not in capsys.readouterr().err


def test_share_lost_when_worked_out_by_hand_then_half_a_step_is_the_bound() -> None:
    # Between 1 and 2 bfloat16 has steps of 2⁻⁷, below 1 of 2⁻⁸; a tie goes to the even neighbor.
    weights = torch.tensor([1.0, 1.5, 1.0 + 2**-7, 0.0], dtype=torch.bfloat16)
    assert share_lost([weights], 2**-10) == 0.75
    assert share_lost([weights], 2**-8) == 0.25  # 1.5 alone: even, and both ties come back to it
    assert share_lost([weights], 2**-7) == 0.0
    assert share_lost([weights.float()], 2**-10) == 0.0


def adapted(model: PreTrainedModel, **more: Any) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more))


@pytest.mark.parametrize("own", [True, False])
def test_adapter_when_the_base_is_bfloat16_then_it_learns_in_float32_and_the_base_stays(
    own: bool, checkpoint: Path, make_trainer: Make
) -> None:
    base = AutoModelForCausalLM.from_pretrained(checkpoint)
    # A model with an adapter of its own may come in bfloat16 as a whole.
    model = adapted(base).to(torch.bfloat16) if own else base
    trainer = make_trainer(model=model, lora=not own, **SMALL)
    types = {weight.requires_grad: weight.dtype for weight in trainer.model.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}
    before = torch.cat([w.detach().flatten().clone() for w in trainer.model.parameters() if w.requires_grad])
    trainer.train()
    after = torch.cat([w.detach().flatten() for w in trainer.model.parameters() if w.requires_grad])
    assert float((before != after).double().mean()) > 0.9


@pytest.mark.parametrize("mixed", [True, False])
def test_whole_layers_when_trained_beside_an_adapter_then_all_are_float32(
    mixed: bool, checkpoint: Path, make_trainer: Make
) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(checkpoint), modules_to_save=["lm_head"])
    trainer = make_trainer(model=model, lora=False, bf16=mixed, **SMALL)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert trainer.train().global_step == 10


def test_ref_model_when_it_has_the_same_bfloat16_weights_then_rewards_begin_at_zero(
    checkpoint: Path, make_trainer: Make
) -> None:
    trainer = make_trainer(
        model=str(checkpoint), lora=False, ref_model=AutoModelForCausalLM.from_pretrained(checkpoint), **SMALL
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert abs(trainer.state.log_history[0]["rewards/margins"]) < 1e-6


def test_resume_when_the_checkpoint_is_bfloat16_then_weights_are_those_of_an_undisturbed_run(
    checkpoint: Path, make_trainer: Make, tmp_path: Path
) -> None:
    options = {**SMALL, "max_steps": 6, "lora": False, "save_strategy": "steps", "save_steps": 3}
    make_trainer(model=str(checkpoint), **options).train()
    final = load_file(tmp_path / "out" / "checkpoint-6" / "model.safetensors")
    assert {weight.dtype for weight in final.values()} == {torch.float32}
    resumed = make_trainer(model=str(checkpoint), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    again = load_file(tmp_path / "out" / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in final.items())


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        ("adamw_torch", None, False),
        ("stable_adamw", None, True),
        ("stable_adamw", "kahan_sum=false", False),
        ("adamw_torch_8bit", None, False),
        ("adamw_torch_8bit", "block_size=64, bf16_stochastic_round=True", True),
    ],
)
def test_optimizer_when_named_then_it_is_known_whether_it_keeps_small_updates(
    optimizer: str, options: str | None, expected: bool, tmp_path: Path
) -> None:
    args = PreferenceConfig(output_dir=str(tmp_path), optim=optimizer, optim_args=options, **QUIET)
    assert keeps_small_updates(args) == expected


def test_kahan_summation_when_chosen_by_name_then_bfloat16_weights_move_on_average_as_float32_ones(
    checkpoint: Path, make_trainer: Make
) -> None:
    pytest.importorskip("optimi")
    start = numbers(AutoModelForCausalLM.from_pretrained(checkpoint))
    moves = {}
    for dtype, optimizer in (("float32", "stable_adamw"), ("bfloat16", "stable_adamw"), ("bfloat16", "adamw_torch")):
        options = {**SMALL, "learning_rate": 5e-5, "max_steps": 40, "trained_dtype": dtype, "optim": optimizer}
        trainer = make_trainer(model=str(checkpoint), lora=False, **options)
        trainer.train()
        moves[dtype, optimizer] = numbers(trainer.model) - start
    wanted = moves["float32", "stable_adamw"]

    def along(move: Tensor) -> float:
        return float(move @ wanted / (wanted @ wanted))

    assert along(moves["bfloat16", "stable_adamw"]) == pytest.approx(1, abs=0.2)
    assert along(moves["bfloat16", "adamw_torch"]) < 0.5


def test_float64_when_given_then_it_stays(make_model: Callable[..., Any]) -> None:
    model = make_model().double()
    assert not set_trained_dtype(model, torch.float32)
    assert model.dtype == torch.float64
