"""Problems that can be detected before the first stage: missing files, hub ids, packages, keys, training arguments.

A recipe's types and bounds are checked when it is loaded, on any machine. These checks depend on the machine.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from regretless.analysis.analyze import AnalyzeConfig
from regretless.core.errors import problems_of
from regretless.core.hub import Repository, may_be_repository, missing
from regretless.core.paths import harm, url_of
from regretless.core.settings import Section, named_paths
from regretless.data.prompts import PromptSource
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.conditions import SAMPLES
from regretless.evaluation.harness import FOLDER as HARNESS
from regretless.evaluation.harness import check_harness
from regretless.evaluation.results import BenchmarkSource, EvaluateConfig
from regretless.labeling.judge import JudgeConfig
from regretless.labeling.judge_prompt import JudgePrompt, load_aspects
from regretless.labeling.mask import MaskConfig
from regretless.modeling.chat_templates import CHAT_TEMPLATES, read_template
from regretless.modeling.load import ModelConfig, check_architecture
from regretless.reporting.token_figures import FiguresConfig
from regretless.runs import stage_record
from regretless.runs.recipe import PairsSource, PretrainConfig, Recipe
from regretless.runs.side_by_side import parallel_problems
from regretless.runs.stages import STAGES, Stage
from regretless.sampling.engines import ENGINES
from regretless.sampling.sample import SampleConfig
from regretless.training.ray_train import ONE_NUMBER
from regretless.training.train_config import TrainConfig
from regretless.workflow.cluster import ClusterConfig, check_ray
from regretless.workflow.run_folder import BASE, RUN, RunFolder
from regretless.workflow.stage_folder import MANIFEST, check_ours
from regretless.world.world import output_names

KINDS = ("benchmarks", "chat")
"""Settings of `evaluate` that hold benchmarks."""
USES_MODEL = ("inspect", "train", "evaluate", "analyze")
"""Sections that use the recipe's `model`."""


@dataclass
class Findings:
    """Problems so far, and the hub repositories that must still be looked up."""

    problems: list[str] = field(default_factory=list)
    asked: list[tuple[str, Repository]] = field(default_factory=list)
    """Key of the setting, and the repository it names."""
    finished: bool = False
    """True while settings of finished work are checked: only their paths count, which are part of what it depends on.
    Keys, servers, packages and the hub are not needed again."""

    def add(self, key: str, problem: str) -> None:
        """Add a problem of a setting."""
        self.problems.append(f"{key}: {problem}" if key else problem)

    def under(self, key: str, *checks: Callable[[], Any]) -> None:
        """Add the problems that checks of a section raise; a message may begin with the setting's own name."""
        if self.finished:
            return
        for problem in problems_of(*checks):
            message = re.sub(r"^model\.architecture( \(\w+\))?(: )?", "", problem)
            if key and message.startswith(("server: ", ".")):
                self.problems.append(f"{key}.{message.removeprefix('.')}")
            else:
                self.add(key, message)

    def all(self) -> list[str]:
        """Every problem, including those from the hub: one request for each repository."""
        unusable = missing([repository for _, repository in self.asked])
        absent = [f"{key}: {unusable[one]} (got {one.name!r})" for key, one in self.asked if one in unusable]
        return list(dict.fromkeys([*self.problems, *absent]))


@dataclass(frozen=True)
class Surroundings:
    """Context of settings: a run folder, what its earlier stages produce, and what is finished."""

    run: Path | None = None
    made: Callable[[str], str | None] = lambda _: None
    """Why no stage produces a path that begins with `{run}`, or None if one does."""
    done: Collection[str] = ()
    """Keys of sections that are finished."""
    cluster: ClusterConfig | None = None
    """The cluster that the recipe runs on; None for this machine."""


