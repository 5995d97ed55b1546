"""Tables of responses in trackers, read back from what each tracker writes on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from regretless.core.errors import ConfigError
from regretless.training.completions import CompletionTables
from regretless.training.train_config import TrainConfig

ROWS = [{"prompt": f"w4 w{n}", "chosen": f"w{n} w31 w32", "rejected": f"w{n} w34"} for n in (5, 6, 8, 9)]
SCRIPT = """
import json, sys
from peft import LoraConfig
from regretless import PreferenceConfig, PreferenceTrainer
model, rows, out, *trackers = sys.argv[1:]
config = PreferenceConfig(
    output_dir=out, objective="dpo", max_steps=2, log_completions_steps=1, log_completions_prompts=2,
    report_to=trackers, run_name="run", use_cpu=True, save_strategy="no", disable_tqdm=True,
)
PreferenceTrainer(model, args=config, train_dataset=rows, peft_config=LoraConfig(r=2, task_type="CAUSAL_LM")).train()
"""


def train(model: Path, folder: Path, *trackers: str, **environment: str) -> None:
    rows = [
        {"prompt": f"Tom has {n} apples. How many?\n", "chosen": f"{n}+1={n + 1}\n", "rejected": f"{n}-1={n - 1}\n"}
        for n in range(2, 6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", SCRIPT, str(model), str(folder / "pairs.jsonl"), str(folder / "out"), *trackers]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tensorboard_when_tables_are_logged_then_it_has_them_and_training_is_the_same(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it
    weights = []
    for every in (None, 2):
        trainer = make_trainer(
            data=ROWS,
            objective="dpo",
            dropout=0.1,
            max_steps=4,
            report_to="tensorboard",
            log_completions_steps=every,
            output_dir=str(tmp_path / f"out-{every}"),
        )
        trainer.train()
        trainer.save_model()
        weights.append(load_file(tmp_path / f"out-{every}" / "adapter_model.safetensors"))
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    found = b"".join(path.read_bytes() for path in (tmp_path / "board").rglob("events.out.tfevents.*"))
    assert found.count(b"**rejected**") == 8  # four prompts, at steps 2 and 4
    assert found.count(b"**chosen**\n\n    w5 ") == 2
    assert found.count(b"**model**") == 8


@pytest.mark.parametrize("bf16", [False, True])
def test_answers_when_all_are_written_side_by_side_then_they_are_those_of_generate(
    make_trainer: Callable[..., Any], bf16: bool
) -> None:
    trainer = make_trainer(data=ROWS, objective="dpo", max_steps=2, bf16=bf16)
    trainer.train()
    tables = CompletionTables(trainer)
    rows = tables._rows(2, 4)
    assert tables._decodes, "by the loop, with the trainer's precision and the adapter's weights in float32"
    answers = [row[-1] for row in rows]
    assert len(set(answers)) > 1
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    assert model.training
    if bf16:  # in which rounding may change a token
        return
    model.eval()
    for item, answer in zip(tables._pairs(4), answers, strict=True):
        ids, most = torch.tensor([item.pair.prompt_ids]), 2 * max(len(side.ids) for side in item.pair.sides)
        own = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most)
        assert answer == tokenizer.decode(own[0, ids.shape[1] :])


def test_tables_when_no_tracker_would_show_them_then_that_is_said(
    make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_trainer(data=ROWS, objective="dpo", max_steps=1, log_completions_steps=1).train()
    assert "log_completions_steps has no effect without report_to" in capsys.readouterr().err


def test_tables_when_the_model_is_sharded_then_they_are_refused_ahead() -> None:
    with pytest.raises(ConfigError, match=r"log_completions_steps: a model sharded by fsdp2"):
        TrainConfig.parse({"objective": "dpo", "strategy": "fsdp2", "log_completions_steps": 2}, "train")
    with pytest.raises(ConfigError, match=r"log_completions_steps: expected a whole number of at least 1"):
        TrainConfig.parse({"objective": "dpo", "log_completions_steps": 0}, "train")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
def test_wandb_when_offline_then_its_run_has_a_table_for_each_step(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"))
    tables = [json.loads(file.read_text()) for file in files]
    assert [table["columns"] for table in tables] == [["step", "prompt", "chosen", "rejected", "model"]] * 2
    assert sorted(table["data"][0][0] for table in tables) == [1, 2]
    for table in tables:
        assert [row[2].startswith(f"{n}+1=") for n, row in enumerate(table["data"], 2)] == [True, True]
        assert all(isinstance(row[4], str) for row in table["data"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs the package trackio")
def test_trackio_when_local_then_its_database_has_a_table_for_each_step(model: Path, tmp_path: Path) -> None:
    train(model, tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")
    read = "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
    read += "print(json.dumps(S.get_logs('huggingface', 'run'), default=str))"
    done = subprocess.run(
        [sys.executable, "-c", read],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    tables = [line["completions"] for line in json.loads(done.stdout) if "completions" in line]
    assert [table["_value"][0]["step"] for table in tables] == [1, 2]
    assert all(table["_value"][1]["chosen"].startswith("3+1=") for table in tables)
