"""A study: a recipe, and what varies over it: models, methods, seeds and any settings. Each combination is a run."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from regretless.core.bundled import find
from regretless.core.errors import ConfigError, reject
from regretless.core.paths import OutputPath
from regretless.core.secrets import is_secret, revealed
from regretless.core.settings import DECIDED, ByFolder, FolderName, Section, Seed, in_one_folder
from regretless.core.yaml_settings import merge, read_yaml
from regretless.evaluation.results import BenchmarkSource
from regretless.runs.miniature import smoke_recipe
from regretless.runs.recipe import Recipe, apply_overrides, parse_recipe
from regretless.runs.stages.train import SHORT as SET_BY_SMOKE
from regretless.studies.compared_runs import SEPARATOR, Run
from regretless.workflow.run_folder import BASE

RECIPE = "recipe"
"""Key of a model that names a recipe of its own."""
OBJECTIVE = "train.objective"
MOST_RUNS = 10_000
"""Of a study, and of its search: each is checked before the first begins, which takes milliseconds."""
LONGEST_RUN_NAME = 200
"""Bytes; file systems allow 255 in a name, and prefixes and suffixes are added."""
NOT_IN_NAMES = re.compile(r"[^\w.=+-]+")
SeedList = list[Seed]
Number = Annotated[int, Field(strict=True)] | float


class SeedsConfig(Section):
    """The three kinds of seed. An empty list leaves the recipe's own."""

    training: SeedList = Field(default=[])
    """Seeds of preference training (`train.seed`): the same pairs in another order, other adapter weights."""
    data: SeedList = Field(default=[])
    """Seeds of everything (`seed`): other responses, other pairs, and other weights of models that are made here."""
    decoding: SeedList = Field(default=[])
    """Seeds of sampled answers to the benchmarks (`evaluate.seeds`): one model, asked several times."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in type(self).model_fields:
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name}: a seed occurs twice")
        return self


class RangeConfig(Section):
    """A range of values, for a search that is no grid."""

    low: Number
    """Least value. Between two whole numbers (1 and 10), only whole numbers are tried; between 1.0 and 10 all are."""
    high: Number
    """Greatest value."""
    log: bool = False
    """Whether values are drawn evenly by their logarithm, as suits a learning rate."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high or (self.log and self.low <= 0):
            raise ValueError(f"expected low < high{', both above 0' if self.log else ''}, got {self.low}, {self.high}")
        return self


