"""One call of a stage's command: its flags, its config file and its overrides, as a recipe of that one section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from regretless.core.bundled import find
from regretless.core.errors import ConfigError, problems_of, reject
from regretless.core.settings import Section
from regretless.core.yaml_settings import merge, read_yaml
from regretless.evaluation.results import BenchmarkSource, EvaluateConfig
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import (
    PairsSource,
    Recipe,
    apply_overrides,
    checked_recipe,
    run_folder,
    section_type,
    with_seeds,
)
from regretless.runs.stages import STAGES, Stage
from regretless.workflow.run_folder import substitute
from regretless.workflow.stage_folder import check_ours

S = TypeVar("S", bound=Section)
T = TypeVar("T")
OF_PAIRS = tuple(f"{name}=" for name in PairsSource.model_fields if name != "dataset")
"""Overrides of how pairs are read, in a command that reads pairs; none of these has a setting of that name."""
OUTPUT_SUFFIXES = (".parquet", ".jsonl")
MISSING = "(missing)"


def refused_rows(output: Path) -> Path:
    """The file beside an output file with the input's rows that could not be used."""
    return output.with_suffix(".refused.jsonl")


@dataclass(frozen=True)
class Request:
    """One call of a stage's command."""

    verb: str
    config: Path | None
    output: Path | None
    overrides: Sequence[str]
    given: Mapping[str, Any]
    """Values of the flags; None where a flag was left out."""
    as_json: bool = False
    """Whether the result is printed as JSON, for programs."""
    command: str = ""
    """The command as it was typed, if that is not the verb: an objective's short form."""

    @property
    def stage(self) -> Stage[Any]:
        """The stage."""
        return STAGES[self.verb]

    def recipe(self) -> Recipe:
        """A recipe of the stage's section alone, for the files that the flags name; its run folder is at the output.

        Raises ConfigError with every problem: missing flags, bad settings, and files that do not exist.
        """
        missing = self._missing()
        hint = " (or use --config RECIPE alone, to work in the recipe's run folder)" if missing else ""
        where = f"regretless {self.command or self.verb}{hint}"
        required = [f"--{name.replace('_', '-')}: required" for name in missing]
        problems: list[str] = []
        try:
            recipe = checked_recipe(self._values(missing), where, partial(self._ahead, missing=missing))
        except ConfigError as error:
            problems = [text for text in map(self._in_flags, error.problems) if MISSING not in text]
        reject(where, [*required, *problems])
        return recipe

    def section(self, kind: type[S]) -> S:
        """Settings of the stage, checked on their own. Raises ConfigError that lists every problem."""
        return kind.parse(self._settings({}), f"settings of {self.verb}")

    def _ahead(self, recipe: Recipe, missing: Sequence[str]) -> list[str]:
        names = [self.verb, *(name for name in self.stage.uses if name != "model")]
        problems = recipe_problems(recipe, [name for name in names if name not in missing], self.outputs)
        is_unit = self.outputs == [self.output]
        return problems + (problems_of(partial(check_ours, self.outputs[0].resolve())) if is_unit else [])

    @property
    def outputs(self) -> list[Path]:
        """Files and folders that the command replaces."""
        if self.output is None:
            return []
        if self.is_to_file:
            return [self.output, refused_rows(self.output), self._folder()]
        labels = dict(map(_policy, self.given.get("policy") or ()))
        return [self.output / name for name in self.stage.folders_of_command(labels)] or [self.output]

    @property
    def is_to_file(self) -> bool:
        """True if the output is a file, false if it is a folder."""
        return self.output is not None and bool(self.stage.result) and self.output.suffix in OUTPUT_SUFFIXES

    def _in_flags(self, problem: str) -> str:
        """A problem of the recipe, with the setting renamed to its command line flag."""
        names = (
            ("pairs.dataset", "--pairs"),
            ("responses", "--responses"),
            (f"{self.verb}.policies.", "--policy "),
            (f"{self.verb}.", ""),
        )
        for key, name in names:
            if problem.startswith(key):
                return name + problem.removeprefix(key)
        return problem

    def _missing(self) -> list[str]:
        values = {**self.given, "output": self.output}
        values["model"] = values.get("model") or self._names_model() or None
        needed = [name for name in self.stage.flags if name not in self.stage.optional]
        return [name for name in (*needed, "output") if values.get(name) is None]

    def _names_model(self) -> bool:
        """Whether the config file or an override names a model."""
        named = self._file().get("model") if self._is_recipe() else None
        return named is not None or any(text.startswith("model.") for text in self.overrides)

    def _values(self, missing: Sequence[str]) -> dict[str, Any]:
        uses, neighbor = self.stage.uses, self.stage.neighbor
        values: dict[str, Any] = {"name": self.verb, "output_dir": str(self._folder())}
        if "model" in uses:
            values["model"] = {"name_or_path": MISSING} if "model" in missing else self._model()
        if "responses" in uses:
            values["responses"] = str(self.given["responses"] or MISSING)
        if "pairs" in uses:
            values["pairs"] = apply_overrides({"dataset": str(self.given["pairs"] or MISSING)}, self._about("pairs"))
        if neighbor and self._is_recipe() and (other := self._file().get(neighbor)):
            values[neighbor] = other
        settings = self._settings(self._flags())
        kind = section_type(Recipe.model_fields[self.verb].annotation)
        is_judge = kind is not None and "replies" in kind.model_fields
        if is_judge and isinstance(settings, Mapping) and settings.get("replies") is None:
            # Replies that were paid for must outlive the work folder, which is deleted.
            settings = {**settings, "replies": f"{self.output}.replies.sqlite"}
        return {**values, self.verb: settings}

    def _flags(self) -> dict[str, Any]:
        """Settings of the stage that its flags set."""
        flags = {name: value for name, value in self.given.items() if value}
        values: dict[str, Any] = {}
        if "prompts" in flags:
            values["prompts"] = {"dataset": flags["prompts"]}
        if "model" in flags and "model" not in self.stage.uses:
            values["models"] = [self._model()]
        if "objective" in flags:
            values["objectives"] = flags["objective"]
        if "benchmark" in flags:
            values["benchmarks"] = _once("--benchmark", map(_benchmark, flags["benchmark"]))
        if "policy" in flags:
            values["policies"] = _once("--policy", map(_policy, flags["policy"]))
        return values

    def _settings(self, flags: Mapping[str, Any]) -> Any:
        """Settings of the stage: the config file's (a recipe's section), then the flags, then the overrides."""
        values = self._file()
        if self._is_recipe():
            section = values.get(self.verb)
            values = with_seeds({**values, self.verb: {} if section is None else section})[self.verb]
        overrides = self._about(self.verb)
        if "benchmark" in self.stage.flags and isinstance(values, Mapping):
            overrides = _for_every_benchmark(
                overrides, [*(values.get("benchmarks") or {}), *flags.get("benchmarks", {})]
            )
        return apply_overrides(merge(values, flags), overrides) if isinstance(values, Mapping) else values

    def _model(self) -> Any:
        """The model from the flags and the `model.…` overrides, on top of the recipe's."""
        values = self._file().get("model") if self._is_recipe() else None
        flags = {"name_or_path": self.given.get("model"), "adapter": self.given.get("adapter")}
        named = {key: value for key, value in flags.items() if value is not None}
        if "name_or_path" in named:
            values = None  # another model: the recipe's settings describe its own model and do not apply
        is_mapping = values is None or isinstance(values, Mapping)
        return apply_overrides({**(values or {}), **named}, self._about("model")) if is_mapping else values

    def _about(self, section: str) -> list[str]:
        """The overrides of a section (the stage's, `model` or `pairs`), without its name as prefix.

        How pairs are read may also be said without it (chosen_key=good).
        """
        sections = ("model", "pairs") if "pairs" in self.stage.uses else ("model",)
        found = []
        for text in self.overrides:
            prefix, dot, rest = text.partition(".")
            if dot and prefix in sections:
                owner = prefix
            else:
                owner, rest = ("pairs" if "pairs" in sections and text.startswith(OF_PAIRS) else self.verb), text
            found += [rest] if owner == section else []
        return found

    def _folder(self) -> Path:
        """The run folder: a work folder beside an output file, or the output folder itself."""
        output = self.output or Path(MISSING)
        return output.with_name(f".{output.name}.work") if self.is_to_file else output

    def _is_recipe(self) -> bool:
        """True if the config file is a recipe, false if it holds one stage's settings."""
        values = self._file()
        return "name" in values or self.verb in values

    def _file(self) -> dict[str, Any]:
        """Content of the config file; if it is a recipe, `{run}` is replaced by its run folder."""
        values = read_yaml(find(self.config)) if self.config else {}
        run = run_folder(str(values.get("name")), values.get("output_dir"))
        return dict(substitute(values, run))


