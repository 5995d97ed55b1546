"""A training that goes on where another ended: with its optimizer's state, and with a reference of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from regretless.core.files import read_json
from regretless.modeling.load import ModelConfig
from regretless.training.train import run
from regretless.training.train_config import TrainConfig
from tiny_model import save_tiny_model

PAIRS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model and so many pairs that every step has all of them."""
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{n}+1", "chosen": f"is {n + 1}", "rejected": f"is {n}"} for n in range(PAIRS)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def trained(folder: Path, name: str, steps: int, start: str, **arguments: Any) -> dict[str, Tensor]:
    """Weights after so many steps of DPO from the model in the folder `start`."""
    settings = {"max_steps": steps, "pairs_per_step": PAIRS, "learning_rate": 1e-3, "beta": 0.5, "logging_steps": 1}
    settings |= {"lr_scheduler_type": "constant", "save_strategy": "no", "objective": "dpo"}
    output = folder / name
    output.mkdir()
    model = ModelConfig(name_or_path=str(folder / start))
    run(TrainConfig(**settings), "dpo", model, folder / "pairs.jsonl", output, **arguments)
    return load_file(output / "model.safetensors")


def test_training_when_it_begins_with_the_optimizer_and_reference_of_another_then_both_are_one_training(
    folder: Path,
) -> None:
    def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
        return max(float((first[name] - second[name]).abs().max()) for name in first)

    whole = trained(folder, "whole", 4, "model")
    trained(folder, "half", 2, "model", keep_optimizer=True)
    start, kept = ModelConfig(name_or_path=str(folder / "model")), folder / "half/optimizer.pt"
    assert furthest(whole, trained(folder, "rest", 2, "half", reference=start, optimizer=kept)) < 1e-6
    # Either by itself makes another training.
    assert furthest(whole, trained(folder, "fresh", 2, "half", reference=start)) > 1e-5
    assert furthest(whole, trained(folder, "moved", 2, "half", optimizer=kept)) > 1e-5
    logs = [read_json(folder / name / "trainer_state.json")["log_history"] for name in ("rest", "whole")]
    losses, expected = ([line["loss"] for line in log if "loss" in line] for log in logs)
    assert losses == pytest.approx(expected[2:], abs=1e-6)
