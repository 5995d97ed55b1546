"""Run folders to compare: their recipes, and the labels that tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regretless.core.files import fingerprint, read_json
from regretless.core.yaml_settings import read_yaml
from regretless.evaluation import harness
from regretless.evaluation.chat.chat_results import RESULT
from regretless.runs.stage_record import DESCRIBING, NO_MATTER, of_other_settings
from regretless.training.card_facts import RECORDING
from regretless.training.methods import methods_of
from regretless.workflow.run_folder import BASE, RECIPE, RUN
from regretless.workflow.stage_folder import MANIFEST

SEPARATOR = ", "
"""Between the settings of a variant."""
SEEDS = {"seed", "init_seed"}
"""Last parts of the keys of seeds."""


@dataclass(frozen=True)
class Run:
    """A run folder, and how its results are labeled; what is not set is read from the folder."""

    path: Path
    model: str | None = None
    """Name of the model that was trained; by default its hub name without the owner, or the recipe's name."""
    variant: str | None = None
    """What sets the run apart from others of the same model, methods and seeds, such as `mask.count=3000`; by default
    the settings in which these runs differ."""
    data_seed: int | None = None
    """Seed of the data: of sampling, or of the whole recipe if it samples nothing."""
    train_seed: int | None = None
    """Seed of preference training (`train.seed`)."""


class RunToCompare:
    """A run folder and its recipe, with labels that `labeled` completes."""

    def __init__(self, run: Run) -> None:
        self.labels, self.path = run, run.path
        self.recipe = read_yaml(run.path / RECIPE)
        evaluate = self._section("evaluate")
        self.benchmarks = list(evaluate.get("benchmarks") or {})
        self.chat = {label: settings.get("judge") for label, settings in (evaluate.get("chat") or {}).items()}
        """The judge of each chat benchmark."""
        self.harness = [harness.FOLDER] if evaluate.get("harness") else []
        self.decoding_seeds = list(evaluate.get("seeds") or [])

    def _section(self, name: str) -> Mapping[str, Any]:
        section = self.recipe.get(name)
        return section if isinstance(section, Mapping) else {}

    @property
    def methods(self) -> list[str]:
        """Labels of the trained models, in the recipe's order."""
        train = self.recipe.get("train")
        return (
            methods_of(train["objective"])
            if isinstance(train, Mapping) and "objective" in train
            else ([] if train is None else methods_of())
        )

    @property
    def seed(self) -> int:
        """Seed of the whole recipe."""
        return int(self.recipe.get("seed", 0))

    @property
    def data_seed(self) -> int:
        """Seed of sampling, or of the whole recipe if it samples nothing."""
        return int(self._section("sample").get("seed", self.seed))

    @property
    def train_seed(self) -> int:
        """Seed of preference training."""
        return int(self._section("train").get("seed", self.seed))

    @property
    def makes_its_problems(self) -> bool:
        """True if the problems are generated with the run's seed."""
        return self.recipe.get("world") is not None

    @property
    def contaminated(self) -> list[str]:
        """Notes on benchmarks whose problems stand in the training prompts."""
        results = self.path / "evaluate" / "results.json"
        return list(read_json(results).get("contaminated", ())) if results.is_file() else []

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.recipe.get("name", self.path.name))

    @property
    def made_model(self) -> str | None:
        """Hash of the settings, without seeds, of a model that the run makes itself; None for one that it loads."""
        name = str(self._section("model").get("name_or_path", ""))
        if name and not name.startswith(RUN):
            return None
        sections = ("model", "pretrain", "world")
        return fingerprint({key: value for key, value in self.settings.items() if key.partition(".")[0] in sections})

    @property
    def model(self) -> str:
        """Name or path of the model before training; the run's name if it makes the model itself."""
        return self.name if self.made_model else str(self._section("model")["name_or_path"])

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of the recipe by their full keys, without seeds and what no result depends on."""
        kept = {name: value for name, value in self.recipe.items() if name not in NO_MATTER}
        return {key: value for key, value in _flat(kept) if key.rpartition(".")[2] not in SEEDS}

    def settings_of(self, methods: Sequence[str]) -> dict[str, Any]:
        """Settings that results of these methods depend on; which methods and benchmarks there are is none of them."""
        trained = tuple(f"train.methods.{name}." for name in methods)
        return {
            key: value
            for key, value in self.settings.items()
            if key.partition(".")[0] not in {"evaluate", *DESCRIBING} and key != "train.objective"
            if not key.startswith("train.methods.") or key.startswith(trained)
            if not (key.startswith("train.") and key.rpartition(".")[2].startswith(RECORDING))
        }

    def evaluated(self) -> Iterator[tuple[str, str]]:
        """Model label and benchmark of everything that the recipe evaluates; the harness's tasks are one of these."""
        for label in (BASE, *self.methods):
            for benchmark in (*self.benchmarks, *self.chat, *self.harness):
                yield label, benchmark

    def unfinished(self) -> list[str]:
        """What is missing of the evaluation, or why it is not that of the recipe."""
        where = self.path
        if not any((self.benchmarks, self.chat, self.harness)):
            return [f"{where}: nothing was evaluated in this run; add a section `evaluate` to its recipe, and run it"]
        missing = []
        for label, benchmark in self.evaluated():
            evaluation = f"evaluate/{label}/{benchmark}"
            folders, result = [evaluation], "result.json"
            if benchmark in self.benchmarks:
                folders += [f"{evaluation}/seed-{seed}" for seed in self.decoding_seeds]
            else:
                result = RESULT if benchmark in self.chat else harness.SCORES
            files = [f"{folder}/{name}" for folder in folders for name in (result, MANIFEST)]
            missing += [name for name in files if not (self.path / name).is_file()]
        if not missing:
            others = [name for name in of_other_settings(self.path) if name not in DESCRIBING]
            if not others:
                return []
            return [
                f"{where}: its evaluation is not of its {RECIPE}: a partial or interrupted run has set other settings, "
                f"and {', '.join(others)} not done with them; run the same recipe to the end"
            ]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return [f"{where}: its evaluation is not finished, {missing[0]}{more} missing; run the same recipe again"]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def repeated(runs: Sequence[Run]) -> list[Run]:
    """Runs whose folder was named before."""
    paths = [run.path.resolve() for run in runs]
    return [run for number, run in enumerate(runs) if paths[number] in paths[:number]]


