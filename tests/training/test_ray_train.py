"""Training over a Ray cluster of two nodes on this machine, and with one of them lost: `make test-cluster`."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ray_nodes import Nodes
from regretless.core.errors import ConfigError, NonFiniteLossError
from regretless.core.files import read_json
from regretless.modeling.load import ModelConfig
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import parse_recipe
from regretless.training import train
from regretless.training.ray_train import RayWorkers
from regretless.training.train_config import TrainConfig
from run_contents import content

pytestmark = [
    pytest.mark.skipif(not os.environ.get("REGRETLESS_CLUSTER"), reason="set REGRETLESS_CLUSTER=1"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs a package: regretless[cluster]"),
]
TRAIN: dict[str, Any] = {
    "objective": "dpo",
    "lora": {"r": 4, "dropout": 0},
    "pairs_per_step": 8,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "max_grad_norm": 1e9,
    "eval_pairs": 9,
    "logging_steps": 2,
    "max_tokens_per_microbatch": 60,
}
TWO = RayWorkers(count=2)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    before = dict(os.environ)
    import ray

    # A node that died a moment ago still counts when the workers are started again.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # as a run sets it (workflow/cluster.py)
    cluster = Nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.cluster.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def fit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]
) -> Callable[..., Path]:
    """Trains on pairs, here or on workers; returns the folder of the model."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sides = [" ".join(side) for side in itertools.product(["w4", "w5", "w6", "w8", "w9"], repeat=3)]
    rows = [
        {"pair_id": f"p{n}", "prompt": sides[n // 2], "chosen": f"{sides[-n]} w4", "rejected": sides[n]}
        for n in range(1, 41)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, workers: RayWorkers | None, **settings: Any) -> Path:
        config = TrainConfig(**{**TRAIN, **settings})
        model = ModelConfig(name_or_path=str(tmp_path / "model"))
        (tmp_path / name).mkdir()
        train.run(config, "dpo", model, tmp_path / "pairs.jsonl", tmp_path / name, workers)
        return tmp_path / name

    return run


@pytest.mark.slow
@pytest.mark.extended
def test_model_when_trained_by_two_workers_then_it_is_that_of_one_process(
    nodes: Nodes, fit: Callable[..., Path]
) -> None:
    one, two = fit("one", None), fit("two", TWO)
    weights, expected = (load_file(folder / "adapter_model.safetensors") for folder in (two, one))
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    scores = [(folder / "pair_scores.jsonl").read_text().splitlines() for folder in (one, two)]
    assert len(scores[0]) == len(scores[1]) > 8
    assert not (two.with_name("two.cache") / "processes").exists()


@pytest.mark.slow
def test_training_when_a_node_is_lost_then_it_resumes_from_a_checkpoint_says_so_and_ends_as_without_the_loss(
    nodes: Nodes, fit: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = {"max_steps": 60, "save_steps": 5, "save_total_limit": 2}
    whole = fit("whole", TWO, **steps)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        training = thread.submit(fit, "disturbed", TWO, **steps)
        while not training.done() and not list((tmp_path / "disturbed").glob("checkpoint-*/trainer_state.json")):
            time.sleep(0.01)
        nodes.replace()
        disturbed = training.result()
    said = " ".join(capfd.readouterr().err.split())
    assert "a training worker or its node was lost; training resumes from" in said, said
    assert read_json(disturbed / "trainer_state.json")["global_step"] == 60
    for name in ("adapter_model.safetensors", "pair_scores.jsonl", "trainer_state.json"):
        assert content(whole / name) == content(disturbed / name), name


@pytest.mark.slow
def test_worker_when_it_fails_then_its_error_is_the_stages_and_training_is_not_tried_again(
    nodes: Nodes, fit: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(NonFiniteLossError, match="step 2: "):
        fit("bad", TWO, learning_rate=1e30, optim="sgd")
    assert len(list((tmp_path / "bad.cache" / "processes").glob("started-*.json"))) == 1
    with pytest.raises(ConfigError, match="pairs_per_step: 9 pairs cannot be divided equally by 2"):
        fit("odd", TWO, pairs_per_step=9)


@pytest.mark.slow
def test_recipe_when_it_names_workers_then_they_train_its_model_and_one_process_knows_it(
    nodes: Nodes, fit: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit("one", None)
    values = {
        "name": "run",
        "output_dir": str(tmp_path / "run"),
        "cluster": {"address": nodes.address, "train": {"workers": 2}},
        "model": {"name_or_path": str(tmp_path / "model")},
        "pairs": {"dataset": str(tmp_path / "pairs.jsonl")},
        "train": TRAIN,
    }
    assert run_recipe(parse_recipe(values, "recipe")).outcomes["train/dpo"].ran
    assert "train dpo" in capfd.readouterr().err, "the progress of workers is shown here"
    weights, expected = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "run" / "train" / "dpo", tmp_path / "one")
    )
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    del values["cluster"]
    assert not run_recipe(parse_recipe(values, "recipe")).outcomes["train/dpo"].ran
