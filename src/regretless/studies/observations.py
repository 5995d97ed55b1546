"""Results of finished run folders, one observation for each model, method, seed, benchmark and metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from regretless.core.errors import ConfigError, DataError, reject
from regretless.core.files import fingerprint, path_fingerprint, read_json
from regretless.core.intervals import Interval, Sums
from regretless.core.mirror import RECIPE
from regretless.core.run_folder import BASE, RUN
from regretless.core.stage_folder import MANIFEST
from regretless.core.yaml_settings import read_yaml
from regretless.evaluation.chat.chat_results import CATEGORY, MAIN_METRICS, RESULT, SCALES, TURN, UNITS
from regretless.reporting.report import UNREADABLE
from regretless.training.methods import methods_of

PASS_AT_1 = "pass_at_1"
PERCENT = 100.0
COMPARE = "regretless compare"
SEPARATOR = ", "
"""Between the settings of a variant."""
SEEDS = {"seed", "init_seed"}
"""Last parts of the keys of seeds."""
NO_MATTER = {"name", "output_dir", "cluster", "threads", "report"}
"""Sections of a recipe that no result depends on."""
NOT_GRADING = {"workers"}
"""Settings of verification that change its speed only."""
NOT_DECODING = {"batch_size", "server", "vllm", "seed"}
"""Settings of sampling that change where answers are made, and the seed: greedy decoding has none, and that of a
sampled pass is in its name."""
NOT_JUDGING = {"server", "replies", "when_spent", "bootstrap", "seed", "benchmark", "judge", "questions", "limit"}
"""Settings of a chat benchmark that change no judgment, that name its column, or whose content is compared."""
ANSWERING = ("benchmark", "questions", "limit", "template", "max_new_tokens", "seed")
"""Settings whose hash names the folder of a chat benchmark's answers (`ChatBenchmarkConfig.answering`)."""


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
    url: str = ""
    """Where the run folder is, if `path` is a copy of one in an object store."""

    @property
    def shown(self) -> str:
        """The folder as the user knows it."""
        return self.url or str(self.path)


@dataclass(frozen=True)
class Observation:
    """One metric of one model on one benchmark, on the metric's own scale (percent, or a judge's 1 to 10)."""

    run: Run
    """The run that it is from, with all labels set."""
    method: str
    """Label of the model in the run: its objective, or `base`."""
    benchmark: str
    metric: str
    unit: str
    judge: str
    """Model that judged the answers; empty for a benchmark with gold answers."""
    value: float | None
    """The one number of the run: greedy Pass@1, or the metric of a chat benchmark; None if it could not be computed."""
    interval: Interval
    """95 % interval over the problems."""
    n: int
    """Problems, or judged questions."""
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    """By problem, whether the greedy answer is correct; empty for other metrics."""
    sums: Sums = field(default_factory=dict)
    """By question, for a chat metric that is a mean over questions: sum and weight of its values, to be scaled."""
    scale: float = 1.0
    sampled: Mapping[int, float] = field(default_factory=dict)
    """Decoding seed → value of the pass that was sampled with it."""

    @property
    def train_seed(self) -> int | None:
        """Seed of its training; None for the base model, which preference training did not touch."""
        return None if self.method == BASE else self.run.train_seed


@dataclass(frozen=True)
class Observed:
    """What the run folders contain."""

    runs: tuple[Run, ...]
    """With all labels set, in the order given."""
    observations: tuple[Observation, ...]
    differing: Mapping[str, Mapping[str, str]]
    """Setting or version → run → value, for those in which the runs differ; seeds are among the labels instead."""
    notes: tuple[str, ...]


def _found(run: Run) -> str:
    """What there is in place of a run, and what to do: nothing, a folder inside a run, or a single command's model."""
    if not run.path.is_dir():
        return "no such folder"
    none = f"no {RECIPE} in it"
    if (above := next((folder for folder in run.path.parents if (folder / RECIPE).is_file()), None)) is not None:
        return f"{none}; it is inside the run {above}"
    is_model = any((run.path / name).is_file() for name in ("config.json", "adapter_config.json"))
    instead = f"; `regretless evaluate --model BASE --policy NAME={run.shown} …` compares models with their base"
    return none + instead if is_model else none