def _benchmark(text: str) -> tuple[str, dict[str, str]]:
    name, separator, dataset = text.partition("=")
    return name, {"dataset": dataset} if separator else {"benchmark": name}


OF_A_BENCHMARK = tuple(
    f"{name}="
    for name in BenchmarkSource.model_fields.keys() - EvaluateConfig.model_fields.keys() - {"benchmark", "dataset"}
)


def _for_every_benchmark(overrides: Sequence[str], labels: Iterable[str]) -> list[str]:
    """Overrides of `evaluate`; a benchmark's own setting without a label (prompt_column=question) is that of each."""
    labels = list(dict.fromkeys(labels))
    found: list[str] = []
    for text in overrides:
        spread = text.startswith(OF_A_BENCHMARK) and labels
        found += [f"benchmarks.{label}.{text}" for label in labels] if spread else [text]
    return found


def _policy(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not separator:
        raise ConfigError(f"--policy {text}: expected NAME=PATH, for example dpo=runs/quickstart/train/dpo")
    return name, path


def _once(flag: str, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Mapping of a repeated flag's NAME=VALUE pairs. Raises ConfigError for a duplicate name."""
    values: dict[str, T] = {}
    for name, value in named:
        if name in values:
            raise ConfigError(f"{flag} {name}: used twice; every name must be unique")
        values[name] = value
    return values
