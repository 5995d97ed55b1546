"""Which pairs a training holds out, what a full memory says, and a training that goes on where another ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from regretless.core.errors import DataError, RegretlessError
from regretless.core.files import read_json, write_jsonl
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.load import ModelConfig
from regretless.training.pair_store import PairTable
from regretless.training.task import _hold_out, train_in_this_process
from regretless.training.train import run
from regretless.training.train_config import TrainConfig
from regretless.training.trainer import PreferenceTrainer
from tiny_model import save_tiny_model

PAIRS = 6


@pytest.mark.parametrize("count", [1, 5, 9])
def test_held_out_pairs_when_some_are_asked_for_then_training_has_none_of_their_prompts(
    pairs: list[TokenizedPair], count: int
) -> None:
    # Pairs of one prompt are no neighbors.
    table = PairTable.temporary([*pairs[::2], *pairs[1::2]])
    for seed in range(5):
        train, held_out = _hold_out(table, count, seed)
        assert sorted([*train, *held_out]) == list(range(len(pairs)))
        assert len(held_out) >= count
        assert not set(table.prompts[train]) & set(table.prompts[held_out])


def test_held_out_pairs_when_by_topic_then_topics_stay_whole_and_those_with_one_prompt_together(
    pairs: list[TokenizedPair],
) -> None:
    prompts = list(dict.fromkeys(pair.prompt_ids for pair in pairs))
    topic_of = {prompt: "abcd"[number // 3] for number, prompt in enumerate(prompts)}
    rows = [replace(pair, topic=topic_of[pair.prompt_ids]) for pair in pairs]
    # One pair of the first prompt, of topic a, is about d; the last prompt's pairs have no topic.
    rows[0] = replace(rows[0], topic="d")
    rows = [replace(row, topic=None) if row.prompt_ids == prompts[-1] else row for row in rows]
    table = PairTable.temporary(rows)
    assert [pair.topic for pair in table] == [row.topic for row in rows]
    sides = set()
    for seed in range(20):
        train, held_out = _hold_out(table, 1, seed, "topic")
        parts = [{table[int(number)].topic for number in part} for part in (train, held_out)]
        assert not (parts[0] & parts[1])
        assert not set(table.prompts[train]) & set(table.prompts[held_out])
        assert len(np.unique(table.prompts[held_out])) in (1, 3, 5)
        sides.add(frozenset(parts[1]))
    assert sides == {frozenset("ad"), frozenset("b"), frozenset("c"), frozenset({None})}


def test_held_out_pairs_when_all_have_one_topic_then_error(pairs: list[TokenizedPair]) -> None:
    table = PairTable.temporary([replace(pair, topic="a") for pair in pairs])
    with pytest.raises(DataError, match=r"eval_by: all \d+ pairs have one topic"):
        _hold_out(table, 1, 0, "topic")


def test_training_when_a_step_does_not_fit_into_memory_then_the_error_says_what_helps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(PreferenceTrainer, "training_step", full)
    rows = [{"prompt": f"Tom has {n}.", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(3)]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    settings = {"objective": "sft", "max_steps": 1, "pairs_per_step": 2, "max_tokens_per_microbatch": 100}
    config = TrainConfig.parse({**settings, "use_cpu": True, "save_strategy": "no"}, "train")
    said = r"^train sft: CUDA out of memory; what helps, .*: max_tokens_per_microbatch=50 \(now 100\); gradient_check"
    with pytest.raises(
        RegretlessError, match=said + r".*; a max_length below \d+ tokens.*; an adapter in place of all"
    ):
        train_in_this_process(
            config, "sft", ModelConfig(name_or_path=str(model)), tmp_path / "pairs.jsonl", tmp_path / "out", "plain"
        )


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
    trained(folder, "again", 2, "model", keep_optimizer=True)
    assert (folder / "again/optimizer.pt").read_bytes() == (folder / "half/optimizer.pt").read_bytes()
    start, kept = ModelConfig(name_or_path=str(folder / "model")), folder / "half/optimizer.pt"
    assert furthest(whole, trained(folder, "rest", 2, "half", reference=start, optimizer=kept)) < 1e-6
    # Either by itself makes another training.
    assert furthest(whole, trained(folder, "fresh", 2, "half", reference=start)) > 1e-5
    assert furthest(whole, trained(folder, "moved", 2, "half", optimizer=kept)) > 1e-5
    logs = [read_json(folder / name / "trainer_state.json")["log_history"] for name in ("rest", "whole")]
    losses, expected = ([line["loss"] for line in log if "loss" in line] for log in logs)
    assert losses == pytest.approx(expected[2:], abs=1e-6)