def observe(runs: Sequence[Run]) -> Observed:
    """Read run folders whose results can be compared.

    Raises ConfigError that lists every reason against it: a folder that is no run, an evaluation that is not finished,
    two runs of equal settings and seeds, and benchmarks that were answered, graded or decoded differently. DataError
    for a file that cannot be read.
    """
    if not runs:
        raise ConfigError(f"{COMPARE}: expected at least one run folder")
    problems = [f"{run.shown}: named twice" for run in _repeated(runs)]
    problems += [
        f"{run.shown}: expected the folder of a run, found {_found(run)}"
        for run in runs
        if not (run.path / RECIPE).is_file()
    ]
    reject(COMPARE, problems)
    folders = [_Folder(run) for run in runs]
    reject(COMPARE, [problem for folder in folders for problem in folder.unfinished()])
    labeled = _labeled(folders)
    reject(COMPARE, _twice(labeled))
    try:
        evaluated = [_Evaluated(folder, *place) for folder in labeled for place in folder.evaluated()]
        conflicts, notes = _conflicts(evaluated)
        observations = tuple(observation for one in evaluated for observation in one.observations())
        differing = _differing(labeled)
    except UNREADABLE as error:
        raise DataError(
            f"{COMPARE}: a file of an evaluation has unexpected content ({type(error).__name__}: {error}); evaluate "
            "the runs again with this version"
        ) from error
    reject(COMPARE, conflicts)
    return Observed(tuple(folder.run for folder in labeled), observations, differing, tuple(notes))


class _Folder:
    """A run folder and its recipe."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recipe = read_yaml(run.path / RECIPE)
        evaluate = self._section("evaluate")
        self.benchmarks = list(evaluate.get("benchmarks") or {})
        self.chat = list(evaluate.get("chat") or {})
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
        return int(self.recipe.get("seed", 0))

    @property
    def data_seed(self) -> int:
        return int(self._section("sample").get("seed", self.seed))

    @property
    def train_seed(self) -> int:
        return int(self._section("train").get("seed", self.seed))

    @property
    def makes_its_problems(self) -> bool:
        """True if the problems are generated with the run's seed."""
        return self.recipe.get("world") is not None

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.recipe.get("name", self.run.path.name))

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

    def evaluated(self) -> Iterator[tuple[str, str]]:
        """Model label and benchmark of everything that the recipe evaluates."""
        for label in (BASE, *self.methods):
            for benchmark in (*self.benchmarks, *self.chat):
                yield label, benchmark

    def unfinished(self) -> list[str]:
        """What is missing of the evaluation."""
        where = self.run.shown
        if not self.benchmarks and not self.chat:
            return [f"{where}: nothing was evaluated in this run; add a section `evaluate` to its recipe, and run it"]
        missing = []
        for label, benchmark in self.evaluated():
            place = f"evaluate/{label}/{benchmark}"
            if benchmark in self.chat:
                files = [f"{place}/{RESULT}", f"{place}/{MANIFEST}"]
            else:
                folders = [place, *(f"{place}/seed-{seed}" for seed in self.decoding_seeds)]
                files = [f"{folder}/{name}" for folder in folders for name in ("result.json", MANIFEST)]
            missing += [name for name in files if not (self.run.path / name).is_file()]
        if not missing:
            return []
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return [f"{where}: its evaluation is not finished, {missing[0]}{more} missing; run the same recipe again"]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _repeated(runs: Sequence[Run]) -> list[Run]:
    places = [run.url or run.path.resolve() for run in runs]
    return [run for number, run in enumerate(runs) if places[number] in places[:number]]


# --- labels ----------------------------------------------------------------------------------------------------------


