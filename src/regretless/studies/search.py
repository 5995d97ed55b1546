"""The search of a study: every method is trained with several settings, and the best ones are taken.

Trials are a study of their own, in the folder `search`: they share data with the study, resume like it, and are judged
by benchmarks that have no problem in common with those of the study.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import mean
from typing import Any

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.files import fingerprint, read_json, write_json
from regretless.core.intervals import PERCENT
from regretless.core.settings import dump
from regretless.core.terminal import console
from regretless.core.versions import versions_for
from regretless.evaluation.chat.chat_results import CHAT_KINDS, RESULT
from regretless.evaluation.results import PASS_AT_1, EvaluateConfig
from regretless.objectives import OBJECTIVES, hyperparameter_names
from regretless.runs.recipe import Recipe
from regretless.runs.stage_record import NO_MATTER
from regretless.studies.runner import Failure, failed_methods, run_study
from regretless.studies.samplers import Journal, suggest
from regretless.studies.study import (
    OBJECTIVE,
    Cell,
    Further,
    RangeConfig,
    SearchConfig,
    SeedsConfig,
    Study,
    override,
    with_cells,
)
from regretless.workflow.run_folder import RUN, content, existing_paths

SEARCH_FOLDER = "search"
TRIAL = "trial"
"""Labels of a sampler's trials."""
NEAR_THE_EDGE = 0.1
"""Part of a range at each end."""
Values = Mapping[str, Any]
Space = Mapping[str, list[Any] | RangeConfig]


@dataclass(frozen=True)
class Trial:
    """One combination of settings for a method."""

    values: Values
    scores: tuple[float, ...]
    """Mean over the search's benchmarks, on their metric's scale, of each seed that did not fail."""
    failed: int
    """Seeds that failed."""

    @property
    def score(self) -> float | None:
        """Mean over the seeds; None if a seed failed, for it would be left out of the mean."""
        return mean(self.scores) if self.scores and not self.failed else None


@dataclass(frozen=True)
class Target:
    """What is searched for: the best settings of a method, for a model and a variant."""

    model: str
    variant: tuple[tuple[str, str], ...]
    method: str

    def __str__(self) -> str:
        return ", ".join([*filter(None, [self.model]), *(f"{k}={v}" for k, v in self.variant), self.method])


