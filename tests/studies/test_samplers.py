"""Samplers of a search: the same suggestions again, and a journal that survives what may happen to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regretless.studies.samplers import JOURNAL, Journal, suggest
from regretless.studies.study import RangeConfig

SPACE: dict[str, Any] = {
    "train.learning_rate": RangeConfig(low=1e-6, high=1e-2, log=True),
    "train.num_train_epochs": RangeConfig(low=1, high=4),
    "train.lr_scheduler_type": ["cosine", "linear", None],
}


def searched(count: int, sampler: str = "tpe", failing: float = 1.0) -> list[tuple[dict[str, Any], float | None]]:
    """Trials whose score is best at a learning rate of 1e-4; above `failing` they fail."""
    trials: list[tuple[dict[str, Any], float | None]] = []
    for number in range(count):
        values = suggest(sampler, SPACE, trials, seed=number)
        rate = values["train.learning_rate"]
        trials.append((values, None if rate > failing else -abs(rate - 1e-4)))
    return trials


def test_suggestions_when_made_again_then_they_are_the_same_and_within_what_may_be_tried() -> None:
    trials = searched(25)
    assert trials == searched(25)
    rates = [values["train.learning_rate"] for values, _ in trials]
    assert len(set(rates)) == 25 and all(1e-6 <= rate <= 1e-2 for rate in rates)
    assert {values["train.num_train_epochs"] for values, _ in trials} == {1, 2, 3, 4}
    assert {values["train.lr_scheduler_type"] for values, _ in trials} == {"cosine", "linear", None}
    # After ten random ones, TPE stays near what was good.
    far = [sum(not 1e-5 < rate < 1e-3 for rate in part) / len(part) for part in (rates[:10], rates[10:])]
    assert far[1] < far[0]
    random = searched(25, "random")
    assert random[:10] == trials[:10]
    assert random[10:] != trials[10:]


def test_trials_when_they_failed_then_tpe_avoids_their_values() -> None:
    rates = [values["train.learning_rate"] for values, _ in searched(25, failing=1e-3)]
    assert sum(rate > 1e-3 for rate in rates[10:]) < sum(rate > 1e-3 for rate in rates[:10])


def test_journal_when_reopened_then_it_has_every_trial_whatever_a_kill_left_behind(tmp_path: Path) -> None:
    values = {"train.learning_rate": 1e-4, "train.num_train_epochs": 2, "train.lr_scheduler_type": None}
    with Journal(tmp_path) as journal:
        assert journal.read("dpo", 0) is None
        journal.add("dpo", 0, SPACE, values, [40.0, 50.0])
        journal.add("repo", 0, SPACE, {**values, "train.num_train_epochs": 3}, [60.0])
    # A process that was killed while it wrote leaves Optuna's lock, and a line without an end.
    Path(f"{tmp_path / JOURNAL}.lock").symlink_to(tmp_path / JOURNAL)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"op_code":4,"worker_id":"')
    with Journal(tmp_path) as journal:
        assert journal.read("dpo", 0) == (values, (40.0, 50.0))
        journal.add("dpo", 2, SPACE, values, [70.0])
    with Journal(tmp_path) as journal:
        assert journal.read("dpo", 1) is None
        assert journal.read("dpo", 2) == (values, (70.0,))
        assert journal.read("repo", 0) == ({**values, "train.num_train_epochs": 3}, (60.0,))