def _labeled(folders: Sequence[_Folder]) -> list[_Folder]:
    """The folders, with runs that have all labels."""
    full = {folder.model for folder in folders}
    short = {name: name.rstrip("/").rpartition("/")[2] for name in full}
    ambiguous = {name for name in full if list(short.values()).count(short[name]) > 1}
    given = [folder.run.model for folder in folders]
    for folder in folders:
        run, name = folder.run, folder.model
        folder.run = replace(
            run,
            model=run.model or (name if name in ambiguous else short[name]),
            data_seed=folder.data_seed if run.data_seed is None else run.data_seed,
            train_seed=folder.train_seed if run.train_seed is None else run.train_seed,
        )
    _join_made([folder for folder, model in zip(folders, given, strict=True) if model is None])
    for model in dict.fromkeys(folder.run.model for folder in folders):
        group = [folder for folder in folders if folder.run.model == model]
        unnamed = [folder for folder in group if folder.run.variant is None]
        names = _variants(unnamed) if _twice(group) else [""] * len(unnamed)
        for folder, name in zip(unnamed, names, strict=True):
            folder.run = replace(folder.run, variant=name)
    return list(folders)


def _join_made(folders: Sequence[_Folder]) -> None:
    """Give one name to equally made models of runs with different names, if these differ in their seeds."""
    for made in dict.fromkeys(folder.made_model for folder in folders if folder.made_model):
        group = [folder for folder in folders if folder.made_model == made]
        names = [folder.name for folder in group]
        if len(set(names)) == 1:
            continue
        length = next(
            (place for place, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1),
            min(map(len, names)),
        )
        common = names[0][:length].rstrip("-_.=+0123456789") or names[0]
        before = [folder.run for folder in group]
        for folder in group:
            folder.run = replace(folder.run, model=common)
        if _twice(group):
            for folder, run in zip(group, before, strict=True):
                folder.run = run


def _variants(folders: Sequence[_Folder]) -> list[str]:
    """For each run, the settings that set it apart: `train.beta=0.1`; a section that only some runs have, by its name.

    What a run trains and evaluates does not count: methods and benchmarks are rows and columns already.
    """
    settings = [
        {
            key: value
            for key, value in folder.settings.items()
            if not key.startswith("evaluate.") and key != "train.objective"
        }
        for folder in folders
    ]
    varying = [key for key in _keys(settings) if len({_text(one.get(key)) for one in settings}) > 1]
    sections = [key.partition(".")[0] for key in varying]
    alone = {
        name
        for name in sections
        if len({_text(kept) for one in settings if (kept := _part(one, name))}) == 1
        and not all(_part(one, name) for one in settings)
    }
    texts = []
    for one in settings:
        parts = [
            name if name in alone else f"{key}={_text(one[key])}"
            for name, key in zip(sections, varying, strict=True)
            if key in one
        ]
        texts.append(SEPARATOR.join(dict.fromkeys(parts)))
    return texts


def _keys(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for one in settings for key in one))


def _part(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key.partition(".")[0] == section}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _twice(folders: Sequence[_Folder]) -> list[str]:
    """Runs of the same method, benchmark, seeds and variant: one of them too many."""
    seen: dict[tuple[Any, ...], Run] = {}
    problems = []
    for folder in folders:
        run = folder.run
        labels = folder.methods or [BASE]
        for method, benchmark in [place for place in folder.evaluated() if place[0] in labels]:
            key = (run.model, method, benchmark, run.variant or "", run.data_seed, run.train_seed)
            if key in seen:
                problems.append(
                    f"{run.shown} and {seen[key].shown}: both have {method} of {run.model} on {benchmark} with data "
                    f"seed {run.data_seed}, training seed {run.train_seed} and no other setting that differs; leave "
                    "one out"
                )
                break
            seen[key] = run
    return problems


# --- what can be compared --------------------------------------------------------------------------------------------


