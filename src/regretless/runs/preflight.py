"""Problems that can be detected before the first stage: missing files, hub ids, packages, keys, training arguments.

A recipe's types and bounds are checked when it is loaded, on any machine. These checks depend on the machine. What is
a stage's own is in its file (`Stage.problems`); sections that several stages have, such as models, are checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from regretless.core.errors import problems_of
from regretless.core.hub import Repository, may_be_repository, missing
from regretless.core.paths import harm, url_of
from regretless.core.settings import Section, named_paths
from regretless.data.prompts import PromptSource
from regretless.evaluation.chat.chat_settings import ChatBenchmarkConfig
from regretless.evaluation.results import BenchmarkSource
from regretless.modeling.chat_templates import CHAT_TEMPLATES, read_template
from regretless.modeling.load import ModelConfig, check_architecture
from regretless.runs import stage_record
from regretless.runs.recipe import PairsSource, Recipe
from regretless.runs.side_by_side import parallel_problems
from regretless.runs.stages import STAGES, Listing, Run, stages_of
from regretless.workflow.cluster import ClusterConfig, check_ray
from regretless.workflow.run_folder import RUN, RunFolder
from regretless.workflow.stage_folder import check_ours


class Machine:
    """This machine as the settings of a recipe meet it, and the problems so far."""

    def __init__(self, recipe: Recipe, done: Collection[str] = ()) -> None:
        """done: keys of settings whose work is finished. Of these only paths count, which are part of what the work
        depends on: keys, servers, packages and the hub are not needed again."""
        self.recipe, self.done = recipe, done
        self.problems: list[str] = []
        self._asked: list[tuple[str, Repository]] = []

    def is_done(self, key: str) -> bool:
        """True if the work of a setting is finished."""
        return any(f"{key}.".startswith(f"{done}.") for done in self.done)

    def add(self, key: str, problem: str) -> None:
        """Add a problem of a setting."""
        self.problems.append(f"{key}: {problem}")

    def under(self, key: str, *checks: Callable[[], Any]) -> None:
        """Add the problems that checks of a section raise; a message may begin with the setting's own name."""
        if self.is_done(key):
            return
        for problem in problems_of(*checks):
            message = re.sub(r"^model\.architecture( \(\w+\))?(: )?", "", problem)
            if message.startswith(("server: ", ".")):
                self.problems.append(f"{key}.{message.removeprefix('.')}")
            else:
                self.add(key, message)

    def path(self, key: str, text: str | None) -> Path | None:
        """Check that a setting's file or folder exists; returns its path, or None if it does not."""
        if text is None:
            return None
        path = self.resolved(text)
        if path.exists():
            return path
        if (url := url_of(text)) is not None:
            self.add(key, f"expected a path on this machine or a hub id, got a URL: {url}; download it first")
        elif RUN not in text:
            self.add(key, f"no such file or folder: {path}" + ("" if path.is_absolute() else f" (in {Path.cwd()})"))
        elif (problem := _not_made(self.recipe, text)) is not None:
            self.add(key, problem)
        return None

    def path_or_hub(self, key: str, text: str | None, kind: Any, revision: str | None = None) -> None:
        """Check that a file or folder exists, or else that the hub has a repository of that kind and name."""
        if text is not None and may_be_repository(text) and not Path(text).exists():
            if not self.is_done(key):
                self._asked.append((key, Repository(kind, text, revision)))
        else:
            self.path(key, text)

    def resolved(self, text: str) -> Path:
        """The path that a setting names."""
        return Path(text.replace(RUN, str(self.recipe.run_dir)))

    def sections(self, value: Any, key: str) -> None:
        """Check a section, or several, and those inside by what they are, such as models."""
        for name, section in _sections(value, key):
            for kind, check in CHECKS.items():
                if isinstance(section, kind):
                    check(self, name, section)

    def all(self) -> list[str]:
        """Every problem, including those from the hub: one request for each repository."""
        unusable = missing([repository for _, repository in self._asked])
        absent = [f"{key}: {unusable[one]} (got {one.name!r})" for key, one in self._asked if one in unusable]
        return list(dict.fromkeys([*self.problems, *absent]))


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
        for name in type(recipe).model_fields
        if getattr(recipe, name) not in (None, {}) and (names is None or name in names)
    ]
    machine = Machine(recipe, set() if outputs is not None else _finished(recipe, wanted))
    for name in wanted:
        section = getattr(recipe, name)
        if name in STAGES:
            STAGES[name].problems(section, machine)
        elif name == "responses":
            machine.path(name, section)
        elif name != "model":
            machine.sections(section, name)
    machine.sections(recipe.model, "model")
    machine.problems += parallel_problems(recipe)
    machine.problems += _overlaps(recipe, wanted, names is None, outputs)
    return machine.all()


def _finished(recipe: Recipe, wanted: Sequence[str]) -> set[str]:
    """Keys of settings whose work is finished."""
    done: set[str] = set()
    for name in stages_of(recipe):
        if name in wanted:
            done.update(STAGES[name].finished(getattr(recipe, name), Listing(recipe, recipe.run_dir, name)))
    using = [name for name in wanted if name in STAGES and "model" in STAGES[name].uses]
    return done | {"model"} if using and done.issuperset(using) else done


def _units(recipe: Recipe, name: str) -> list[Path]:
    """Folders of the units of a stage, as far as they are known before it runs."""
    groups = Listing(recipe, recipe.run_dir, name).groups
    return [recipe.run_dir / unit.name for units in groups for unit in units] or [recipe.run_dir / STAGES[name].place]


