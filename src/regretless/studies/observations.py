"""Results of finished run folders, one observation for each model, method, seed, benchmark and metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regretless.core.errors import ConfigError, DataError, reject
from regretless.reporting.report import UNREADABLE
from regretless.studies.compared_runs import Run, RunToCompare, differing, labeled, repeated, twice
from regretless.studies.evaluations import Observation, conflicts, evaluations_of, observations_of
from regretless.workflow.run_folder import RECIPE

COMPARE = "regretless compare"


@dataclass(frozen=True)
class Observed:
    """What the run folders contain."""

    runs: tuple[Run, ...]
    """With all labels set, in the order given."""
    observations: tuple[Observation, ...]
    differing: Mapping[str, Mapping[str, str]]
    """Setting or version → run → value, for those in which the runs differ; seeds are among the labels instead."""
    notes: tuple[str, ...]


def _instead_of_run(run: Run) -> str:
    """What there is in place of a run, and what to do: nothing, a folder inside a run, or a single command's model."""
    if not run.path.is_dir():
        return "no such folder"
    none = f"no {RECIPE} in it"
    if (above := next((folder for folder in run.path.parents if (folder / RECIPE).is_file()), None)) is not None:
        return f"{none}; it is inside the run {above}"
    is_model = any((run.path / name).is_file() for name in ("config.json", "adapter_config.json"))
    instead = f"; `regretless evaluate --model BASE --policy NAME={run.path} …` compares models with their base"
    return none + instead if is_model else none


def observe(runs: Sequence[Run]) -> Observed:
    """Read run folders whose results can be compared.

    Raises ConfigError that lists every reason against it: a folder that is no run, an evaluation that is not finished,
    two runs of equal settings and seeds, and benchmarks that were answered, graded or decoded differently. DataError
    for a file that cannot be read.
    """
    if not runs:
        raise ConfigError(f"{COMPARE}: expected at least one run folder")
    problems = [f"{run.path}: named twice" for run in repeated(runs)]
    problems += [
        f"{run.path}: expected the folder of a run, found {_instead_of_run(run)}"
        for run in runs
        if not (run.path / RECIPE).is_file()
    ]
    reject(COMPARE, problems)
    folders = [RunToCompare(run) for run in runs]
    reject(COMPARE, [problem for folder in folders for problem in folder.unfinished()])
    named = labeled(folders)
    reject(COMPARE, twice(named))
    try:
        evaluated = [evaluation for run in named for evaluation in evaluations_of(run)]
        problems, notes = conflicts(evaluated)
        observations = tuple(observations_of(evaluated))
        settings = differing(named)
        notes += [f"{run.path}: {note}" for run in named for note in run.contaminated]
        notes += [
            f"{one.where}: {one.benchmark}: answers that are empty: {one.empty}" for one in evaluated if one.empty
        ]
    except UNREADABLE as error:
        raise DataError(
            f"{COMPARE}: a file of an evaluation has unexpected content ({type(error).__name__}: {error}); evaluate "
            "the runs again with this version"
        ) from error
    reject(COMPARE, problems)
    return Observed(tuple(run.labels for run in named), observations, settings, tuple(notes))
