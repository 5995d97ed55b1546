"""Samplers of Optuna for the search of a study, and the journal in which its trials survive an interruption.

A suggestion depends on the earlier trials and a seed alone, so a search that was interrupted continues as it would have
without. Only trials that were scored are in the journal, each written at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import TracebackType
from typing import Any, Self

from regretless.core.errors import ConfigError
from regretless.core.files import write_text
from regretless.studies.study import RangeConfig
from regretless.workflow.run_folder import lock

JOURNAL = "optuna.journal"
NUMBER, VALUES, SCORES = "number", "values", "scores"


def suggest(
    sampler: str,
    space: Mapping[str, list[Any] | RangeConfig],
    trials: Sequence[tuple[Mapping[str, Any], float | None]],
    *,
    seed: int,
) -> dict[str, Any]:
    """Values of the next trial, by key.

    sampler: `tpe` or `random`. trials: the values of the earlier ones, and their scores (None: failed, which counts as
    worse than any score). Raises ConfigError without Optuna.
    """
    optuna = _optuna()
    kinds = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(sampler=kinds[sampler](seed=seed), direction="maximize")
    distributions = _distributions(space)
    for values, score in trials:
        # TPE takes a pruned trial for a bad one, and leaves out one that failed.
        state = optuna.trial.TrialState.PRUNED if score is None else optuna.trial.TrialState.COMPLETE
        params = _params(values, space)
        study.add_trial(optuna.create_trial(state=state, value=score, params=params, distributions=distributions))
    params = study.ask(distributions).params
    return {key: _value(params[key], values) for key, values in space.items()}


class Journal:
    """The scored trials of a search, in the file `optuna.journal` of a folder; Optuna's own tools read it as well."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / JOURNAL
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Open the file. Raises ConfigError without Optuna, and if another process uses the search."""
        optuna = _optuna()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held.enter_context(lock(self.folder / f".{JOURNAL}.lock", self.folder))
        # Left by a process that was killed while it wrote; nobody else is at work here.
        Path(f"{self.path}.lock").unlink(missing_ok=True)
        _mend(self.path)
        self._storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(self.path)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let others use the search."""
        self._held.close()

    def _study(self, name: str) -> Any:
        return _optuna().create_study(storage=self._storage, study_name=name, direction="maximize", load_if_exists=True)

    def read(self, name: str, number: int) -> tuple[dict[str, Any], tuple[float, ...]] | None:
        """Values and scores of one trial of a method; None if it was not scored yet."""
        for trial in self._study(name).get_trials(deepcopy=False):
            if trial.user_attrs[NUMBER] == number:
                return trial.user_attrs[VALUES], tuple(trial.user_attrs[SCORES])
        return None

    def add(
        self,
        name: str,
        number: int,
        space: Mapping[str, list[Any] | RangeConfig],
        values: Mapping[str, Any],
        scores: Sequence[float],
    ) -> None:
        """Add a scored trial."""
        trial = _optuna().create_trial(
            value=mean(scores),
            params=_params(values, space),
            distributions=_distributions(space),
            user_attrs={NUMBER: number, VALUES: dict(values), SCORES: list(scores)},
        )
        self._study(name).add_trial(trial)


def _mend(path: Path) -> None:
    """Remove a last line that was written in part: Optuna would add to it."""
    if path.is_file() and not (text := path.read_bytes()).endswith(b"\n") and text:
        write_text(path, text[: text.rfind(b"\n") + 1].decode())


def _distributions(space: Mapping[str, list[Any] | RangeConfig]) -> dict[str, Any]:
    kinds = _optuna().distributions
    distributions: dict[str, Any] = {}
    for key, values in space.items():
        if isinstance(values, list):
            distributions[key] = kinds.CategoricalDistribution([json.dumps(value) for value in values])
        elif isinstance(values.low, int) and isinstance(values.high, int):
            distributions[key] = kinds.IntDistribution(values.low, values.high, log=values.log)
        else:
            distributions[key] = kinds.FloatDistribution(values.low, values.high, log=values.log)
    return distributions


def _params(values: Mapping[str, Any], space: Mapping[str, list[Any] | RangeConfig]) -> dict[str, Any]:
    """Values as Optuna knows them: one of a list by its text, as it can be anything."""
    return {key: json.dumps(values[key]) if isinstance(kind, list) else values[key] for key, kind in space.items()}


def _value(param: Any, values: list[Any] | RangeConfig) -> Any:
    if isinstance(values, RangeConfig):
        return param
    return next(value for value in values if json.dumps(value) == param)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "search.sampler: tpe and random need Optuna; pip install 'regretless[search]', or set sampler: grid"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