class SearchConfig(Section):
    """A search for the settings of each method, before the study: every method gets the same number of trials."""

    sampler: Literal["grid", "tpe", "random"] = "grid"
    """What chooses the values of each trial: `grid` tries every combination; `tpe` and `random` are samplers of Optuna,
    and make `trials` trials."""
    trials: int | None = Field(default=None, ge=1)
    """Number of trials of each method, for `tpe` and `random`."""
    values: Annotated[dict[str, list[Any] | RangeConfig], DECIDED] = Field(min_length=1)
    """Settings of training by key, such as `train.learning_rate`, each with at least two values, or, for `tpe` and
    `random`, a range. They take precedence over the method's own settings in the recipe."""
    methods: Annotated[dict[str, dict[str, list[Any] | RangeConfig]], DECIDED] = Field(default={})
    """Methods with values of their own in place of `values`; in a grid they must have as many combinations."""
    seeds: SeedList = Field(default=[0, 1, 2])
    """Training seeds of each trial; the trial with the best mean over them is taken."""
    data_seeds: SeedList = Field(default=[])
    """Data seeds of each trial; by default the study's first. With these and `seeds` both, every combination."""
    sampler_seed: Seed = 0
    """Random seed of the sampler. The same seed gives the same first trials to every method."""
    benchmarks: ByFolder[BenchmarkSource] = Field(default={})
    """Benchmarks with gold answers that trials are judged by, by the mean of Pass@1. No problem of the study's own
    benchmarks may be among theirs."""
    chat: ByFolder[dict[str, Any]] = Field(default={})
    """Chat benchmarks that trials are judged by, as in `evaluate.chat`, whose common settings apply: by the mean of win
    rates, or of MT-Bench scores. No question of the study's own benchmarks may be among theirs. If there are
    `benchmarks` as well, each model is judged by the kind that its recipe evaluates."""

    @field_validator("values")
    @classmethod
    def _of_training(cls, value: dict[str, list[Any] | RangeConfig]) -> dict[str, list[Any] | RangeConfig]:
        for key, values in value.items():
            if (
                is_secret(key)
                or not key.startswith("train.")
                or key.startswith("train.methods.")
                or key in ("train.seed", OBJECTIVE)
            ):
                raise ValueError(f"{key}: expected a setting of training that methods have in common, as train.beta")
            if isinstance(values, list) and (
                len(values) < 2 or len({json.dumps(item) for item in values}) < len(values)
            ):
                raise ValueError(f"{key}: expected at least two values, each once")
        return value

    @field_validator("methods")
    @classmethod
    def _of_training_too(
        cls, value: dict[str, dict[str, list[Any] | RangeConfig]]
    ) -> dict[str, dict[str, list[Any] | RangeConfig]]:
        return {method: cls._of_training(values) for method, values in value.items()}

    @model_validator(mode="after")
    def _fits_the_sampler(self) -> Self:
        if self.sampler == "grid":
            every = [item for values in (self.values, *self.methods.values()) for item in values.items()]
            if ranges := [key for key, values in every if isinstance(values, RangeConfig)]:
                raise ValueError(f"values: {', '.join(ranges)}: a grid needs a list of values; or set sampler: tpe")
            if self.trials is not None:
                raise ValueError("trials: a grid tries every combination once; remove it, or set sampler: tpe")
            counts = {method: self._combinations(method) for method in self.methods}
            if wrong := [f"{method} has {count}" for method, count in counts.items() if count != self.budget]:
                raise ValueError(
                    f"methods: every method tries as many combinations; `values` has {self.budget}, {', '.join(wrong)}"
                )
        elif self.trials is None:
            raise ValueError(f"trials: required by sampler {self.sampler}")
        if any(len(set(seeds)) < len(seeds) for seeds in (self.seeds, self.data_seeds)):
            raise ValueError("seeds: a seed occurs twice")
        if not self.seeds and not self.data_seeds:
            raise ValueError("seeds: expected at least one seed, of training or of data")
        if not self.benchmarks and not self.chat:
            raise ValueError("expected at least one benchmark in `benchmarks` or `chat`")
        return self

    def space(self, method: str) -> dict[str, list[Any] | RangeConfig]:
        """The values that a method can try, by key."""
        return self.methods.get(method, self.values)

    def grid(self, method: str = "") -> list[dict[str, Any]]:
        """Every combination of values of a method, of a search without ranges."""
        lists = {key: values for key, values in self.space(method).items() if isinstance(values, list)}
        return [dict(zip(lists, taken, strict=True)) for taken in itertools.product(*lists.values())]

    def _combinations(self, method: str = "") -> int:
        return prod(len(values) for values in self.space(method).values() if isinstance(values, list))

    @property
    def budget(self) -> int:
        """Number of trials of each method."""
        return self._combinations() if self.trials is None else self.trials

    @property
    def in_miniature(self) -> Self:
        """The search of a smoke run: of each setting the first and last value, or the first one if smoke runs set it
        themselves; two trials of a sampler, one seed."""

        def first_and_last(values: dict[str, list[Any] | RangeConfig]) -> dict[str, list[Any] | RangeConfig]:
            return {
                key: [candidates[0], candidates[-1]][: 1 if key.removeprefix("train.") in SET_BY_SMOKE else 2]
                if isinstance(candidates, list)
                else candidates
                for key, candidates in values.items()
            }

        shrunk = {
            "values": first_and_last(self.values),
            "methods": {method: first_and_last(values) for method, values in self.methods.items()},
            "trials": None if self.trials is None else min(self.trials, 2),
            "seeds": self.seeds[:1],
            "data_seeds": self.data_seeds[:1],
        }
        return self.model_copy(update=shrunk)