def recipe_problems(
    recipe: Recipe, names: Collection[str] | None = None, outputs: Sequence[Path] | None = None
) -> list[str]:
    """Detectable problems that would stop the stages of a recipe (or those in `names`) on this machine.

    outputs: files and folders that a stage's command replaces; by default the work is done in the run folder.
    A finished stage needs no key and no hub. Its files have to be there: without them it would look like another
    question, and be answered anew.
    """
    wanted = [
        name
        for name in Recipe.model_fields
        if getattr(recipe, name) not in (None, {}) and (names is None or name in names)
    ]
    run = recipe.run_dir
    here = Surroundings(run, lambda text: _not_made(recipe, text), _done_benchmarks(recipe), recipe.cluster)
    findings = Findings()
    for name in wanted:
        section = getattr(recipe, name)
        if name == "responses":
            _path(findings, here, name, section)
        elif isinstance(section, Section) and name != "model":
            section_problems(findings, here, section, name, finished=_is_done(recipe, name))
        elif name in ("pretrain", "prompts"):
            for label, entry in section.items():
                is_done = (run / name / (label if name == "pretrain" else "") / MANIFEST).is_file()
                section_problems(findings, here, entry, f"{name}.{label}", finished=is_done)
    using = [name for name in USES_MODEL if name in wanted]
    if recipe.model is not None:
        is_done = bool(using) and all(_is_done(recipe, name) for name in using)
        section_problems(findings, here, recipe.model, "model", finished=is_done)
    _figures(findings, recipe, wanted)
    findings.problems += parallel_problems(recipe)
    findings.problems += _overlaps(recipe, wanted, names is None, outputs)
    return findings.all()


def asked_for(recipe: Recipe) -> Iterator[tuple[str, Collection[str], Collection[str] | None]]:
    """Folders that a run of the whole recipe makes, by the folder above them; others (of some) are moved aside."""
    yield "", {stage.place for stage in _stages_of(recipe)}, {stage.place for stage in STAGES.values()}
    yield "pretrain", recipe.pretrain, None
    objectives = recipe.train.objectives if recipe.train else []
    yield "train", objectives, None
    if (evaluate := recipe.evaluate) is not None:
        labels = [BASE, *objectives, *evaluate.policies]
        yield "evaluate", [*labels, SAMPLES], None
        for label in labels:
            yield (
                f"evaluate/{label}",
                [*evaluate.benchmarks, *evaluate.chat, *([HARNESS] if evaluate.harness else [])],
                None,
            )
            for benchmark in evaluate.benchmarks:
                place = f"evaluate/{label}/{benchmark}"
                seeds = [path.name for path in (recipe.run_dir / place).glob("seed-*")]
                yield place, [f"seed-{seed}" for seed in evaluate.seeds], seeds


def _stages_of(recipe: Recipe) -> list[Stage[Any]]:
    return [stage for name, stage in STAGES.items() if getattr(recipe, name) not in (None, {})]


def _units(recipe: Recipe, name: str) -> list[Path]:
    """Folders of the units of a stage, as far as they are known before it runs."""
    place = recipe.run_dir / STAGES[name].place
    if name == "pretrain":
        return [place / label for label in recipe.pretrain]
    if name == "train":
        return [place / objective for objective in (recipe.train.objectives if recipe.train else ())]
    if name == "evaluate" and (evaluate := recipe.evaluate) is not None:
        labels = [BASE, *(recipe.train.objectives if recipe.train else ()), *evaluate.policies]
        return [place / label / benchmark for label in labels for benchmark in (*evaluate.benchmarks, *evaluate.chat)]
    return [place]


READERS = {"model": USES_MODEL, "responses": ("verify", "judge", "pair")}
"""Sections of a recipe that other stages read, and these."""