# --- labels ----------------------------------------------------------------------------------------------------------


def labeled(folders: Sequence[RunToCompare]) -> list[RunToCompare]:
    """The folders, with runs that have all labels."""
    full = {folder.model for folder in folders}
    short = {name: name.rstrip("/").rpartition("/")[2] for name in full}
    ambiguous = {name for name in full if list(short.values()).count(short[name]) > 1}
    models = [folder.labels.model for folder in folders]
    for folder in folders:
        run, name = folder.labels, folder.model
        folder.labels = replace(
            run,
            model=run.model or (name if name in ambiguous else short[name]),
            data_seed=folder.data_seed if run.data_seed is None else run.data_seed,
            train_seed=folder.train_seed if run.train_seed is None else run.train_seed,
        )
    _join_made([folder for folder, model in zip(folders, models, strict=True) if model is None])
    for model in dict.fromkeys(folder.labels.model for folder in folders):
        group = [folder for folder in folders if folder.labels.model == model]
        unnamed = [folder for folder in group if folder.labels.variant is None]
        names = _variants(unnamed) if twice(group) or _differ(unnamed) else [""] * len(unnamed)
        for folder, name in zip(unnamed, names, strict=True):
            folder.labels = replace(folder.labels, variant=name)
    return list(folders)


def _join_made(folders: Sequence[RunToCompare]) -> None:
    """Give one name to equally made models of runs with different names, if these differ in their seeds."""
    for made in dict.fromkeys(folder.made_model for folder in folders if folder.made_model):
        group = [folder for folder in folders if folder.made_model == made]
        names = [folder.name for folder in group]
        if len(set(names)) == 1:
            continue
        length = next(
            (position for position, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1),
            min(map(len, names)),
        )
        common = names[0][:length].rstrip("-_.=+0123456789") or names[0]
        before = [folder.labels for folder in group]
        for folder in group:
            folder.labels = replace(folder.labels, model=common)
        if twice(group):
            for folder, run in zip(group, before, strict=True):
                folder.labels = run