class _Evaluated:
    """One model's finished evaluation on one benchmark."""

    def __init__(self, folder: _Folder, label: str, benchmark: str) -> None:
        self.folder, self.label, self.benchmark = folder, label, benchmark
        self.is_chat = benchmark in folder.chat
        self.path = folder.run.path / "evaluate" / label / benchmark
        self.samples = folder.run.path / "evaluate" / "samples" / label
        self.result = read_json(self.path / (RESULT if self.is_chat else "result.json"))
        self.passes = {
            seed: read_json(self.path / f"seed-{seed}" / "result.json")
            for seed in ([] if self.is_chat else folder.decoding_seeds)
        }

    @property
    def where(self) -> str:
        return f"{self.folder.run.shown} ({self.label})"

    @cached_property
    def settings(self) -> dict[str, str]:
        """How it was decoded and graded, or judged, by keys of the recipe."""
        own = read_json(self.path / MANIFEST)["settings"]
        if self.is_chat:
            judging = {
                f"evaluate.chat.{self.benchmark}.{key}": self._file_or_text(key, value)
                for key, value in own.items()
                if key not in NOT_JUDGING
            }
            return judging | (self._decoding(self.first_turns[0]) if self.first_turns else {})
        found = {f"verify.{key}": _text(value) for key, value in own.items() if key not in NOT_GRADING}
        found |= self._decoding(self.samples / self.benchmark / "greedy")
        for seed in self.folder.decoding_seeds[:1]:
            sampled = self._decoding(self.samples / self.benchmark / f"seed-{seed}")
            found |= {f"{key} (sampled)": value for key, value in sampled.items()}
        return found

    def _decoding(self, folder: Path) -> dict[str, str]:
        if not (folder / MANIFEST).is_file():
            return {}
        sampling = read_json(folder / MANIFEST)["settings"]["sampling"]
        return {f"evaluate.{key}": _text(value) for key, value in sampling.items() if key not in NOT_DECODING}

    def _file_or_text(self, key: str, value: Any) -> str:
        """The value; for a file that is still there, its content, wherever it is."""
        if key not in ("judge_prompt", "references", "baseline", "gamed_baselines") or not isinstance(value, str):
            return _text(value)
        path = Path(value).expanduser()
        if self.folder.makes_its_problems and key != "judge_prompt":
            return "a file"  # made with the run's seed, like its problems
        return path_fingerprint(path) if path.is_file() else value

    @cached_property
    def first_turns(self) -> list[Path]:
        """Folders of the answers to a chat benchmark's first prompts, one for each temperature."""
        settings = read_json(self.path / MANIFEST)["settings"]
        kind = f"{settings['benchmark']}-{fingerprint({name: settings.get(name) for name in ANSWERING})[:8]}"
        return sorted(manifest.parent for manifest in self.samples.glob(f"{kind}/turn-1-*/{MANIFEST}"))

    @cached_property
    def problems(self) -> dict[str, str]:
        """Problem → hash of its text and gold answer (empty where the answers' file is not there)."""
        if self.is_chat:
            asked = [str(read_json(turn / MANIFEST)["settings"]["prompts"]) for turn in self.first_turns]
            return {"questions": fingerprint([self.result["questions"], *asked])}
        file = self.path / "responses.parquet"
        if not file.is_file():
            return dict.fromkeys(self.result["verdicts"], "")
        rows = pq.read_table(file, columns=["prompt_id", "prompt", "answer"]).to_pylist()
        return {row["prompt_id"]: fingerprint([row["prompt"], row["answer"]]) for row in rows}

    def observations(self) -> Iterator[Observation]:
        run = self.folder.run
        if not self.is_chat:
            low, high = (PERCENT * bound if bound is not None else float("nan") for bound in self.result["interval"])
            yield Observation(
                run=run,
                method=self.label,
                benchmark=self.benchmark,
                metric=PASS_AT_1,
                unit="%",
                judge="",
                value=PERCENT * self.result["pass_at_1"],
                interval=Interval(low, high),
                n=self.result["n"],
                verdicts=self.result["verdicts"],
                sampled={seed: PERCENT * one["pass_at_1"] for seed, one in self.passes.items()},
            )
            return
        kind = self.result["benchmark"]
        for metric, found in self.result["metrics"].items():
            if not metric.startswith((CATEGORY, TURN)):
                low, high = (float("nan") if found[name] is None else found[name] for name in ("low", "high"))
                is_mean = metric == MAIN_METRICS[kind]
                yield Observation(
                    run=run,
                    method=self.label,
                    benchmark=self.benchmark,
                    metric=metric,
                    unit=UNITS[kind],
                    judge=self.result["judge"],
                    value=found["value"],
                    interval=Interval(low, high),
                    n=found["n"],
                    sums={key: (total, weight) for key, (total, weight) in self.result["values"].items()}
                    if is_mean
                    else {},
                    scale=SCALES[kind],
                )


