"""What the trainer is handed: used, or refused by its name in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from regretless.core.errors import ConfigError, DataError
from regretless.training.arguments import PreferenceConfig
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]
WORDS = ["w4", "w5", "w6", "w8", "w9"]
ROWS = [{"prompt": a, "chosen": f"{a} {b} w8", "rejected": f"{b} w9"} for a in WORDS for b in WORDS]


@pytest.fixture
def build(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]) -> Any:
    def make(data: Any = ROWS, model: Any = None, **more: Any) -> PreferenceTrainer:
        args = {"objective": "dpo", "max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
        args |= more.pop("args", {})
        config = PreferenceConfig(output_dir=str(tmp_path / "out"), logging_steps=1, disable_tqdm=True, **args)
        return PreferenceTrainer(model or make_model(), config, data, processing_class=tokenizer, **more)

    return make


def test_arguments_when_they_would_be_ignored_then_all_are_refused_at_once_with_what_to_do(build: Any) -> None:
    ignored = ("data_collator", "compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics", "model_init")
    others = {"quantization_config": {}, "tokenizer": object(), "call_backs": [], "ref_adapter_name": "x"}
    with pytest.raises(ConfigError) as caught:
        build(**dict.fromkeys(ignored, print), **others)
    message = str(caught.value)
    assert "9 problem(s)" in message
    for name in (*ignored, "quantization_config"):
        assert f"\n  - {name}: not used here: " in message
    assert "tokenizer: not used here: it is called processing_class" in message
    assert "call_backs: unknown argument; did you mean callbacks?" in message
    assert build(**dict.fromkeys(ignored)).train().global_step == 2  # what is None is not given


def test_optimizer_when_it_is_passed_then_it_trains_or_is_refused(
    build: Any, make_model: Callable[..., PreTrainedModel]
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = build(model=model, optimizers=(optimizer, None))
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert trainer.optimizer.optimizer is optimizer and not torch.equal(model.lm_head.weight, before)
    other = torch.optim.SGD(make_model().parameters(), lr=0.5)
    with pytest.raises(ConfigError, match=r"optimizers: the optimizer lacks 25 of 25 trainable weights"):
        build(optimizers=(other, None))
    by_class = build(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.5}))
    by_class.train()
    assert isinstance(by_class.optimizer.optimizer, torch.optim.SGD)


def test_ref_model_when_given_by_name_then_rewards_are_those_against_the_model_itself(
    build: Any, make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    make_model(seed=1).save_pretrained(tmp_path / "reference")
    losses = []
    for reference in (make_model(seed=1), str(tmp_path / "reference")):
        trainer = build(ref_model=reference)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == losses[1]
    assert abs(losses[0][0] - 0.6931472) > 1e-3


def forms() -> Mapping[str, Any]:
    """The same rows in everything that holds rows."""
    table = datasets.Dataset.from_list(ROWS)
    return {
        "datasets.Dataset": table,
        "DatasetDict": datasets.DatasetDict({"train": table, "test": table.select(range(3))}),
        "streaming": table.to_iterable_dataset(),
        "pandas": pd.DataFrame(ROWS),
        "pandas with messages": pd.DataFrame(ROWS).assign(nothing=None),
        "arrow": pa.Table.from_pylist(ROWS),
        "generator": (row for row in ROWS),
        "tuple": tuple(ROWS),
    }


@pytest.mark.parametrize("form", list(forms()))
def test_rows_when_they_come_in_another_form_then_the_pairs_are_the_same(form: str, build: Any) -> None:
    def pairs(data: Any) -> list[Any]:
        table = build(data).train_dataset.table
        return [(pair.prompt_ids, pair.chosen.ids, pair.rejected.ids) for pair in table]

    assert pairs(forms()[form]) == pairs(ROWS)


def test_dataset_dict_when_evaluated_on_then_each_split_is_named(build: Any) -> None:
    trainer = build(eval_dataset=forms()["DatasetDict"])
    assert {name: len(data) for name, data in trainer.eval_dataset.items()} == {"train": 25, "test": 3}
    assert {"eval_train_loss", "eval_test_loss"} <= trainer.evaluate().keys()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS), "b": datasets.Dataset.from_list(ROWS)}),
            "of a, b;",
        ),
        ({"prompt": ["w4"], "chosen": ["w5"], "rejected": ["w6"]}, "got dict of prompt, chosen, rejected"),
        (["prompt", "chosen", "rejected"], "expected rows with columns, got str 'prompt'"),
        (pd.DataFrame([*ROWS, {"prompt": [{"role": "user"}], "chosen": "w4", "rejected": "w5"}]), "mixed types"),
        (3, "got int"),
    ],
    ids=["splits", "columns", "names", "mixed", "number"],
)
def test_data_when_it_holds_no_rows_then_one_line_says_so(
    data: Any, reason: str, build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError) as caught:
        build(data)
    assert reason in str(caught.value) and "train_dataset: " in str(caught.value) and "\n" not in str(caught.value)
    assert "refused" not in capsys.readouterr().err


def test_several_gpus_when_one_process_sees_them_then_it_uses_one_and_says_so(
    build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], make_trainer: Make
) -> None:
    alone = make_trainer(objective="dpo", lora=False, max_steps=2)
    alone.train()
    config = PreferenceConfig(**{**alone.args.to_dict(), "output_dir": str(tmp_path / "two")})
    assert config.device.type == "cpu"
    config._n_gpu = 2  # what the Trainer finds where two are visible
    assert config.train_batch_size == 2 * config.per_device_train_batch_size
    trainer = PreferenceTrainer(
        type(alone.model)(alone.model.config), config, alone.train_dataset, processing_class=alone.processing_class
    )
    assert "2 GPUs are visible, and one process trains on one: cpu is used" in capsys.readouterr().err
    trainer.train()
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert trainer.state.global_step == 2 and trainer.state.train_batch_size == config.per_device_train_batch_size


def test_training_arguments_when_they_would_be_ignored_then_all_are_refused_at_once(tmp_path: Path) -> None:
    ignored = {"label_smoothing_factor": 0.1, "auto_find_batch_size": True, "dataloader_drop_last": True}
    ignored |= {"bf16_full_eval": True, "train_sampling_strategy": "group_by_length", "batch_eval_metrics": True}
    with pytest.raises(ConfigError, match=r"6 problem\(s\)") as caught:
        PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, **ignored)
    assert all(f"\n  - {name}: not used here: " in str(caught.value) for name in ignored)
    assert PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, dataloader_drop_last=False).max_steps == -1
