"""The search of a study: every method is trained with every combination of settings, and the best one is taken.

Trials are a study of their own, in the folder `search`: they share data with the study, resume like it, and are judged
by benchmarks that have no problem in common with those of the study.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import pyarrow.parquet as pq
from markupsafe import Markup

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.files import read_json, write_json
from regretless.core.intervals import over_seeds
from regretless.core.run_folder import BASE
from regretless.data.records import text_key
from regretless.runs.recipe import Recipe
from regretless.studies.runner import finished, run_study
from regretless.studies.study import Cell, SearchConfig, SeedsConfig, Study, with_cells

FOLDER = "search"


@dataclass(frozen=True)
class Trial:
    """One combination of settings for a method."""

    values: Mapping[str, Any]
    scores: tuple[float, ...]
    """Mean Pass@1 over the validation benchmarks (a share), of each seed whose training succeeded."""
    failed: int
    """Seeds that failed."""

    @property
    def score(self) -> float | None:
        """Mean over the seeds; None if a seed failed, for it would be left out of the mean."""
        return mean(self.scores) if self.scores and not self.failed else None


@dataclass(frozen=True)
class Choice:
    """All trials of a method of one model and variant, in the order of the grid."""

    model: str
    variant: Mapping[str, str]
    method: str
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial with the best score; of equal ones the first. Raises RegretlessError if every trial failed."""
        scored = [trial for trial in self.trials if trial.score is not None]
        if not scored:
            raise RegretlessError(f"search: {self.place}: every trial failed; look into the logs of the search")
        return max(scored, key=lambda trial: trial.score or 0.0)

    @property
    def place(self) -> str:
        """What it is about, for messages."""
        return ", ".join([*filter(None, [self.model]), *(f"{k}={v}" for k, v in self.variant.items()), self.method])

    @property
    def edges(self) -> list[str]:
        """Settings whose best value is the least or the greatest one that was tried: a better one may lie beyond."""
        found = []
        for key, value in self.best.values.items():
            tried = [trial.values[key] for trial in self.trials]
            if all(isinstance(one, int | float) for one in tried) and value in (min(tried), max(tried)):
                found.append(key)
        return found

    @property
    def overrides(self) -> list[str]:
        """The best settings, as settings of the method."""
        return [
            f"train.methods.{self.method}.{key.removeprefix('train.')}={json.dumps(value)}"
            for key, value in self.best.values.items()
        ]


def trials_of(study: Study) -> list[Study]:
    """The studies of the trials: one for each set of methods that try the same values."""
    search = study.config.search
    assert search is not None
    methods = dict.fromkeys(method for cell in study.cells for method in cell.methods)
    common = [method for method in methods if method not in search.methods]
    groups = [(common, search.values)] if common else []
    groups += [([method], values) for method, values in search.methods.items() if method in methods]
    return [_trials(study, search, names, values) for names, values in groups]


def _trials(study: Study, search: SearchConfig, methods: list[str], tried: Mapping[str, list[Any]]) -> Study:

    def judged(recipe: Recipe) -> Recipe:
        assert recipe.evaluate is not None  # checked by `search_settings`
        evaluate = recipe.evaluate.model_copy(update={"benchmarks": search.benchmarks, "chat": {}, "seeds": []})
        return recipe.model_copy(update={"evaluate": evaluate, "inspect": None, "analyze": None, "report": None})

    values = {key: {json.dumps(one): one for one in values} for key, values in tried.items()}
    folder = FOLDER if tried is search.values else f"{FOLDER}/{'-'.join(methods)}"
    config = study.config.model_copy(
        update={
            "search": None,
            "methods": methods,
            "overrides": {**study.config.overrides, **values},
            "seeds": SeedsConfig(training=search.seeds, data=search.data_seeds or study.config.seeds.data[:1]),
        }
    )
    return with_cells(replace(study, config=config, folder=study.folder / folder, cells=[]), change=judged)


def search_settings(study: Study, processes: int | None) -> tuple[Study, list[Choice]]:
    """The study with the best settings of each method, and all trials. A trial that fails is not taken.

    Raises ConfigError for recipes that evaluate nothing, RegretlessError if every trial of a method failed.
    """
    search = study.config.search
    assert search is not None
    if any(cell.recipe.evaluate is None for cell in study.cells):
        raise ConfigError(f"{study.path}: search: needs a section `evaluate` in the recipe, whose engine trials use")
    done: list[Cell] = []
    every: list[Cell] = []
    for trials in trials_of(study):
        failures = run_study(trials, processes=processes)
        done += finished(trials, failures)
        every += trials.cells
    choices = _choices(search, study, every, done)
    write_json(study.folder / FOLDER / "search.json", [_as_json(choice) for choice in choices])
    by_place: dict[Any, list[str]] = {}
    for choice in choices:
        by_place.setdefault((choice.model, *choice.variant.items()), []).extend(choice.overrides)
    return with_cells(study, lambda model, variant: by_place[model, *variant.items()]), choices