class StudyConfig(Section):
    """A study file. Paths of recipes are relative to it; a packaged recipe goes by its name."""

    name: FolderName
    """Name of the study, and of its folder unless `output_dir` is given."""
    output_dir: OutputPath | None = None
    """Folder of the study; by default `runs/<name>`."""
    store: OutputPath | None = None
    """Folder of finished units of work, which several studies may share; by default it is in the study's folder."""
    recipe: str | None = None
    """Recipe of all models that do not name their own."""
    models: dict[str, dict[str, Any]] = Field(default={})
    """Models by label. The value holds settings of the recipe for this model, such as `model` or `train`, and may name
    a recipe of its own (`recipe`)."""
    methods: list[str] = Field(default=[])
    """Objectives to train, each by itself; by default those of the recipe."""
    seeds: SeedsConfig = SeedsConfig()
    """Seeds over which every model and method is repeated."""
    overrides: Annotated[dict[str, list[Any] | dict[str, Any]], DECIDED] = Field(default={})
    """Settings by key, such as `mask.count` or `train.beta`, with a list of values, or values by label. Every
    combination is a variant; null removes a section. A key may name several settings that vary together, such as
    `rounds.count, train.max_steps`; each of its values is a list with one for each, and the first is the label."""
    settings: Annotated[dict[str, Any], DECIDED] = Field(default={})
    """Settings of all runs, by key."""
    search: SearchConfig | None = None
    """Choose settings of training for every model, variant and method before the study."""
    baseline: str = BASE
    """Method that the others are compared with, or a variant."""
    distance_to: str = ""
    """Method whose models those of all other methods and variants are compared with, token by token (Table 4 of the
    paper, MSE); left empty, nothing is compared across runs."""
    figures: list[Literal["png", "pdf", "svg"]] = Field(default=[])
    """Formats in which figures are also written as files."""

    @field_validator("overrides")
    @classmethod
    def _some_values(cls, value: dict[str, Any]) -> dict[str, Any]:
        if empty := [key for key, values in value.items() if not values]:
            raise ValueError(f"{', '.join(empty)}: expected at least one value")
        keys = [name for key in value for name in _keys(key)]
        if secret := [key for key in keys if is_secret(key)]:
            raise ValueError(f"{', '.join(secret)}: a secret would be the name of a variant; put it under `settings`")
        if again := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            raise ValueError(f"{', '.join(again)}: named by two keys; a setting has one value in a run")
        for key, values in value.items():
            count = len(_keys(key))
            for item in values.values() if isinstance(values, dict) else values:
                if count > 1 and not (isinstance(item, list) and len(item) == count):
                    raise ValueError(f"{key}: expected a list of {count} values for each variant, got {item!r:.80}")
        labels = {key: [label for label, _ in _labelled(key, values)] for key, values in value.items()}
        if twice := [f"{key}={label}" for key, names in labels.items() for label in names if names.count(label) > 1]:
            raise ValueError(f"{', '.join(dict.fromkeys(twice))}: a value occurs twice")
        return value

    @model_validator(mode="after")
    def _searches_what_is_free(self) -> Self:
        searched = (
            set()
            if self.search is None
            else {key for space in (self.search.values, *self.search.methods.values()) for key in space}
        )
        if twice := sorted(searched.intersection(name for key in self.overrides for name in _keys(key))):
            raise ValueError(f"search.values: {', '.join(twice)}: also in `overrides`; a value is searched or given")
        return self

    @model_validator(mode="after")
    def _can_be_counted(self) -> Self:
        variants = prod(map(len, self.overrides.values())) * max(1, len(self.models))
        runs = {"": variants * prod(len(seeds) or 1 for seeds in (self.seeds.data, self.seeds.training))}
        if self.search is not None and self.search.trials is None:
            seeds = prod(len(seeds) or 1 for seeds in (self.search.data_seeds, self.search.seeds))
            runs["search: "] = variants * (1 + len(self.search.methods)) * self.search.budget * seeds
        for where, count in runs.items():
            if count > MOST_RUNS:
                raise ValueError(f"{where}expected at most {MOST_RUNS:,} runs, got {count:,}: every combination is one")
        return self

    @model_validator(mode="after")
    def _has_recipes(self) -> Self:
        if "" in self.models:
            raise ValueError("models: expected labels that are not empty")
        without = [label for label, settings in self.models.items() if RECIPE not in settings]
        if self.recipe is None and (without or not self.models):
            raise ValueError(f"recipe: required{': ' + ', '.join(without) + ' name none' if without else ''}")
        return self