def _differ(folders: Sequence[RunToCompare]) -> bool:
    """Whether runs of one method differ in more than seeds: a mean over them would be one of several methods."""
    for method in {method for folder in folders for method in folder.methods}:
        settings_of_runs = [folder.settings_of([method]) for folder in folders if method in folder.methods]
        if any(settings != settings_of_runs[0] for settings in settings_of_runs):
            return True
    return False


def _variants(folders: Sequence[RunToCompare]) -> list[str]:
    """For each run, the settings that set it apart: `train.beta=0.1`; a section that only some runs have, by its name.

    What a run trains and evaluates does not count: methods and benchmarks are rows and columns already.
    """
    settings = [folder.settings_of(folder.methods) for folder in folders]
    varying = [key for key in keys_of(settings) if len({str(of_run.get(key)) for of_run in settings}) > 1]
    sections = [key.partition(".")[0] for key in varying]
    alone = {
        name
        for name in sections
        if len({str(kept) for of_run in settings if (kept := _part(of_run, name))}) == 1
        and not all(_part(of_run, name) for of_run in settings)
    }
    texts = []
    for of_run in settings:
        parts = [
            name if name in alone else f"{key}={of_run[key]!s}"
            for name, key in zip(sections, varying, strict=True)
            if key in of_run
        ]
        texts.append(SEPARATOR.join(dict.fromkeys(parts)))
    return texts


def keys_of(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys of several settings, in their order."""
    return list(dict.fromkeys(key for mapping in settings for key in mapping))


def _part(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.partition(".")[0] == section}


def twice(folders: Sequence[RunToCompare]) -> list[str]:
    """Runs of the same method, benchmark, judge, seeds and variant: one of them too many."""
    seen: dict[tuple[Any, ...], RunToCompare] = {}
    problems = []
    for folder in folders:
        run = folder.labels
        labels = folder.methods or [BASE]
        for method, benchmark in folder.evaluated():
            if method not in labels:
                continue
            judge = folder.chat.get(benchmark)
            key = (run.model, method, benchmark, judge, run.variant or "", run.data_seed, run.train_seed)
            if key in seen:
                other = seen[key]
                both = "; to compare judges, give one run both of them, under two labels in evaluate.chat"
                problems.append(
                    f"{run.path} and {other.path}: both have {method} of {run.model} on {benchmark} with data "
                    f"seed {run.data_seed}, training seed {run.train_seed} and no other setting that differs; leave "
                    f"one out{both if folder.chat != other.chat else ''}"
                )
                break
            seen[key] = folder
    return problems


def differing(folders: Sequence[RunToCompare]) -> dict[str, dict[str, str]]:
    """Settings of the recipes and versions of the evaluations in which the runs differ; `default` where not set."""
    columns = []
    for folder in folders:
        versions: dict[str, str] = {}
        for label, benchmark in folder.evaluated():
            of_packages = read_json(folder.path / "evaluate" / label / benchmark / MANIFEST)["versions"]
            versions |= {f"version of {name}": str(version) for name, version in of_packages.items()}
        columns.append({key: str(value) for key, value in folder.settings.items()} | versions)
    return {
        key: {str(folder.path): column.get(key, "default") for folder, column in zip(folders, columns, strict=True)}
        for key in keys_of(columns)
        if len({column.get(key) for column in columns}) > 1
    }