def _choices(search: SearchConfig, study: Study, every: Sequence[Cell], done: Sequence[Cell]) -> list[Choice]:
    places = list(dict.fromkeys((cell.model, tuple(cell.variant.items())) for cell in study.cells))
    methods = list(dict.fromkeys(method for cell in study.cells for method in cell.methods))
    choices = []
    for model, variant in places:
        for method in methods:
            found = []
            for values in search.grid(method):
                labels = {**dict(variant), **{key: json.dumps(value) for key, value in values.items()}}
                cells = [
                    cell
                    for cell in every
                    if cell.model == model and dict(cell.variant) == labels and method in cell.methods
                ]
                scores = [_score(cell, method) for cell in cells if cell in done]
                known = tuple(score for score in scores if score is not None)
                found.append(Trial(values, known, len(cells) - len(known)))
            choices.append(Choice(model, dict(variant), method, tuple(found)))
    return choices


def _score(cell: Cell, method: str) -> float | None:
    assert cell.recipe.evaluate is not None
    files = [
        cell.recipe.run_dir / "evaluate" / method / name / "result.json" for name in cell.recipe.evaluate.benchmarks
    ]
    if not all(file.is_file() for file in files):
        return None
    return mean(float(read_json(file)["pass_at_1"]) for file in files)


def check_apart(study: Study, cells: Sequence[Cell]) -> None:
    """Raise ConfigError if problems that settings were chosen on are among those of the study's benchmarks.

    cells: runs of the study that are finished. A study in miniature has only one set of problems.
    """
    if study.smoke or study.config.search is None:
        return
    chosen_on = _by_world([cell for trials in trials_of(study) for cell in trials.cells])
    tested = _by_world(cells)
    shared = {key for world, keys in tested.items() for key in keys & chosen_on.get(world, set())}
    if shared:
        searched = len(set().union(*chosen_on.values()))
        raise ConfigError(
            f"search.benchmarks: {len(shared)} of their {searched} problems are also in the study's benchmarks, "
            "so its results are too good; take other problems for the search"
        )


def _by_world(cells: Sequence[Cell]) -> dict[int | None, set[str]]:
    """Identities of the problems of runs, by data seed where a run generates its problems: each seed has its own."""
    found: dict[int | None, set[str]] = {}
    for cell in cells:
        found.setdefault(cell.data_seed if cell.recipe.world is not None else None, set()).update(_problems(cell))
    return found


def _problems(cell: Cell) -> set[str]:
    """Identities of the problems that the base model answered in a run; none if it is not finished."""
    found: set[str] = set()
    assert cell.recipe.evaluate is not None
    for name in cell.recipe.evaluate.benchmarks:
        file = cell.recipe.run_dir / "evaluate" / BASE / name / "responses.parquet"
        if file.is_file():
            found |= {text_key(prompt) for prompt in pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()}
    return found


def _as_json(choice: Choice) -> dict[str, Any]:
    return {
        "model": choice.model,
        "variant": dict(choice.variant),
        "method": choice.method,
        "best": dict(choice.best.values),
        "at_the_edge": choice.edges,
        "trials": [
            {"values": dict(one.values), "scores": list(one.scores), "failed": one.failed, "score": one.score}
            for one in choice.trials
        ],
    }


def search_section(choices: Sequence[Choice], search: SearchConfig) -> Markup:
    """All trials as a section of the study's page."""
    keys = list(dict.fromkeys(key for values in (search.values, *search.methods.values()) for key in values))
    rows = [row for choice in choices for row in _rows(choice, keys)]
    titles = Markup("").join(Markup("<th>{}</th>").format(key) for key in keys)
    seeds = " × ".join(
        f"{len(seeds)} {kind} seeds"
        for kind, seeds in (("data", search.data_seeds), ("training", search.seeds))
        if seeds
    )
    edges = Markup("").join(
        Markup(
            "<li>{}: the best value of {} is the least or greatest one tried; a better one may lie beyond</li>"
        ).format(choice.place, ", ".join(choice.edges))
        for choice in choices
        if choice.edges
    )
    return Markup(
        "<p>Pass@1 (%) on {}: mean ± standard deviation over {}. Every method had {} trials; the best "
        'is bold and used in the study.</p>{}<div class="wide"><table><thead><tr><th>method</th>{}<th class="number">'
        "Pass@1 (%)</th></tr></thead><tbody>{}</tbody></table></div>"
    ).format(
        ", ".join(search.benchmarks),
        seeds,
        len(search.grid()),
        Markup("<ul>{}</ul>").format(edges) if edges else "",
        titles,
        Markup("").join(rows),
    )


def _rows(choice: Choice, keys: Sequence[str]) -> list[Markup]:
    rows = []
    for trial in choice.trials:
        if trial.score is None:
            text = Markup("{} of {} failed").format(trial.failed, trial.failed + len(trial.scores))
        else:
            found = over_seeds([100 * score for score in trial.scores])
            text = Markup(f"{found.mean:.2f}" + (f" ± {found.sd:.2f}" if found.n > 1 else ""))
        if trial is choice.best:
            text = Markup("<strong>{}</strong>").format(text)
        values = {key: json.dumps(value) for key, value in trial.values.items()}
        cells = Markup("").join(Markup("<td>{}</td>").format(values.get(key, "")) for key in keys)
        row = Markup('<tr><th>{}</th>{}<td class="number">{}</td></tr>')
        rows.append(row.format(choice.place, cells, text))
    return rows