def _inputs(recipe: Recipe, wanted: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Files and folders that settings name, by their keys; not those that the run makes (`{run}`)."""
    if recipe.responses is not None:
        yield "responses", Path(recipe.responses)
    for name in {*wanted, "model"}:
        value = getattr(recipe, name)
        yield from ((f"{name}.{key}", Path(path)) for key, path in named_paths(value))
        for key, section in _sections(value, name):
            files = section.files() if hasattr(section, "files") else {}
            yield from ((f"{key}.{name}", path) for name, path in files.items())


def _overlaps(recipe: Recipe, wanted: Collection[str], whole: bool, outputs: Sequence[Path] | None) -> Iterator[str]:
    """Inputs that a run, or a command with these outputs, would empty or change; and folders of somebody else."""
    run, stages = RunFolder(recipe.run_dir), [STAGES[name] for name in stages_of(recipe) if name in wanted]
    moved = [path for asked in Run.of(recipe, run).asked_for() for path in run.unwanted(*asked)] if whole else []
    units = {stage.name: _units(recipe, stage.name) for stage in stages} if outputs is None else {}
    for key, path in _inputs(recipe, wanted):
        if RUN in str(path) or not path.exists():
            continue
        name = key.partition(".")[0]
        emptied = [
            *moved,
            *(unit for stage in stages if name in (stage.name, *stage.uses) for unit in units.get(stage.name, ())),
        ]
        if problem := harm(path, emptied, [run.path]) if outputs is None else harm(path, outputs):
            yield f"{key}: {problem}"
    if outputs is None:
        checks = [partial(check_ours, unit) for paths in units.values() for unit in paths]
        yield from problems_of(lambda: stage_record.check_ours(run.path), *checks)


def _not_made(recipe: Recipe, text: str) -> str | None:
    """Why no stage of the recipe produces a path in its run folder, or None if one does."""
    if text.rstrip("/") == RUN:
        return f"the run folder does not exist yet; expected a path in it that a stage makes (got {text!r})"
    name, _, rest = text.removeprefix(f"{RUN}/").partition("/")
    if name in recipe.unsound:
        return None
    makers = [stage for stage in STAGES.values() if stage.place == name]
    if not makers:
        return f"not in the run folder, and no stage makes {name}; put it there, or set another path (got {text!r})"
    sections = {stage: section for stage in makers if (section := getattr(recipe, stage.name)) not in (None, {})}
    if not sections:
        return f"not in the run folder, and this recipe has no section {name} that could produce it (got {text!r})"
    for stage, section in sections.items():
        made = stage.contents(section)
        if made is None or rest.partition("/")[0] in made:
            return None
    return f"not in the run folder, and {name} produces {', '.join(made or ())} (got {text!r})"


def _sections(value: Any, key: str) -> Iterator[tuple[str, Section]]:
    """A section and those inside it, with their keys."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Section):
        yield key, value
        # What is on a server has no file here, nor a hub id.
        elsewhere = getattr(value, "elsewhere", ())
        inner = [(name, getattr(value, name)) for name in type(value).model_fields if name not in elsewhere]
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = [(str(number), item) for number, item in enumerate(value)]
    for name, item in inner:
        yield from _sections(item, f"{key}.{name}")


def _model(machine: Machine, key: str, model: ModelConfig) -> None:
    machine.path_or_hub(f"{key}.name_or_path", model.name_or_path, "model", model.revision)
    machine.path_or_hub(f"{key}.adapter", model.adapter, "model")
    machine.path_or_hub(f"{key}.tokenizer", model.tokenizer, "model")
    template = model.chat_template
    if template not in (None, *CHAT_TEMPLATES):
        file = machine.resolved(str(template))
        if file.is_file():
            machine.under(key, lambda: read_template(file))
        else:
            named = ", ".join(CHAT_TEMPLATES)
            machine.add(
                f"{key}.chat_template", f"expected one of {named}, or the path of a Jinja file, got {template!r}"
            )
    if model.architecture is not None:
        machine.under(f"{key}.architecture", lambda: check_architecture(model))
        if model.tokenizer is None:
            machine.add(f"{key}.tokenizer", "required next to architecture; set it to a tokenizer's folder or hub id")


def _prompts(machine: Machine, key: str, source: PromptSource | PairsSource) -> None:
    machine.path_or_hub(f"{key}.dataset", source.dataset, "dataset")


def _benchmark(machine: Machine, key: str, source: BenchmarkSource) -> None:
    setting = "dataset" if source.dataset is not None else "benchmark"
    machine.path_or_hub(f"{key}.{setting}", source.source.dataset, "dataset")


def _chat(machine: Machine, key: str, config: ChatBenchmarkConfig) -> None:
    for name, path in config.files().items():
        machine.path(f"{key}.{name}", str(path))
    machine.under(key, config.fetch)


def _on_cluster(machine: Machine, key: str, config: ClusterConfig) -> None:
    machine.under(key, check_ray)


CHECKS: Mapping[type[Section], Callable[[Machine, str, Any], None]] = {
    ModelConfig: _model,
    PromptSource: _prompts,
    PairsSource: _prompts,
    BenchmarkSource: _benchmark,
    ClusterConfig: _on_cluster,
    ChatBenchmarkConfig: _chat,
}
"""The check for each kind of section that more than one stage may have, or that is in another."""
