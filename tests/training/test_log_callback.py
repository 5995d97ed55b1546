"""What training tells while it runs: speed, TensorBoard's event files, and the log that `watch` reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from accelerate import Accelerator
from tensorboardX.proto.event_pb2 import Event

from regretless.core.errors import NonFiniteLossError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.layout import token_count
from regretless.training.log import LOG_FILE, read
from regretless.training.metrics import Speed
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]


def events(file: Path) -> Iterator[Event]:
    """Records of an event file: length (8 bytes), checksum (4), the event, checksum (4)."""
    data, start = file.read_bytes(), 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        yield Event.FromString(data[start + 12 : start + 12 + length])
        start += 16 + length


def test_tensorboard_when_reported_to_then_its_files_hold_every_logged_metric_by_its_name(
    make_trainer: Make, tmp_path: Path, pairs: list[TokenizedPair]
) -> None:
    trainer = make_trainer(
        objective="dpo",
        report_to="tensorboard",
        max_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        eval_dataset=pairs[:6],
    )
    trainer.train()
    (file,) = (tmp_path / "out" / "runs").rglob("events.out.tfevents.*")
    found = {
        (value.tag, event.step): value.simple_value
        for event in events(file)
        for value in event.summary.value
        if value.HasField("simple_value")
    }
    names = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "rewards/saturated", "tokens_per_second")
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 3
    for line in lines:
        for name in (*names, "logps/chosen", "logratios/rejected", "learning_rate"):
            assert found[f"train/{name}", line["step"]] == pytest.approx(line[name], rel=1e-6), name
    (held_out,) = [line for line in trainer.state.log_history if "eval_loss" in line]
    for name in ("loss", "rewards/margins", "rewards/accuracies"):
        assert found[f"eval/{name}", 3] == pytest.approx(held_out[f"eval_{name}"], rel=1e-6), name


def test_speed_when_taken_then_it_is_tokens_over_seconds_since_the_last_line() -> None:
    now = iter([10.0, 14.0, 15.0])
    speed = Speed(lambda: next(now))
    speed.start()
    speed.add(100)
    speed.start()  # the clock runs already
    speed.add(20)
    assert speed.take(Accelerator(cpu=True)) == 30.0
    speed.add(7)
    assert speed.take(Accelerator(cpu=True)) == 7.0


def test_speed_when_a_step_is_taken_then_the_tokens_that_the_model_reads_are_counted(make_trainer: Make) -> None:
    trainer = make_trainer(objective="dpo", max_tokens_per_microbatch=10_000)
    trainer.prepare_reference()
    batch = [trainer.train_dataset[number] for number in range(8)]
    trainer.training_step(trainer.model, batch)
    responses = {item for pair in batch for item in pair.items(rejected=True)}
    # A response's last token is predicted and not read; a masked response is the beginning of another.
    read_to_the_end = [
        (prompt, ids)
        for prompt, ids in responses
        if not any(prompt == other and ids == longer[: len(ids)] != longer for other, longer in responses)
    ]
    assert len(read_to_the_end) < len(responses)
    assert trainer._speed._tokens == token_count(list(responses)) - len(read_to_the_end)


def test_log_of_training_when_resumed_then_it_goes_on_behind_the_checkpoint(make_trainer: Make, tmp_path: Path) -> None:
    options = {"objective": "dpo", "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    make_trainer(**options).train()
    whole = read(tmp_path / "out" / LOG_FILE)
    assert whole is not None and (whole.state, whole.step, whole.start["step"]) == ("ended", 8, 0)
    for step in (6, 8):
        (tmp_path / "out" / f"checkpoint-{step}" / "trainer_state.json").unlink()
    make_trainer(**options).train(resume_from_checkpoint=True)
    resumed = read(tmp_path / "out" / LOG_FILE)
    assert resumed is not None and (resumed.state, resumed.start["step"]) == ("ended", 4)
    assert [line["step"] for line in resumed.lines] == list(range(1, 9))
    assert [line["loss"] for line in resumed.lines] == pytest.approx([line["loss"] for line in whole.lines])
    assert [line["step"] for line in resumed.lines if "time" in line] == [5, 6, 7, 8]


def test_log_of_training_when_it_fails_then_its_end_says_why(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(objective="dpo", learning_rate=1e30, max_grad_norm=0.0, num_train_epochs=5)
    with pytest.raises(NonFiniteLossError):
        trainer.train()
    log = read(tmp_path / "out" / LOG_FILE)
    assert log is not None and log.state == "failed" and log.end is not None
    assert log.end["failed"].startswith("NonFiniteLossError: step")
