"""Cards of models that a trainer saves, and the command in them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from torch import Tensor
from transformers import BitsAndBytesConfig

from regretless import PreferenceConfig, PreferenceTrainer
from regretless.cli.app import main
from regretless.cli.request import Request
from regretless.modeling.load import ModelConfig
from regretless.objectives import OBJECTIVES, Logps, Output
from regretless.objectives.dpo import DPO
from regretless.runs.recipe import apply_overrides
from regretless.training.card_facts import stage_command
from regretless.training.model_card import CARD, FACTS, PLACEHOLDER, Result, render
from regretless.training.train_config import TrainConfig


class _Trained:
    """Stands for a trainer in the card's code; keeps the arguments, by name, of those that were to train."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments

    def train(self) -> None:
        self.seen.append(self.arguments)


def test_trainer_when_it_saves_then_every_way_gives_the_card_and_no_text_of_the_data(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"w4 w{n}", "chosen": f"w{n} w8 w31 w32 w33", "rejected": f"w{n} w34 w35"} for n in (5, 6, 9, 10)
    ]
    secret = {"hub_token": "hf_secret", "hub_model_id": "someone/model"}
    trainer = make_trainer(data=rows, objective="dpo", beta=0.3, max_steps=2, **secret)
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    # As from_pretrained leaves it in the model.
    base = trainer.model.get_base_model()
    base.hf_quantizer = SimpleNamespace(pre_quantized=False, quantization_config=quantized)
    trainer.args.model_init_kwargs = {"dtype": torch.bfloat16, "token": "hf_secret", "cache_dir": tmp_path}
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.model.save_pretrained(str(tmp_path / "by_peft"))
    signature = inspect.signature(PreferenceTrainer.__init__)
    trainer.create_model_card(license="mit", language="en", tags="math", dataset_name="openai/gsm8k")
    for folder in ("saved", "by_peft", "out"):
        text = (tmp_path / folder / CARD).read_text(encoding="utf-8")
        values = ModelCard(text).data.to_dict()
        assert values["library_name"] == "peft"
        assert "| `beta` | `0.3` |" in text
        assert "| training pairs | `4` |" in text and "| pairs trained on | `4` |" in text
        (code,) = [block for block in text.split("```")[1::2] if "PreferenceConfig(" in block]
        code = code.removeprefix("python\n")
        names: dict[str, Any] = {"PreferenceConfig": PreferenceConfig, "LoraConfig": LoraConfig}
        names["PreferenceTrainer"] = lambda *given, **more: _Trained(signature.bind(None, *given, **more).arguments)
        exec("\n".join(line for line in code.splitlines() if not line.startswith(("from", "import"))), names)
        (arguments,) = _Trained.seen
        _Trained.seen.clear()
        assert (arguments["args"].objective, arguments["args"].beta, arguments["args"].max_steps) == ("dpo", 0.3, 2)
        assert arguments["args"].model_init_kwargs == {
            "dtype": "bfloat16",
            "quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        }
        assert isinstance(arguments["peft_config"], LoraConfig)
        layers = arguments["peft_config"].target_modules
        assert {"q_proj", "down_proj"} <= layers and not any("." in name for name in layers)
        for hidden in ("w31", "w34", "hf_secret", str(tmp_path), PLACEHOLDER):
            assert hidden not in text
            assert hidden not in (tmp_path / folder / FACTS).read_text(encoding="utf-8")
    assert values["license"] == "mit"
    assert values["datasets"] == ["openai/gsm8k"]
    assert {"dpo", "math", "lora"} <= set(values["tags"])


@pytest.mark.parametrize(("steps", "seen"), [(0, 0), (1, 5), (2, 9), (9, 9)])
def test_card_when_training_ended_early_then_it_counts_the_pairs_that_were_drawn(
    make_trainer: Callable[..., Any], steps: int, seen: int
) -> None:
    rows = [{"prompt": f"w{n}", "chosen": f"w{n} w8", "rejected": f"w{n} w9"} for n in range(4, 13)]
    trainer = make_trainer(data=rows, objective="dpo", max_steps=max(steps, 1), group_pairs=False)
    if steps:
        trainer.train()
    data = trainer.card.facts().data
    assert (data["training pairs"], data["pairs trained on"]) == (9, seen)


def test_card_when_training_goes_on_with_an_adapter_then_it_and_its_base_are_named(
    make_trainer: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    first = make_trainer(objective="dpo", max_steps=1)
    base = first.model.get_base_model()
    base.save_pretrained(tmp_path / "base")
    first.model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    first.save_model(str(tmp_path / "round-1"))
    tokenizer.save_pretrained(tmp_path / "round-1")
    assert first.card.facts().start is None
    second = make_trainer(model=str(tmp_path / "round-1"), lora=False, objective="dpo", max_steps=1)
    facts = second.card.facts()
    assert (facts.base, facts.start) == ("base", "round-1")
    (line,) = [line for line in facts.command.splitlines() if line.startswith("PreferenceTrainer(")]
    assert line.startswith("PreferenceTrainer('round-1', args=config") and "peft_config" not in line
    text = render(dataclasses.replace(facts, results=[Result("gsm8k", "Pass@1", 9, 61.5, None, 5.0)]))
    assert "Training went on with the adapter `round-1` on this base." in text
    assert "before this training: the adapter `round-1` on `base`." in text
    assert "| gain over `round-1` |" in text and "gain over the base model" not in text
    again = make_trainer(model=str(tmp_path / "base"), objective="dpo", max_steps=1)
    assert (again.card.facts().base, again.card.facts().start) == ("base", None)


class _Shifted(DPO):
    """−log σ(margin) + 1

    Indented like any docstring.
    """

    name: ClassVar[str] = "shifted"

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        return Output(super().compute(logps, pairs).pair_losses + 1)


def test_card_of_a_method_derived_from_another_when_written_then_it_does_not_pass_for_that_one(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "shifted", _Shifted)
    facts = make_trainer(objective="shifted").card.facts()
    assert (facts.title, facts.paper) == ("", "")
    assert facts.formula == "−log σ(margin) + 1\n\nIndented like any docstring."
    text = render(facts)
    assert "trained with `shifted`\n" in text and "direct preference" not in text
    assert "## Method\n\n```text" in text


def test_command_of_a_card_when_its_settings_are_read_back_then_they_are_those_of_the_training() -> None:
    values = {"learning_rate": 1e-05, "beta": 0.3, "save_strategy": "no", "hub_token": "hf_secret", "pairs_per_step": 4}
    lora = {"r": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    base = ModelConfig(name_or_path="/home/me/models/base")
    command = stage_command("dpo", values, lora, {"eval_pairs": 10, "eval_by": "topic"}, base, "/home/me/pairs.jsonl")
    assert "hf_secret" not in command
    assert "/home" not in command
    words = shlex.split(command)
    assert words[:8] == ["regretless", "train", "--model", "base", "--pairs", "pairs.jsonl", "--output", "trained"]
    config = TrainConfig.parse(apply_overrides({}, words[8:]), "train")
    assert config.objectives == ["dpo"]
    assert config.values_for("dpo") == {"learning_rate": 1e-05, "beta": 0.3, "pairs_per_step": 4}
    assert config.lora is not None
    assert config.lora.model_dump(exclude_none=True) == lora
    assert config.holding_out == {"eval_pairs": 10, "eval_by": "topic"}
    whole = shlex.split(stage_command("sft", {}, None, {}, ModelConfig(name_or_path="a/b"), "c/d"))[8:]
    assert TrainConfig.parse(apply_overrides({}, whole), "train").lora is None


QLORA = {
    "quantization": {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    "chat_template": "chatml",
    "chat_template_kwargs": {"enable_thinking": False, "style": "it's 1"},
    "revision": "1234567",
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "model",
    [
        {"name_or_path": "base", **QLORA},
        {"name_or_path": "base", "adapter": "adapter", "tokenizer": "tokenizer", "chat_template": "own.jinja"},
        {"architecture": {"model_type": "qwen3", "hidden_size": 32}, "init_seed": 3, "tokenizer": "tokenizer"},
    ],
)
def test_command_of_a_card_when_the_model_has_settings_then_the_command_line_reads_the_same_ones(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: str(tmp_path / str(model[name])) for name in ("adapter", "tokenizer") if name in model}
    if model.get("chat_template") == "own.jinja":
        paths["chat_template"] = str(tmp_path / "own.jinja")
    values = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-07},
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim_args": "1",
    }
    settings = ModelConfig.parse({**model, **paths}, "model")
    command = stage_command(
        "dpo", values, None if "adapter" in model else {"r": 8}, {}, settings, str(tmp_path / "pairs.jsonl")
    )
    assert str(tmp_path) not in command
    read: list[Request] = []
    monkeypatch.setattr("regretless.cli.verbs.stage", read.append)
    with pytest.raises(SystemExit):
        main(shlex.split(command)[1:])
    (request,) = read
    monkeypatch.setattr("regretless.cli.request.recipe_problems", lambda *_: [])  # it looks for the files
    recipe = request.recipe()
    assert recipe.model == ModelConfig.parse(model, "model")
    assert recipe.train is not None
    assert {name: recipe.train.values_for("dpo")[name] for name in values} == values


def test_card_when_processes_compute_rows_together_then_their_pairs_count_once(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(objective="dpo", per_device_train_batch_size=4)
    assert trainer.card.facts().arguments["pairs per optimizer step"] == 4
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 6)
    trainer.args.sequence_parallel_size = 2
    assert trainer.card.facts().arguments["pairs per optimizer step"] == 12


@pytest.mark.parametrize("before", [True, False])
def test_model_when_saved_then_its_cache_is_as_before_training(
    make_trainer: Callable[..., Any], make_model: Callable[..., Any], tmp_path: Path, before: bool
) -> None:
    model = make_model()
    model.config.use_cache = before
    make_trainer(objective="dpo", lora=False, model=model).save_model(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is before