@dataclass(frozen=True)
class Choice:
    """All trials of one method, model and variant, in their order."""

    target: Target
    metric: str
    """What trials are judged by, with its unit."""
    space: Space
    """The values that could be tried."""
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial with the best score; of equal ones the first. Raises RegretlessError if every trial failed."""
        scored = [trial for trial in self.trials if trial.score is not None]
        if not scored:
            raise RegretlessError(f"search: {self.target}: every trial failed; look into the logs of the search")
        return max(scored, key=lambda trial: trial.score or 0.0)

    @property
    def edges(self) -> list[str]:
        """Settings whose best value is the least or greatest one, or in the outer tenth of a range: a better one may
        lie beyond."""
        return [key for key, value in self.best.values.items() if _at_the_edge(value, self.space[key])]

    @property
    def ties(self) -> int:
        """How many other trials have the best score."""
        return sum(trial.score == self.best.score for trial in self.trials) - 1

    @property
    def remarks(self) -> list[str]:
        """What a reader of the best settings must know of how they were found."""
        remarks = [f"{self.ties} other trial(s) have the same score; the first was taken"] if self.ties else []
        if self.edges:
            names = ", ".join(self.edges)
            remarks.append(f"the best value of {names} lies at the edge of those tried; a better one may lie beyond")
        return remarks

    @property
    def overrides(self) -> list[str]:
        """The best settings, as settings of the method."""
        return _settings(self.target.method, self.best.values)


def _at_the_edge(value: Any, values: list[Any] | RangeConfig) -> bool:
    if isinstance(values, list):
        numbers = [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
        return len(numbers) == len(values) and value in (min(numbers), max(numbers))
    low, high, position = (log(number) if values.log else float(number) for number in (values.low, values.high, value))
    return not NEAR_THE_EDGE < (position - low) / (high - low) < 1 - NEAR_THE_EDGE


def _settings(method: str, values: Values) -> list[str]:
    """Values as settings of one method, which take precedence over what the recipe says of it.

    A hyperparameter that the method does not have is left out, as it is where all methods share one.
    """
    texts = []
    for key, value in values.items():
        name = key.removeprefix("train.")
        belongs = {other for other in OBJECTIVES.usable()[0] if name in hyperparameter_names(other)}
        if not belongs or method in belongs:
            texts.append(override(f"train.methods.{method}.{name}", value))
    return texts


# --- trials as a study ------------------------------------------------------------------------------------------------


def trials_of(study: Study) -> Study:
    """The study of the trials; of a sampler's trials the first ones, with the least values.

    Raises ConfigError that lists the problems of their recipes, also of those with the greatest values.
    """
    search = study.config.search
    assert search is not None
    if search.trials is None:
        return _study_of(study, _grid(study, search))
    least, greatest = (
        {
            target: {key: _bound(values, is_greatest=last) for key, values in search.space(target.method).items()}
            for target in _targets(study)
        }
        for last in (False, True)
    )
    _study_of(study, _round(0, greatest))
    return _study_of(study, _round(0, least))


def _bound(values: list[Any] | RangeConfig, *, is_greatest: bool) -> Any:
    if isinstance(values, list):
        return values[-1 if is_greatest else 0]
    return values.high if is_greatest else values.low


def _targets(study: Study) -> list[Target]:
    targets = [
        Target(cell.model, tuple(cell.variant.items()), method) for cell in study.cells for method in cell.methods
    ]
    return list(dict.fromkeys(targets))


Runs = Mapping[tuple[str, tuple[tuple[str, str], ...]], Sequence[Further]]
"""What is run for each model and variant."""


def _grid(study: Study, search: SearchConfig) -> Runs:
    """All combinations, each with all methods in one run that have no values of their own."""
    runs: dict[Any, list[Further]] = {}
    together: dict[Any, list[str]] = {}
    for target in _targets(study):
        key = target.model, target.variant
        if target.method not in search.methods:
            together.setdefault(key, []).append(target.method)
            continue
        runs.setdefault(key, []).extend(
            (
                _labels(search, target, values),
                [override(OBJECTIVE, [target.method]), *_settings(target.method, values)],
            )
            for values in search.grid(target.method)
        )
    for (model, variant), names in together.items():
        runs.setdefault((model, variant), []).extend(
            (
                _labels(search, Target(model, variant, names[0]), values),
                [override(OBJECTIVE, names), *(text for method in names for text in _settings(method, values))],
            )
            for values in search.grid()
        )
    return runs


def _labels(search: SearchConfig, target: Target, values: Values) -> dict[str, str]:
    """Labels of the run of one combination; those of a method with values of its own name it."""
    of_method = {"method": target.method} if target.method in search.methods else {}
    return of_method | {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}


def _round(number: int, values: Mapping[Target, Values]) -> Runs:
    """One trial of each target, each in a run of its own."""
    runs: dict[Any, list[Further]] = {}
    for target, taken in values.items():
        labels = {"method": target.method, TRIAL: str(number)}
        texts = [override(OBJECTIVE, [target.method]), *_settings(target.method, taken)]
        runs.setdefault((target.model, target.variant), []).append((labels, texts))
    return runs


def _study_of(study: Study, runs: Runs) -> Study:
    """The study of some trials."""
    search = study.config.search
    assert search is not None

    def judged(recipe: Recipe) -> Recipe:
        return recipe.model_copy(
            update={"evaluate": _judging(search, recipe), "inspect": None, "analyze": None, "report": None}
        )

    seeds = SeedsConfig(training=search.seeds, data=search.data_seeds or study.config.seeds.data[:1])
    config = study.config.model_copy(update={"search": None, "seeds": seeds})
    return with_cells(
        replace(study, config=config, folder=study.folder / SEARCH_FOLDER, cells=[]),
        lambda model, variant: runs.get((model, tuple(variant.items())), []),
        judged,
    )


def _judging(search: SearchConfig, recipe: Recipe) -> EvaluateConfig:
    """How trials of a recipe are evaluated: by the kinds of benchmark that it evaluates itself, if the search has any.

    Raises ConfigError if it has no section `evaluate`, and for metrics of which there is no mean.
    """
    evaluate = recipe.evaluate
    if evaluate is None:
        raise ConfigError("search: needs a section `evaluate` in the recipe, whose engine trials use")
    kinds = {"benchmarks": search.benchmarks, "chat": search.chat}
    fitting = {
        kind: benchmarks for kind, benchmarks in kinds.items() if benchmarks and getattr(evaluate, kind)
    } or kinds
    judging = EvaluateConfig.parse(
        {**evaluate.model_dump(exclude_unset=True), **{key: {} for key in kinds}, **fitting, "seeds": []}, "search"
    )
    if len(metrics := _metrics(judging)) > 1:
        raise ConfigError(f"search: trials are judged by one metric, got {', '.join(metrics)}; choose one of them")
    return judging


# --- searching --------------------------------------------------------------------------------------------------------


def search_settings(study: Study, processes: int | None) -> tuple[Study, list[Choice]]:
    """The study with the best settings of each method, and all trials. A trial that fails is not taken.

    Raises ConfigError for recipes that evaluate nothing and for a sampler without Optuna, RegretlessError if every
    trial of a method failed.
    """
    search = study.config.search
    assert search is not None
    if study.smoke:
        console.print(
            f"search: in miniature: {search.budget} trials of each method, with the first and last value of settings "
            "that matter here and one seed"
        )
    trials = _all_of_grid(study, search, processes) if search.trials is None else _sampled(study, search, processes)
    metrics = {cell.model: _metrics(_evaluated(cell))[0] for cell in trials_of(study).cells}
    choices = [
        Choice(target, metrics[target.model], search.space(target.method), tuple(tried))
        for target, tried in trials.items()
    ]
    write_json(study.folder / SEARCH_FOLDER / "search.json", [_as_json(choice) for choice in choices])
    chosen: dict[Any, list[str]] = {}
    for choice in choices:
        chosen.setdefault((choice.target.model, choice.target.variant), []).extend(choice.overrides)
    return with_cells(study, lambda model, variant: [({}, chosen[model, tuple(variant.items())])]), choices


def _all_of_grid(study: Study, search: SearchConfig, processes: int | None) -> dict[Target, list[Trial]]:
    trials = trials_of(study)
    failures = run_study(trials, processes=processes)
    return {
        target: [
            _trial(trials, failures, target, values, _labels(search, target, values))
            for values in search.grid(target.method)
        ]
        for target in _targets(study)
    }


def _trial(
    trials: Study, failures: Sequence[Failure], target: Target, values: Values, labels: Mapping[str, str]
) -> Trial:
    """The outcome of a trial's runs, one for each seed."""
    variant, failed = {**dict(target.variant), **labels}, failed_methods(failures)
    cells = [cell for cell in trials.cells if cell.model == target.model and dict(cell.variant) == variant]
    # A run folder may hold results of earlier settings, so a failure counts, whatever files there are.
    scores = [None if (cell.name, target.method) in failed else _score(cell, target.method) for cell in cells]
    valid = tuple(score for score in scores if score is not None)
    return Trial(values, valid, len(cells) - len(valid))


