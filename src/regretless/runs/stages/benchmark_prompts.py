"""What stages share that compare training prompts with those of the run's benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regretless.runs.stages.stage import Run
from regretless.workflow.run_folder import Unit, resolve

EVALUATE = "evaluate"
"""The entry of a unit's task with the settings of evaluation."""


def compared(run: Run, *, wanted: bool = True) -> tuple[dict[str, Any], dict[str, Any], dict[str, Path]]:
    """Settings, task and inputs of a unit that does so; empty where it is not wanted, or the run has no benchmark."""
    config = run.recipe.evaluate
    if not wanted or config is None or not (config.benchmarks or config.chat):
        return {}, {}, {}
    from regretless.evaluation.benchmark_problems import sources_of

    here = resolve(config, run.root)
    files = {label: chat.files() for label, chat in here.chat.items()}
    inputs = {f"questions-{label}": named["questions"] for label, named in files.items() if "questions" in named}
    return {"benchmarks": sources_of(config)}, {EVALUATE: here}, inputs


def with_benchmarks(unit: Unit) -> Unit:
    """The unit with the benchmarks' problems in place of the settings of evaluation.

    Raises DataError or ConfigError if they cannot be read.
    """
    if EVALUATE not in unit.task:
        return unit
    from regretless.evaluation.benchmark_problems import read_problems

    return replace(unit, task={**without_benchmarks(unit).task, "benchmarks": read_problems(unit.task[EVALUATE])})


def without_benchmarks(unit: Unit) -> Unit:
    """The unit without the settings of evaluation."""
    task: Mapping[str, Any] = {name: value for name, value in unit.task.items() if name != EVALUATE}
    return replace(unit, task=task)
