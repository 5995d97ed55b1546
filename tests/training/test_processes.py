"""Training that starts its processes itself: on two of them (gloo) as on one, and as under a launcher."""

from __future__ import annotations

import dataclasses
import filecmp
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forked import together
from regretless.cli import app
from regretless.core.errors import ConfigError, DataError, NonFiniteLossError, RegretlessError
from regretless.core.files import read_json, write_json
from regretless.modeling.load import ModelConfig
from regretless.objectives import OBJECTIVES, Logps, Output
from regretless.objectives.dpo import DPO
from regretless.runs.pipeline import run_recipe
from regretless.runs.recipe import load_recipe
from regretless.training import processes, task, train
from regretless.training.train_config import TrainConfig
from regretless.workflow.run_folder import RunFolder
from run_contents import contents, differences

TRAIN = {
    "objective": "dpo",
    "lora": {"r": 4, "dropout": 0},
    "pairs_per_step": 8,
    "max_steps": 4,
    "optim": "sgd",
    "learning_rate": 1e-2,
    "max_grad_norm": 1e9,
    "eval_pairs": 9,
    "logging_steps": 3,  # a step is left for the final loss alone
    "max_tokens_per_microbatch": 60,
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def recipe(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, make_model: Callable[..., PreTrainedModel]
) -> Callable[..., Path]:
    """Writes a recipe that trains on existing pairs; its run folder has the recipe's name."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    sides = [" ".join(side) for side in itertools.product(["w4", "w5", "w6", "w8", "w9"], repeat=3)]
    rows = [
        {"pair_id": f"p{n}", "prompt": sides[n // 2], "chosen": f"{sides[-n]} w4", "rejected": sides[n]}
        for n in range(1, 41)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(name: str, **settings: Any) -> Path:
        values = {
            "name": name,
            "threads": 1,
            "output_dir": str(tmp_path / name),
            "model": {"name_or_path": str(tmp_path / "model")},
            "pairs": {"dataset": str(tmp_path / "pairs.jsonl")},
            "train": {**TRAIN, **settings},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        return tmp_path / f"{name}.yaml"

    return write


def run(path: Path, *overrides: str, only: tuple[str, ...] = ()) -> RunFolder:
    return run_recipe(load_recipe(path, overrides), only)


def launch(*command: str) -> str:
    """Run a Python command to its end; what it said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def trained(run: Path) -> dict[str, torch.Tensor]:
    """Weights in the folder of a trained model."""
    (file,) = (run / "train" / "dpo").glob("*model.safetensors")
    return load_file(file)


def assert_same(run: Path, expected: Path) -> None:
    """Models, held-out scores and logs that are equal to rounding, under one key."""
    weights, wanted = trained(run), trained(expected)
    assert weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    scores, states, manifests = (
        [(one / "train" / "dpo" / name).read_text() for one in (run, expected)]
        for name in ("pair_scores.jsonl", "trainer_state.json", "manifest.json")
    )
    mine, other = ([json.loads(line) for line in text.splitlines()] for text in scores)
    assert len(mine) in (9, 10) and [row["pair_id"] for row in mine] == [row["pair_id"] for row in other]
    assert [row["chosen_reward"] for row in mine] == pytest.approx(
        [row["chosen_reward"] for row in other], rel=1e-4, abs=1e-6
    )
    losses = [[entry["loss"] for entry in json.loads(text)["log_history"] if "loss" in entry] for text in states]
    assert len(losses[0]) == 1 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    kept, wanted_kept = map(json.loads, manifests)
    assert kept["key"] == wanted_kept["key"]
    assert kept["summary"]["loss"] == pytest.approx(wanted_kept["summary"]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", pytest.param("torchrun", marks=pytest.mark.extended)])
def test_model_when_trained_by_one_process_by_two_or_by_a_launchers_two_then_it_is_the_same_and_each_knows_it(
    launcher: str, recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, launched = recipe("one", processes=1), recipe("two", processes=2), recipe("launched")
    run(one)
    ran = run(two).outcomes["train/dpo"]
    assert ran.ran and ran.summary["steps"] == 4
    assert not list(tmp_path.glob("two/train/dpo.cache/processes"))
    run(launched, only=("pairs",))
    command = ["train", "--config", str(launched)]
    said = together(2, app.main, command) if launcher == "none" else launch(*TORCHRUN, "-m", "regretless", *command)
    assert said.count("train/dpo: ") == 1, "rank 0 alone says it"
    for other in ("two", "launched"):
        assert_same(tmp_path / other, tmp_path / "one")

    for path in (two, launched):
        assert not run(path, "train.processes=1").outcomes["train/dpo"].ran
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        app.main(["train", "--config", str(one), "processes=2"])
    assert "train/dpo: unchanged, skipped" in capsys.readouterr().err
    assert "train/dpo: unchanged, skipped" in together(2, app.main, ["train", "--config", str(one)])


@pytest.mark.slow
def test_recipe_when_two_processes_compute_each_row_together_then_the_model_is_that_of_one(
    recipe: Callable[..., Path], tmp_path: Path
) -> None:
    shared = recipe("shared", processes=2, sequence_parallel_size=2)
    run(recipe("one"))
    run(shared, only=("pairs",))
    together(2, app.main, ["train", "--config", str(shared)])
    assert_same(tmp_path / "shared", tmp_path / "one")
    assert not run(shared, "train.sequence_parallel_size=1").outcomes["train/dpo"].ran


@pytest.mark.slow
def test_sharded_model_when_trained_by_two_processes_then_it_is_that_of_one_and_its_checkpoints_say_who_reads_them(
    recipe: Callable[..., Path], tmp_path: Path
) -> None:
    run(recipe("one", lora=None, save_steps=2))
    sharded = recipe("sharded", lora=None, save_steps=2, processes=2, strategy="fsdp2")
    run(sharded, only=("pairs",))
    together(2, app.main, ["train", "--config", str(sharded)])
    assert_same(tmp_path / "sharded", tmp_path / "one")
    output = tmp_path / "sharded" / "train" / "dpo"
    assert len(list((output / "checkpoint-4" / "pytorch_model_fsdp_0").glob("*.distcp"))) == 2, "a part of each process"
    config = TrainConfig(**{**TRAIN, "lora": None})
    model = ModelConfig(name_or_path=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"strategy: .*checkpoint-4 was written with strategy=fsdp2"):
        train.run(config, "dpo", model, tmp_path / "pairs.jsonl", output)


@pytest.mark.usefixtures("recipe")
def test_training_when_it_resumes_then_it_says_from_where_and_why_not_from_a_later_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(**TRAIN, save_steps=2)
    output = tmp_path / "trained"
    given = (ModelConfig(name_or_path=str(tmp_path / "model")), tmp_path / "pairs.jsonl", output)

    def said() -> str:
        train.run(config, "dpo", *given)
        text = " ".join(capsys.readouterr().err.split())
        assert filecmp.cmp(output / "adapter_model.safetensors", tmp_path / "expected", False)
        return text

    train.run(config, "dpo", *given)
    shutil.copy(output / "adapter_model.safetensors", tmp_path / "expected")
    assert "resumes" not in capsys.readouterr().err
    (output / "checkpoint-4" / "trainer_state.json").unlink()
    found = said()
    assert "note: checkpoint-4: trainer_state.json is missing; it is not resumed from" in found
    assert "train dpo: resumes from checkpoint-2 " in found
    for checkpoint in output.glob("checkpoint-*"):
        (checkpoint / "optimizer.pt").unlink()
    found = said()
    for step in (4, 2):
        assert f"checkpoint-{step}: optimizer.pt cannot be read (No such file or directory); it is not" in found
    assert "train dpo: starts over, without a complete checkpoint" in found


@pytest.mark.usefixtures("recipe")
def test_training_when_accelerate_finds_another_number_of_processes_then_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (train, task):
        monkeypatch.setattr(module, "processes", lambda: 2)
    config, model = TrainConfig(**TRAIN, processes=2), ModelConfig(name_or_path=str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"^train dpo: .* divided among 2 process\(es\), and accelerate found 1 in"):
        train.run(config, "dpo", model, tmp_path / "pairs.jsonl", tmp_path / "trained")


@pytest.mark.usefixtures("recipe")
def test_training_when_no_pair_is_left_to_evaluate_on_then_it_is_refused_with_what_to_change(tmp_path: Path) -> None:
    lines = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "one.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    config = TrainConfig(**TRAIN | {"eval_pairs": 4, "eval_strategy": "epoch"})
    model = ModelConfig(name_or_path=str(tmp_path / "model"))
    with pytest.raises(DataError, match=r"one\.jsonl: too few pairs to hold some out, and eval_strategy is epoch"):
        train.run(config, "dpo", model, tmp_path / "one.jsonl", tmp_path / "trained")


@pytest.mark.slow
def test_process_when_it_fails_then_its_error_is_the_stages(
    recipe: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NonFiniteLossError, match=r"^train/dpo: step 2: .*stopped before the optimizer step"):
        run(recipe("bad", processes=2, learning_rate=1e30))
    said = capfd.readouterr().err
    assert "Traceback" not in said and "torch.distributed" not in said, said


REPORT = {"kind": None, "message": "", "problems": [], "traceback": "Traceback: reset by peer"}


class _BadHeldOut(DPO):
    """DPO whose loss is no number where no gradient is computed."""

    def compute(self, logps: Logps, pairs: torch.Tensor) -> Output:
        output = super().compute(logps, pairs)
        if torch.is_grad_enabled():
            return output
        return dataclasses.replace(output, pair_losses=output.pair_losses * torch.nan)


def test_held_out_pairs_when_their_loss_is_not_finite_then_training_says_so_and_keeps_its_checkpoint(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "dpo", _BadHeldOut)
    with pytest.raises(NonFiniteLossError, match=r"held-out pairs: eval_loss not .*is in checkpoint-4\. Check"):
        run(recipe("one", processes=1))
    assert (tmp_path / "one" / "train" / "dpo" / "pair_scores.jsonl").read_text().count("pair_id") == 9
    assert (tmp_path / "one" / "train" / "dpo" / "checkpoint-4").is_dir()


def test_reports_of_processes_when_several_failed_then_the_cause_is_raised_and_not_its_consequences(
    tmp_path: Path,
) -> None:
    def failure() -> Exception:
        return processes.failure_in(tmp_path, 4)

    assert "without a result" in str(failure())
    write_json(tmp_path / "ended.json", {"rank": 2, "exit_code": -9})
    assert type(failure()) is RegretlessError and "training process 2 of 4 was ended by SIGKILL" in str(failure())
    for rank in (0, 2):
        write_json(tmp_path / f"failed-{rank}.json", REPORT | {"traceback": f"Traceback of {rank}"})
    assert isinstance(failure(), processes.TrainingProcessError) and "Traceback of 2" in str(failure())
    for rank, error in ((1, ConfigError("two", ["a", "b"])), (3, DataError("other"))):
        processes.write_failure(tmp_path, error, rank)
    found = failure()
    assert isinstance(found, ConfigError) and (str(found), found.problems) == ("two", ["a", "b"])
    processes.write_failure(tmp_path, OSError(28, "No space left on device", "/full/file"), 0)
    assert type(failure()).__name__ == "StorageError" and "/full/file" in str(failure())


def below(folder: Path) -> list[psutil.Process]:
    """The launcher and the training processes of a run folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any("regretless.training." in word for word in words) and any(str(folder) in word for word in words):
            found.append(process)
    return found


@pytest.mark.extended
@pytest.mark.slow
def test_training_when_its_command_is_killed_then_its_processes_end_and_the_next_one_resumes_with_the_same_result(
    recipe: Callable[..., Path], tmp_path: Path
) -> None:
    more = {"processes": 2, "max_steps": 60, "save_steps": 5, "save_total_limit": 2, "optim": "adamw_torch"}
    path, folder = recipe("run", **more), tmp_path / "run"
    output = folder / "train" / "dpo"
    run(path)
    whole = contents(folder)
    shutil.rmtree(folder)

    def after_a_checkpoint(end: signal.Signals, beyond: int) -> tuple[int, str]:
        command = subprocess.Popen(
            [sys.executable, "-m", "regretless", "run", str(path)], stderr=subprocess.PIPE, text=True
        )
        while command.poll() is None and not any(
            int(state.parent.name.removeprefix("checkpoint-")) > beyond
            for state in output.glob("checkpoint-*/trainer_state.json")
        ):
            time.sleep(0.01)
        assert command.poll() is None, "it ended before it could be killed"
        started = below(folder)
        assert len(started) == 3
        command.send_signal(end)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, alive
        return command.wait(), command.communicate()[1]

    code, said = after_a_checkpoint(signal.SIGINT, 0)
    assert code == 130 and said.splitlines()[-1].startswith("interrupted: finished work stays in"), said
    code, _ = after_a_checkpoint(signal.SIGKILL, 20)
    assert code == -signal.SIGKILL
    assert run(path).outcomes["train/dpo"].ran
    assert read_json(output / "trainer_state.json")["global_step"] == 60
    first = json.loads((output / "training.log").read_text().splitlines()[0])
    assert first["step"] >= 20, "it began anew"
    assert not differences(whole, contents(folder))