@dataclass(frozen=True)
class Cell:
    """One run of a study: a model, a variant of settings, a seed of the data and a seed of training."""

    model: str
    """Its label; empty if the study has one model."""
    variant: Mapping[str, str]
    """Labels of the values, by key."""
    data_seed: int | None
    training_seed: int | None
    recipe: Recipe = field(compare=False)
    recipe_name: str = ""
    """Name of the recipe before it was made one of the study; it stands for the model if that has no label."""

    @property
    def name(self) -> str:
        """Its folder, and its name in messages."""
        return self._name(self.settings) or "run"

    @property
    def settings(self) -> list[str]:
        """Its variant, setting by setting."""
        return [f"{key}={label}" for key, label in self.variant.items()]

    @property
    def start(self) -> str:
        """The part of its name that runs of the same model and seeds share."""
        return self._name(()) or "models"

    def _name(self, variant: Iterable[str]) -> str:
        seeds = {"data": self.data_seed, "training": self.training_seed}
        parts = [self.model, *variant, *(f"{kind}-{seed}" for kind, seed in seeds.items() if seed is not None)]
        return NOT_IN_NAMES.sub("-", "_".join(filter(None, parts))).strip("-")

    @property
    def methods(self) -> list[str]:
        """Its trained objectives."""
        return self.recipe.train.objectives if self.recipe.train is not None else []

    @property
    def run(self) -> Run:
        """Its run folder, with the labels that the study gives it."""
        return Run(
            self.recipe.run_dir,
            model=self.model or self.recipe_name,
            variant=SEPARATOR.join(self.settings) or None,
            data_seed=self.data_seed,
            train_seed=self.training_seed,
        )


@dataclass(frozen=True)
class Study:
    """A study, read and checked."""

    config: StudyConfig
    path: Path
    """Its file."""
    overrides: Sequence[str]
    """Settings of the command line, for all of its runs."""
    folder: Path
    store: Path
    """Folder of finished units; those of runs in miniature stay in the study."""
    cells: list[Cell]
    smoke: bool = False


def load_study(
    path: Path, overrides: Sequence[str] = (), *, output_dir: str | None = None, smoke: bool = False
) -> Study:
    """The study of a file, or a packaged study's name, with `key=value` overrides for all of its runs.

    Raises ConfigError that lists every problem: of the study, and of the recipe of each run.
    """
    path = find(path, "studies")
    values = read_yaml(path)
    if output_dir is not None:
        values["output_dir"] = output_dir
    config = StudyConfig.parse(values, str(path))
    if smoke and config.search is not None:
        config = config.model_copy(update={"search": config.search.in_miniature})
    folder = Path(config.output_dir or f"runs/{config.name}")
    folder = folder.with_name(f"{folder.name}-smoke") if smoke and output_dir is None else folder
    store = Path(config.store) if config.store and not smoke else folder / "units"
    return with_cells(Study(config, path, overrides, folder, store, [], smoke), problems=_unknown_names)


def _unknown_names(config: StudyConfig, cells: Sequence[Cell]) -> list[str]:
    """Problems of the settings that name a method or a variant of the study. cells: the runs without problems."""
    methods = [*config.methods, *(method for cell in cells for method in cell.methods)]
    named = [("distance_to", config.distance_to, methods)] if config.distance_to else []
    named += [] if config.search is None else [("search.methods", name, methods) for name in config.search.methods]
    evaluated = [cell for cell in cells if cell.recipe.evaluate is not None]
    if evaluated:
        policies = [name for cell in evaluated if cell.recipe.evaluate for name in cell.recipe.evaluate.policies]
        variants = [name for cell in cells if cell.run.variant for name in (*cell.settings, cell.run.variant)]
        named.append(("baseline", config.baseline, [BASE, *methods, *policies, *variants]))
    return [
        f"{key}: expected one of {', '.join(dict.fromkeys(names))}, got {name}"
        for key, name, names in named
        if names and name not in names
    ]


Further = tuple[Mapping[str, str], Sequence[str]]
"""Labels and settings (`key=value`) of a run besides those of its variant."""


