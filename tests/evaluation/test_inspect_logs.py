"""Logs of Inspect, read back with Inspect's own reader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from made_runs import made_run
from regretless.core.errors import ConfigError
from regretless.evaluation.inspect_logs import check_inspect, write_logs


def test_logs_when_read_by_inspect_then_samples_and_accuracy_are_those_of_the_evaluation(tmp_path: Path) -> None:
    read_eval_log = pytest.importorskip("inspect_ai.log", reason="needs the package inspect-ai").read_eval_log
    run = made_run(tmp_path / "run", {"base": {"sums": [1, 0, 1, 0]}, "dpo": {"sums": [1, 1, 1, 0]}})
    finished = {(label, "sums"): run / "evaluate" / label / "sums" for label in ("base", "dpo")}
    assert write_logs(finished, tmp_path / "logs") == {"logs": 2}
    log = read_eval_log(str(tmp_path / "logs" / "dpo-sums.eval"))
    assert (log.status, log.eval.task, log.eval.model) == ("success", "sums", "dpo")
    assert [one.scores["verifier"].value for one in log.samples] == ["C", "C", "C", "I"]
    assert log.samples[0].input.startswith("What is ")
    assert log.results.scores[0].metrics["accuracy"].value == 0.75
    assert log.results.scores[0].metrics["interval_low"].value < 0.75


def test_logs_when_inspect_is_missing_then_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    with pytest.raises(ConfigError, match="pip install inspect-ai"):
        check_inspect()
