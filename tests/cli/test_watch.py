"""The live view, on trainings that run in other processes."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from rich.console import Console

from forked import started
from regretless.cli.watch import Trainings, look, sparks, watch_training
from regretless.core.errors import DataError, RegretlessError
from regretless.core.files import read_json, write_json, write_jsonl
from regretless.training.log import LOG_FILE, TrainingLog, read
from regretless.workflow.run_folder import LOCK, PROGRESS
from tiny_model import save_tiny_model

MOST_LOOKS = 2000


@pytest.fixture
def training(tmp_path: Path) -> Iterator[BaseProcess]:
    """A training process, in tmp_path/out, that is on its way: two log lines are written, and most are to come."""
    save_tiny_model(tmp_path / "model")
    rows = [
        {"prompt": f"Tom has {n} apples.", "chosen": f"{n}+1={n + 1}", "rejected": f"{n}-1={n - 1}"}
        for n in range(1, 9)
    ]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    command = ["train", "--pairs", "pairs.jsonl", "--model", "model", "--output", "out"]
    settings = ["objective=dpo", "max_steps=200", "logging_steps=10", "save_strategy=no", "use_cpu=true"]
    with started(*command, *settings, "learning_rate=1e-3", log=tmp_path / "messages", folder=tmp_path) as process:
        deadline = time.monotonic() + 600  # on a busy machine it takes long to start
        while not ((log := read(tmp_path / "out" / LOG_FILE)) and len(log.lines) >= 2):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.02)
        yield process
        process.kill()


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that does not end fails after so many looks, instead of hanging."""
    looks = itertools.count(1)

    def counted(folder: Path) -> Trainings:
        assert next(looks) <= MOST_LOOKS, "the view goes on, although nothing is at work"
        return look(folder)

    monkeypatch.setattr("regretless.cli.watch.look", counted)


def frame(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    watch_training(folder, once=True, console=console)
    return console.file.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """The frame's measures: name → first and last value."""
    names = ("loss", "reward margin, nats", "reward accuracy", "saturated pairs", "tokens a second")
    return {
        name: line.removeprefix(name).split()[:2]
        for line in text.splitlines()
        for name in names
        if line.startswith(name)
    }


@pytest.mark.slow
def test_watch_when_training_runs_then_frames_show_its_log_and_it_ends_with_it(
    training: BaseProcess, tmp_path: Path
) -> None:
    os.kill(training.pid, signal.SIGSTOP)  # so that log and frame are of the same moment
    log, text = read(tmp_path / "out" / LOG_FILE), frame(tmp_path / "out")
    assert log is not None and log.state == "running" and 20 <= log.step < 200
    shown = rows(text)
    last = log.lines[-1]
    assert shown["loss"] == [f"{log.lines[0]['loss']:.4f}", f"{last['loss']:.4f}"]
    assert shown["reward margin, nats"][1] == f"{last['rewards/margins']:+.3f}"
    assert shown["reward accuracy"][1] == f"{last['rewards/accuracies']:.1%}"
    assert shown["saturated pairs"][1] == f"{last['rewards/saturated']:.1%}"
    assert shown["tokens a second"][1] == f"{last['tokens_per_second']:,.0f}" != "0"
    assert f"step {log.step} of 200, 0:" in text and "running" in text
    os.kill(training.pid, signal.SIGCONT)
    watched = Console(file=io.StringIO(), width=120)
    watch_training(tmp_path / "out", once=False, every=0.5, console=watched)
    log = read(tmp_path / "out" / LOG_FILE)
    assert log is not None and (log.state, log.step) == ("ended", 200)
    assert "step 200 of 200" in watched.file.getvalue()
    training.join(600)
    assert training.exitcode == 0
    history = [line for line in read_json(tmp_path / "out" / "trainer_state.json")["log_history"] if "loss" in line]
    assert [line["loss"] for line in log.lines] == [line["loss"] for line in history]
    assert len(history) == 20


@pytest.mark.slow
def test_watch_when_training_is_killed_then_it_ends_with_an_error_that_says_where(
    training: BaseProcess, tmp_path: Path
) -> None:
    training.kill()
    training.join()
    with pytest.raises(
        RegretlessError, match=rf"out: training was interrupted after step \d+ of 200: its process {training.pid}"
    ):
        watch_training(tmp_path / "out", once=False, every=0.5, console=Console(file=io.StringIO()))
    assert "lost" in frame(tmp_path / "out")


def test_watch_when_nothing_trains_then_the_error_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"here, and no run at work; expected training.log in it, or in train/<name>"):
        watch_training(tmp_path, once=True)