def _sampled(study: Study, search: SearchConfig, processes: int | None) -> dict[Target, list[Trial]]:
    """All trials that a sampler chose: in every round one of each target, whose values depend on its earlier ones.

    A trial that was scored is in the journal. One that failed is not: it is tried again by the next call.
    """
    assert search.trials is not None
    names = {
        Target(cell.model, tuple(cell.variant.items())[:-2], method): f"{_fingerprint(cell, search)[:12]}"
        for cell in trials_of(study).cells
        for method in cell.methods
    }
    tried: dict[Target, list[Trial]] = {target: [] for target in _targets(study)}
    with Journal(study.folder / SEARCH_FOLDER) as journal:
        for number in range(search.trials):
            # Read the scored trials of this round; choose values for the others.
            todo: dict[Target, Values] = {}
            for target, before in tried.items():
                kept = journal.read(f"{target} {names[target]}", number)
                if kept is not None:
                    before.append(Trial(kept[0], kept[1], 0))
                else:
                    todo[target] = suggest(
                        search.sampler,
                        search.space(target.method),
                        [(trial.values, trial.score) for trial in before],
                        seed=search.sampler_seed + number,
                    )
            if not todo:
                continue
            # Run these as one study, and record each score at once.
            trials = _study_of(study, _round(number, todo))
            failures = run_study(trials, processes=processes)
            _reject_without_data(failures)
            for target, values in todo.items():
                trial = _trial(trials, failures, target, values, {"method": target.method, TRIAL: str(number)})
                tried[target].append(trial)
                if trial.score is not None:
                    journal.add(f"{target} {names[target]}", number, search.space(target.method), values, trial.scores)
    return tried