def _inputs(recipe: Recipe, wanted: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Files and folders that settings name, by their keys; not those that the run makes (`{run}`)."""
    if recipe.responses is not None:
        yield "responses", Path(recipe.responses)
    for name in {*wanted, "model"}:
        value = getattr(recipe, name)
        yield from ((f"{name}.{key}", Path(path)) for key, path in named_paths(value))
        for key, section in _sections(value, name):
            files = section.files() if isinstance(section, JudgeConfig | ChatBenchmarkConfig) else {}
            yield from ((f"{key}.{name}", path) for name, path in files.items())


def _overlaps(recipe: Recipe, wanted: Collection[str], whole: bool, outputs: Sequence[Path] | None) -> Iterator[str]:
    """Inputs that a run, or a command with these outputs, would empty or change; and folders of somebody else."""
    run = RunFolder(recipe.run_dir)
    moved = [path for asked in asked_for(recipe) for path in run.unwanted(*asked)] if whole else []
    for key, path in _inputs(recipe, wanted):
        if RUN in str(path) or not path.exists():
            continue
        name = key.partition(".")[0]
        readers = [reader for reader in READERS.get(name, (name,)) if reader in wanted and reader in STAGES]
        emptied = [*moved, *(unit for reader in readers for unit in _units(recipe, reader))]
        if problem := harm(path, emptied, [run.path]) if outputs is None else harm(path, outputs):
            yield f"{key}: {problem}"
    if outputs is None:
        units = [unit for name in wanted if name in STAGES for unit in _units(recipe, name)]
        checks = [partial(check_ours, unit) for unit in units]
        yield from problems_of(lambda: stage_record.check_ours(run.path), *checks)


def _is_done(recipe: Recipe, name: str) -> bool:
    folders: Sequence[str] = (name,)
    if name == "pairs":
        folders = ("pair",)
    elif name == "train":
        folders = [f"train/{objective}" for objective in recipe.train.objectives] if recipe.train else ()
    elif name == "evaluate" and recipe.evaluate is not None:
        benchmarks = {f"evaluate.{kind}.{label}" for kind in KINDS for label in getattr(recipe.evaluate, kind)}
        return benchmarks <= _done_benchmarks(recipe)
    return all((recipe.run_dir / folder / MANIFEST).is_file() for folder in folders)


def _done_benchmarks(recipe: Recipe) -> set[str]:
    """Keys of the benchmarks that are finished for every model of the recipe."""
    if recipe.evaluate is None:
        return set()
    models = [BASE, *(recipe.train.objectives if recipe.train else []), *recipe.evaluate.policies]
    folder = recipe.run_dir / "evaluate"
    return {
        f"evaluate.{kind}.{label}"
        for kind in KINDS
        for label in getattr(recipe.evaluate, kind)
        if all((folder / model / label / MANIFEST).is_file() for model in models)
    }


def _not_made(recipe: Recipe, text: str) -> str | None:
    """Why no stage of the recipe produces a path in its run folder, or None if one does."""
    if text.rstrip("/") == RUN:
        return f"the run folder does not exist yet; expected a path in it that a stage makes (got {text!r})"
    name, _, rest = text.removeprefix(f"{RUN}/").partition("/")
    if name in recipe.unsound:
        return None
    if name not in {stage.place for stage in STAGES.values()}:
        return f"not in the run folder, and no stage makes {name}; put it there, or set another path (got {text!r})"
    if getattr(recipe, name) in (None, {}) and not (name == "pair" and recipe.pairs):
        return f"not in the run folder, and this recipe has no section {name} that could produce it (got {text!r})"
    inner = rest.partition("/")[0]
    made: Collection[str] | None = None
    if name == "pretrain":
        made = recipe.pretrain
    elif name == "train" and recipe.train is not None:
        made = recipe.train.objectives
    elif name == "world" and recipe.world is not None:
        made = output_names(recipe.world)
    if made is None or inner in made:
        return None
    return f"not in the run folder, and {name} produces {', '.join(made)} (got {text!r})"


def section_problems(
    findings: Findings, here: Surroundings, section: Section, key: str, *, finished: bool = False
) -> None:
    """Check a section and every section inside it; `key` is its name in messages, empty for none.

    finished: its work is done, so that only paths are checked.
    """
    of_finished = Findings(findings.problems, finished=True)
    for name, one in _sections(section, key):
        is_done = finished or any(f"{name}.".startswith(f"{done}.") for done in here.done)
        for kind, check in CHECKS.items():
            if isinstance(one, kind):
                check(of_finished if is_done else findings, here, name, one)


def _sections(value: Any, key: str) -> Iterator[tuple[str, Section]]:
    """A section and those inside it, with their keys."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Section):
        yield key, value
        # Names of models on a server are not files or hub ids: see `_sample`.
        on_server = isinstance(value, SampleConfig) and value.server is not None
        inner = [
            (name, getattr(value, name)) for name in type(value).model_fields if not (on_server and name == "models")
        ]
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = [(str(number), item) for number, item in enumerate(value)]
    for name, item in inner:
        yield from _sections(item, _join(key, str(name)))


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _resolved(here: Surroundings, text: str) -> Path:
    return Path(text if here.run is None else text.replace(RUN, str(here.run)))


def _path(findings: Findings, here: Surroundings, key: str, text: str | None) -> Path | None:
    """Check that a setting's file or folder exists; returns its path, or None if it does not."""
    if text is None:
        return None
    path = _resolved(here, text)
    if path.exists():
        return path
    if (url := url_of(text)) is not None:
        findings.add(key, f"expected a path on this machine or a hub id, got a URL: {url}; download it first")
    elif RUN not in text:
        findings.add(key, f"no such file or folder: {path}" + ("" if path.is_absolute() else f" (in {Path.cwd()})"))
    elif (problem := here.made(text)) is not None:
        findings.add(key, problem)
    return None


def _path_or_hub(
    findings: Findings, here: Surroundings, key: str, text: str | None, kind: Any, revision: str | None = None
) -> None:
    if text is None:
        return
    if may_be_repository(text) and not Path(text).exists():
        findings.asked.append((key, Repository(kind, text, revision)))
    else:
        _path(findings, here, key, text)


def _model(findings: Findings, here: Surroundings, key: str, model: ModelConfig) -> None:
    _path_or_hub(findings, here, _join(key, "name_or_path"), model.name_or_path, "model", model.revision)
    _path_or_hub(findings, here, _join(key, "adapter"), model.adapter, "model")
    _path_or_hub(findings, here, _join(key, "tokenizer"), model.tokenizer, "model")
    template = model.chat_template
    if template not in (None, *CHAT_TEMPLATES):
        file = _resolved(here, str(template))
        if file.is_file():
            findings.under(key, lambda: read_template(file))
        else:
            known = ", ".join(CHAT_TEMPLATES)
            findings.add(
                _join(key, "chat_template"), f"expected one of {known}, or the path of a Jinja file, got {template!r}"
            )
    if model.architecture is not None:
        findings.under(_join(key, "architecture"), lambda: check_architecture(model))
        if model.tokenizer is None:
            findings.add(
                _join(key, "tokenizer"), "required next to architecture; set it to a tokenizer's folder or hub id"
            )


def _prompts(findings: Findings, here: Surroundings, key: str, source: PromptSource | PairsSource) -> None:
    _path_or_hub(findings, here, _join(key, "dataset"), source.dataset, "dataset")


def _benchmark(findings: Findings, here: Surroundings, key: str, source: BenchmarkSource) -> None:
    setting = "dataset" if source.dataset is not None else "benchmark"
    _path_or_hub(findings, here, _join(key, setting), source.source.dataset, "dataset")


def _analyze(findings: Findings, here: Surroundings, key: str, config: AnalyzeConfig) -> None:
    for name, folder in config.policies.items():
        if RUN in folder:
            _path(findings, here, _join(key, f"policies.{name}"), folder)
        elif not Path(folder).is_dir():
            findings.add(_join(key, f"policies.{name}"), f"no such folder: {folder}")


def _sample(findings: Findings, here: Surroundings, key: str, config: SampleConfig) -> None:
    findings.under(_join(key, "engine"), ENGINES.find(config.engine).check)
    if config.server is None:
        return
    findings.under(key, config.server.api_key)
    for number, model in enumerate(config.models):
        setting = _join(key, f"models.{number}")
        _path_or_hub(findings, here, _join(setting, "tokenizer"), model.tokenizer, "model")
        if model.name_or_path is None or model.adapter is not None:
            findings.add(setting, "expected the model's name on the server in name_or_path, and no adapter")


def _evaluate(findings: Findings, here: Surroundings, key: str, config: EvaluateConfig) -> None:
    findings.under(_join(key, "engine"), ENGINES.find(config.engine).check)
    if config.engine_server is not None:
        findings.under(_join(key, "engine_server"), config.engine_server.api_key)
    if config.harness:
        findings.under(_join(key, "harness"), lambda: check_harness(config.harness_settings))
    for name, text in config.policies.items():
        _path_or_hub(findings, here, _join(key, f"policies.{name}"), text, "model")


def _pretrain(findings: Findings, here: Surroundings, key: str, config: PretrainConfig) -> None:
    _path_or_hub(findings, here, _join(key, "data"), config.data, "dataset")


def _train(findings: Findings, here: Surroundings, key: str, config: TrainConfig) -> None:
    if findings.finished:
        return
    workers: int | None = None
    if here.cluster is not None:
        asked = here.cluster.train.workers
        if isinstance(asked, tuple):
            findings.add("cluster.train.workers", ONE_NUMBER)
        # How many `auto` is will be known when the cluster is connected.
        processes = 1 if config.processes == "auto" else config.processes
        workers = asked if isinstance(asked, int) else processes
    for objective in config.objectives:
        findings.problems += [_join(key, problem) for problem in config.problems_here(objective, workers)]


def _judge(findings: Findings, here: Surroundings, key: str, config: JudgeConfig) -> None:
    for name, path in config.files().items():
        _path(findings, here, _join(key, name), str(path))
    findings.under(key, config.server.api_key)
    if all(path.is_file() for path in config.files().values()):
        checks: tuple[Callable[[], Any], ...] = (
            lambda: JudgePrompt(config.system, config.layout),
            lambda: load_aspects(config.aspects, config.rubrics, config.typed, config.not_applicable),
        )
        findings.under(key, *checks)


def _chat(findings: Findings, here: Surroundings, key: str, config: ChatBenchmarkConfig) -> None:
    for name, path in config.files().items():
        _path(findings, here, _join(key, name), str(path))
    findings.under(key, config.fetch)


def _mask(findings: Findings, here: Surroundings, key: str, config: MaskConfig) -> None:
    _path_or_hub(findings, here, _join(key, "tokenizer"), config.tokenizer, "model")


def _drawing(findings: Findings, here: Surroundings, key: str, config: FiguresConfig) -> None:
    if importlib.util.find_spec("matplotlib") is None and not findings.finished:
        findings.add(key, "needs a package: pip install 'regretless[figures]'")


def _figures(findings: Findings, recipe: Recipe, wanted: Collection[str]) -> None:
    figures = recipe.report.figures if recipe.report is not None and "report" in wanted else None
    if figures is None:
        return
    trained = recipe.train.objectives if recipe.train is not None else []
    if unknown := [name for name in figures.models or () if name not in trained]:
        findings.add("report.figures.models", f"expected some of {', '.join(trained)}, got {', '.join(unknown)}")
    if recipe.analyze is not None and figures.pair > (most := recipe.analyze.pairs + recipe.analyze.masked):
        findings.add(
            "report.figures.pair",
            f"expected at most {most}, the number of pairs that analyze includes; got {figures.pair}",
        )


def _on_cluster(findings: Findings, here: Surroundings, key: str, config: ClusterConfig) -> None:
    findings.under(key, check_ray)


CHECKS: Mapping[type[Section], Callable[[Findings, Surroundings, str, Any], None]] = {
    ModelConfig: _model,
    PromptSource: _prompts,
    PairsSource: _prompts,
    BenchmarkSource: _benchmark,
    ClusterConfig: _on_cluster,
    SampleConfig: _sample,
    PretrainConfig: _pretrain,
    TrainConfig: _train,
    EvaluateConfig: _evaluate,
    JudgeConfig: _judge,
    ChatBenchmarkConfig: _chat,
    MaskConfig: _mask,
    AnalyzeConfig: _analyze,
    FiguresConfig: _drawing,
}
"""The check for each kind of section."""