def _conflicts(evaluated: Sequence[_Evaluated]) -> tuple[list[str], list[str]]:
    """Reasons why numbers cannot stand in one column, and notes about those that can."""
    problems, notes = [], []
    for benchmark in dict.fromkeys(one.benchmark for one in evaluated):
        group = [one for one in evaluated if one.benchmark == benchmark]
        problems += _settings_that_differ(benchmark, group)
        seeds = {one.folder.run.data_seed for one in group}
        if all(one.folder.makes_its_problems for one in group) and len(seeds) > 1:
            # Every data seed has a world of its own; within one, all answer the same problems.
            own = [[one for one in group if one.folder.run.data_seed == seed] for seed in seeds]
            found = [text for part in own for text in _other_problems(benchmark, part)]
            sizes = {len(one.problems): one.where for one in group}
            if len(sizes) > 1:
                found.append(f"{benchmark}: {_listed({f'{size} problems': [sizes[size]] for size in sizes})}")
            if not found and len({fingerprint(one.problems) for one in group}) > 1:
                notes.append(f"{benchmark}: its problems are made with the data seed, so each has its own.")
        else:
            found = _other_problems(benchmark, group)
        problems += found
        chosen = {one.folder.run.shown: tuple(one.folder.decoding_seeds) for one in group if not one.is_chat}
        if len(set(chosen.values())) > 1:
            notes.append(f"{benchmark}: the runs have different decoding seeds (evaluate.seeds): {_by_run(chosen)}.")
    return problems, list(dict.fromkeys(notes))


def _settings_that_differ(benchmark: str, group: Sequence[_Evaluated]) -> list[str]:
    problems = []
    for key in _keys(one.settings for one in group):
        values: dict[str, list[str]] = {}
        for one in group:
            if key in one.settings:
                values.setdefault(one.settings[key], []).append(one.where)
        if len(values) > 1:
            problems.append(
                f"{benchmark}: answered or graded differently: {key} is {_listed(values)}; evaluate them again alike"
            )
    return problems


def _other_problems(benchmark: str, group: Sequence[_Evaluated]) -> list[str]:
    first = group[0]
    for one in group[1:]:
        if one.problems == first.problems:
            continue
        alone = [len(a.problems.keys() - b.problems.keys()) for a, b in ((first, one), (one, first))]
        common = one.problems.keys() & first.problems.keys()
        changed = [
            key for key in common if "" not in (pair := {one.problems[key], first.problems[key]}) and len(pair) > 1
        ]
        if any(alone) or changed:
            return [
                f"{benchmark}: {first.where} and {one.where} answered different problems: {alone[0]} only in the "
                f"first, {alone[1]} only in the second, {len(changed)} with other text or gold answer; evaluate them "
                "on the same problems"
            ]
    return []


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{value} in {runs[0]}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
        for value, runs in values.items()
    )


def _by_run(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{', '.join(map(str, value)) or 'none'} in {run}" for run, value in values.items())


def _differing(folders: Sequence[_Folder]) -> dict[str, dict[str, str]]:
    """Settings of the recipes and versions of the evaluations in which the runs differ; `default` where not set."""
    columns = []
    for folder in folders:
        versions: dict[str, str] = {}
        for label, benchmark in folder.evaluated():
            found = read_json(folder.run.path / "evaluate" / label / benchmark / MANIFEST)["versions"]
            versions |= {f"version of {name}": str(version) for name, version in found.items()}
        columns.append({key: _text(value) for key, value in folder.settings.items()} | versions)
    return {
        key: {folder.run.shown: one.get(key, "default") for folder, one in zip(folders, columns, strict=True)}
        for key in _keys(columns)
        if len({one.get(key) for one in columns}) > 1
    }