def with_cells(
    study: Study,
    further: Callable[[str, Mapping[str, str]], Sequence[Further]] = lambda *_: [({}, ())],
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    problems: Callable[[StudyConfig, Sequence[Cell]], list[str]] = lambda *_: [],
) -> Study:
    """The study with the runs that its settings stand for.

    further: what the runs of a model and variant have besides; each item gives runs of its own. change: applied to
    every recipe. problems: of the settings together with the runs.
    Raises ConfigError that lists the problems of all recipes, of the runs' names, and these.
    """
    cells, in_recipes = _cells(study, further, change)
    names = [cell.name for cell in cells]
    in_names = [f"{name}: two runs have this folder; choose other labels" for name in in_one_folder(names)]
    in_names += [
        f"{name}: expected at most {LONGEST_RUN_NAME} bytes, beginning with a letter, a digit or _: it becomes a "
        "folder; choose other labels, which values can have, too (key: {label: value})"
        for name in names
        if re.match(r"\w", name) is None or len(name.encode()) > LONGEST_RUN_NAME
    ]
    reject(str(study.path), list(dict.fromkeys([*problems(study.config, cells), *in_recipes, *in_names])))
    cells = [
        replace(
            cell,
            recipe=cell.recipe.model_copy(update={"name": cell.name, "output_dir": _run_dir(study.folder, cell)}),
        )
        for cell in cells
    ]
    return replace(study, cells=cells)


def _cells(
    study: Study,
    further: Callable[[str, Mapping[str, str]], Sequence[Further]],
    change: Callable[[Recipe], Recipe],
) -> tuple[list[Cell], list[str]]:
    """The runs whose recipes have no problems, and the problems of the others."""
    config = study.config
    cells: list[Cell] = []
    problems: dict[str, list[str]] = {}
    seeds: list[Sequence[int | None]] = [values or [None] for values in (config.seeds.data, config.seeds.training)]
    variants = [_labelled(key, values) for key, values in config.overrides.items()]
    for model, settings in (config.models or {"": {}}).items():
        for *taken, data_seed, training_seed in itertools.product(*variants, *seeds):
            varied = {_keys(key)[0]: label for key, (label, _) in zip(config.overrides, taken, strict=True)}
            # Settings of the study, in the order in which later ones take precedence.
            texts = [override(key, value) for key, value in config.settings.items()]
            for key, (_, value) in zip(config.overrides, taken, strict=True):
                together = value if len(_keys(key)) > 1 else [value]
                texts += [override(name, one) for name, one in zip(_keys(key), together, strict=True)]
            texts += [override(OBJECTIVE, config.methods)] if config.methods else []
            texts += [override("seed", data_seed)] if data_seed is not None else []
            texts += [override("train.seed", training_seed)] if training_seed is not None else []
            texts += [override("evaluate.seeds", config.seeds.decoding)] if config.seeds.decoding else []
            for labels, more in further(model, varied):
                variant = {**varied, **labels}
                where = ", ".join([model or "recipe", *(f"{key}={label}" for key, label in variant.items())])
                try:
                    recipe = change(_recipe(study, settings, [*texts, *more], where))
                    recipe = smoke_recipe(recipe) if study.smoke else recipe
                except ConfigError as error:
                    for problem in error.problems:
                        problems.setdefault(problem, []).append(where)
                else:
                    cells.append(Cell(model, variant, data_seed, training_seed, recipe, recipe.name))
    return cells, [f"{problem} (in {', '.join(dict.fromkeys(runs))})" for problem, runs in problems.items()]


def _recipe(study: Study, settings: Mapping[str, Any], texts: Sequence[str], where: str) -> Recipe:
    """The recipe of a model, with settings `key=value` of the study. Raises ConfigError with its problems."""
    base = find(str(settings.get(RECIPE, study.config.recipe)), beside=study.path.parent)
    values = merge(read_yaml(base), {key: value for key, value in settings.items() if key != RECIPE})
    return parse_recipe(apply_overrides(values, [*texts, *study.overrides], quiet=True), where)


def _run_dir(folder: Path, cell: Cell) -> str:
    return str((folder / "runs" / cell.name).resolve())


def _keys(key: str) -> list[str]:
    """The settings that a key of `overrides` names."""
    return [name.strip() for name in key.split(",")]


def _labelled(key: str, values: list[Any] | dict[str, Any]) -> list[tuple[str, Any]]:
    """The values of a key of `overrides`, each with its label."""
    if isinstance(values, dict):
        return list(values.items())
    return [(_label(value[0] if len(_keys(key)) > 1 else value), value) for value in values]


def _label(value: Any) -> str:
    """The label of a value without one."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def override(key: str, value: Any) -> str:
    """A setting as `key=value`, as the command line takes it."""
    return f"{key}={json.dumps(revealed(value), ensure_ascii=False)}"