def _reject_without_data(failures: Sequence[Failure]) -> None:
    """Raise RegretlessError if a run has no data: further trials would not have them either."""
    lacking = [failure for failure in failures if failure.job.name.endswith(": data")]
    if lacking:
        listed = "".join(f"\n  - {failure.job.name}: {failure.reason}" for failure in lacking)
        raise RegretlessError(f"search: {len(lacking)} trial(s) have no data; the same command resumes:{listed}")


def _fingerprint(cell: Cell, search: SearchConfig) -> str:
    """Hash of what a trial's score depends on besides the values that are searched."""
    recipe = {name: value for name, value in dump(cell.recipe).items() if name not in NO_MATTER}
    for key in {key for values in (search.values, *search.methods.values()) for key in values}:
        for settings in recipe["train"]["methods"].values():
            settings.pop(key.removeprefix("train."), None)
    recipe["train"].pop("seed", None)
    files = {
        text: content(path) for text, path in existing_paths(recipe, cell.recipe.run_dir).items() if RUN not in text
    }
    for benchmark, chat in _evaluated(cell).chat.items():
        files |= {f"{benchmark}.{name}": content(path) for name, path in chat.files().items() if path.exists()}
    about = search.model_dump(
        mode="json", include={"values", "methods", "sampler", "sampler_seed", "seeds", "data_seeds"}
    )
    return fingerprint({"recipe": recipe, "files": files, "search": about, "versions": versions_for(recipe)})


# --- scores -----------------------------------------------------------------------------------------------------------


def _metrics(evaluate: EvaluateConfig) -> list[str]:
    """What the benchmarks of an evaluation measure, with units."""
    kinds = [CHAT_KINDS[chat.benchmark] for chat in evaluate.chat.values()]
    names = [PASS_AT_1] * bool(evaluate.benchmarks)
    names += [f"{kind.main_metric} ({kind.unit})".replace("_", " ") for kind in kinds]
    return list(dict.fromkeys(names))


def _score(cell: Cell, method: str) -> float | None:
    """Mean over the search's benchmarks, on their metric's scale; None if one of them has no value."""
    folder, evaluate = cell.recipe.run_dir / "evaluate" / method, _evaluated(cell)
    files = [folder / name / "result.json" for name in evaluate.benchmarks]
    files += [folder / name / RESULT for name in evaluate.chat]
    if not all(file.is_file() for file in files):
        return None
    values = [_value(read_json(file)) for file in files]
    return None if None in values else mean(value for value in values if value is not None)


def _value(result: Mapping[str, Any]) -> float | None:
    """The main metric of a benchmark's result."""
    if "pass_at_1" in result:
        return PERCENT * float(result["pass_at_1"])
    value: float | None = result["metrics"][CHAT_KINDS[result["benchmark"]].main_metric]["value"]
    return value


def _evaluated(cell: Cell) -> EvaluateConfig:
    assert cell.recipe.evaluate is not None  # checked by `_judging`
    return cell.recipe.evaluate


def _as_json(choice: Choice) -> dict[str, Any]:
    return {
        "model": choice.target.model,
        "variant": dict(choice.target.variant),
        "method": choice.target.method,
        "metric": choice.metric,
        "best": dict(choice.best.values),
        "at_the_edge": choice.edges,
        "trials": [
            {"values": dict(trial.values), "scores": list(trial.scores), "failed": trial.failed, "score": trial.score}
            for trial in choice.trials
        ],
    }