def event(folder: Path, *lines: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


START = {"event": "start", "objective": "dpo", "step": 0, "steps": 60, "process": 1, "host": "elsewhere", "time": 100.0}


def test_look_when_a_recipe_names_several_trainings_then_those_to_come_are_known(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("pretrain: {base: {}}\ntrain: {objective: [repo, dpo, sft]}\n")
    event(tmp_path / "pretrain" / "base", START, {"event": "end", "step": 60, "time": 120.0})
    event(tmp_path / "train" / "repo", {**START, "time": 130.0})
    (tmp_path / "train" / "dpo").mkdir()
    (tmp_path / "train" / "dpo" / "manifest.json").write_text("{}")
    found = look(tmp_path)
    assert (found.current, found.to_come, found.is_over) == ("train/repo", ["train/repo", "train/sft"], False)
    assert "to come: train/sft" in frame(tmp_path)
    event(tmp_path / "train" / "sft", {**START, "objective": "sft", "steps": 70, "time": 125.0})
    text = frame(tmp_path)
    assert "step 0 of 60" in text and "step 0 of 70" in text, "both at work are shown"
    assert "to come" not in text


@pytest.mark.parametrize(
    ("result", "to_come"),
    [
        (None, ["rounds/1/train/dpo", "rounds/2/dpo/train/dpo", "rounds/3/dpo/train/dpo"]),
        ({"number": 2, "count": 3}, ["rounds/1/train/dpo", "rounds/2/dpo/train/dpo"]),
        ({"number": 2, "count": 2}, ["rounds/1/train/dpo", "rounds/2/dpo/train/dpo", "rounds/3/dpo/train/dpo"]),
    ],
    ids=["begun", "ended early", "extended"],
)
def test_look_when_a_recipe_has_rounds_then_each_is_a_training(
    result: dict[str, int] | None, to_come: list[str], tmp_path: Path
) -> None:
    write_json(tmp_path / "recipe.yaml", {"train": {"objective": "dpo"}, "rounds": {"count": 3}})  # JSON is YAML
    if result is not None:
        write_json(tmp_path / "train/dpo/manifest.json", {"settings": result})
    for name in ("rounds/1/train/dpo", "rounds/2/dpo/train/dpo", "train/dpo"):
        event(tmp_path / name, START)
    trainings = look(tmp_path)
    assert list(trainings.to_come) == to_come and set(trainings.logs) <= {*to_come}


def test_time_left_when_steps_were_resumed_then_it_comes_from_the_timed_lines() -> None:
    start = {**START, "step": 20}
    # From the checkpoint at 20: ten steps in 5 seconds; the line at 10 was written by an earlier process.
    lines = ({"step": 10, "loss": 1.0}, {"step": 30, "loss": 0.5, "time": 105.0})
    assert TrainingLog(start, lines, None).seconds_left() == pytest.approx(30 * 0.5)
    assert TrainingLog(start, lines[:1], None).seconds_left() is None


def test_sparks_when_drawn_then_smallest_and_largest_reach_the_ends() -> None:
    assert sparks([1.0, 2.0, float("nan"), 1.75]) == "▁█ ▆"
    assert sparks([3.0, 3.0]) == "▁▁"
    assert len(sparks([float(n) for n in range(100)])) == 32


def test_watch_when_the_output_is_a_pipe_then_each_line_of_the_log_is_printed_once(tmp_path: Path) -> None:
    lines = [{"event": "log", "step": step, "loss": 1 / step, "time": 100.0 + step} for step in (10, 20)]
    event(tmp_path, START, *lines, {"event": "end", "step": 20, "time": 130.0})
    console = Console(file=io.StringIO(), width=40)
    watch_training(tmp_path, once=False, every=0.01, console=console)
    assert console.file.getvalue().splitlines() == [
        ".: step 10 of 60; loss 0.1000",
        ".: step 20 of 60; loss 0.0500",
        ".: ended at step 20 of 60",
    ]


def test_watch_when_steps_are_done_and_the_model_is_not_written_then_it_is_saving_and_not_over(tmp_path: Path) -> None:
    event(tmp_path, START, {"event": "end", "step": 60, "time": 120.0})
    (tmp_path / "pending.json").write_text("{}")
    found = look(tmp_path)
    assert (found.state("."), found.is_over) == ("saving", False)
    assert "dpo  saving" in frame(tmp_path)
    (tmp_path / "pending.json").rename(tmp_path / "manifest.json")
    found = look(tmp_path)
    assert (found.state("."), found.is_over) == ("ended", True)


@pytest.mark.parametrize("place", ["train/dpo", "rounds/train/dpo", "runs/seed-1/pretrain/base"])
def test_look_when_runs_are_made_of_runs_then_their_trainings_are_shown(tmp_path: Path, place: str) -> None:
    event(tmp_path / place, START)
    assert look(tmp_path).current == place


def test_watch_when_other_stages_are_at_work_then_their_bars_are_shown_until_the_run_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "verify: 40 of 200 rows (20%), 4 rows/s, 0:00:40 left"
    watched = Console(file=io.StringIO(), width=120)
    (tmp_path / LOCK).write_text("process 1 on here, since 10:00:00")
    alive = [True]
    monkeypatch.setattr("regretless.cli.watch.is_alive_there", lambda host, process: alive[0])
    assert (look(tmp_path).is_over, look(tmp_path).bars) == (False, [])
    write_json(tmp_path / PROGRESS, [line])
    assert frame(tmp_path).splitlines() == [str(tmp_path), line]
    monkeypatch.setattr(time, "sleep", lambda _: alive.clear() or alive.append(False))
    watch_training(tmp_path, once=False, console=watched)
    assert watched.file.getvalue().splitlines() == [line], "once a minute, and nothing of a run that is gone"
    (tmp_path / "recipe.yaml").write_text("train: {objective: [dpo]}\n")
    alive[0] = True
    with pytest.raises(RegretlessError, match="interrupted before train/dpo"):
        watch_training(tmp_path, once=False, console=watched)


@pytest.mark.slow
def test_watch_when_a_run_samples_then_responses_speed_and_time_left_are_shown(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"Tom has {n} apples.", "answer": "1"} for n in range(400)])
    sample = {"n": 8, "batch_size": 4, "max_new_tokens": 32, "prompts": {"dataset": "prompts.jsonl"}}
    recipe = {"name": "x", "output_dir": "out", "sample": {**sample, "models": [{"name_or_path": "model"}]}}
    write_json(tmp_path / "recipe.yaml", recipe)  # YAML, too
    with started("run", "recipe.yaml", log=tmp_path / "messages", folder=tmp_path) as process:
        deadline = time.monotonic() + 600
        while not (tmp_path / "out" / PROGRESS).is_file() or "left" not in frame(tmp_path / "out"):
            assert process.is_alive() and time.monotonic() < deadline, (tmp_path / "messages").read_text()
            time.sleep(0.1)
        text = frame(tmp_path / "out")
        assert re.search(r"sample: [\d,]+ of 3,200 responses \(\d+%\), .+ tokens/s, [\d:]+ left", text), text
        process.kill()
    with pytest.raises(DataError, match="no run at work"):
        frame(tmp_path / "out")
