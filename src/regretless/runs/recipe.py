"""A recipe: one YAML file (and what it extends) plus `key=value` overrides, checked as a whole before anything runs."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails

from regretless.analysis.analyze import AnalyzeConfig
from regretless.analysis.inspect import InspectConfig
from regretless.core.errors import ConfigError, reject
from regretless.core.run_folder import is_first_process
from regretless.core.settings import FolderName, Section, setting_error, sound_part
from regretless.core.terminal import console
from regretless.core.yaml_settings import merge, parse_override, read_yaml
from regretless.data.prompts import PromptSource
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling.judge import JudgeConfig
from regretless.labeling.verifiers import VERIFIERS
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.load import ModelConfig
from regretless.pairing.mask import MaskConfig
from regretless.pairing.pair import PairConfig
from regretless.reporting.report import ReportConfig
from regretless.sampling.sample import SampleConfig
from regretless.training.train_config import TrainConfig
from regretless.world.world import WorldConfig

MODELS = 1000
"""More than the models of any recipe: the random weights of two seeds' models all differ."""


class PretrainConfig(TrainConfig):
    """Supervised training of one model before everything else; like `train`, and which model on which data."""

    objective: str | list[str] = "sft"
    """The method; supervised training on the demonstrations unless given."""
    model: ModelConfig
    """What to start from."""
    data: str
    """File or hub id of demonstrations, with `prompt` and `chosen` (or `response`)."""

    @field_validator("objective")
    @classmethod
    def _one_method(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and len(value) != 1:
            raise ValueError(f"expected one method, got {', '.join(value) or 'none'}")
        return value


class PairsSource(Section):
    """Preference pairs that exist already, in place of sampling, verifying and pairing."""

    dataset: str
    """Hub id, folder of a data set, or a .parquet, .jsonl or .json file."""
    split: str = "train"
    """Split of a hub data set or folder."""
    subset: str | None = None
    """Configuration of a hub data set."""
    prompt_key: str | None = None
    """Column of the prompt; several, separated by commas, are joined. None: prompt, instruction or question."""
    chosen_key: str = "chosen"
    """Column of the preferred response."""
    rejected_key: str = "rejected"
    """Column of the other response."""
    limit: int | None = Field(default=None, ge=1)
    """At most this many pairs, from the start."""


class Recipe(Section):
    """One run from prompts to a report. A section that is left out is a stage that does not run."""

    name: FolderName
    """Names the run and, unless `output_dir` is given, its folder."""
    output_dir: str = ""
    """Run folder; runs/<name> unless given."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stage that has none of its own, and of the random weights that `pretrain` starts from."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads to compute with; one for each core unless given. Very small models are faster with one in all."""
    world: WorldConfig | None = None
    """Make the embedded world: problems, tokenizer, demonstrations."""
    pretrain: dict[FolderName, PretrainConfig] = Field(default_factory=dict)
    """Models trained from scratch first, by name; each lies in {run}/pretrain/<name>."""
    model: ModelConfig | None = None
    """The policy before preference training; also the reference."""
    prompts: dict[FolderName, PromptSource] = Field(default_factory=dict)
    """Prompts of several sources, by name, brought together in {run}/prompts/prompts.jsonl (`prompt`, `answer`)."""
    sample: SampleConfig | None = None
    """Prompts to responses of the behaviour model."""
    responses: str | None = None
    """Responses that exist already (.parquet, .jsonl): `prompts` and `sample` do not run."""
    verify: VerifyConfig | None = None
    """Responses to verdicts."""
    judge: JudgeConfig | None = None
    """Responses to scores, by a language model on an OpenAI-compatible server."""
    pair: PairConfig | None = None
    """Verdicts or scores to pairs."""
    pairs: PairsSource | None = None
    """Pairs that exist already: `prompts`, `sample`, `verify`, `judge` and `pair` do not run."""
    mask: MaskConfig | None = None
    """Add masked pairs."""
    inspect: InspectConfig | None = None
    """Say before training what the objectives will see."""
    train: TrainConfig | None = None
    """Pairs to trained models, one for each objective."""
    evaluate: EvaluateConfig | None = None
    """Base and trained models on benchmarks."""
    analyze: AnalyzeConfig | None = None
    """What training changed: token rewards, score distances, drift, gradients, calibration."""
    report: ReportConfig | None = None
    """One HTML page of the run."""
    _unsound: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report sections that do not fit together along with what is wrong inside them."""
        if not isinstance(values, Mapping):
            return handler(values)
        values = _in_place_of(values)
        errors: list[InitErrorDetails] = []
        try:
            recipe = handler(values)
        except ValidationError as error:
            errors = [setting_error(item["loc"], item["msg"], item["input"], item["type"]) for item in error.errors()]
        errors += [setting_error(tuple(key.split(".")), problem, {}) for key, problem in _misfits(values)]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return recipe

    @property
    def unsound(self) -> frozenset[str]:
        """Sections that are there and could not be read; of a recipe that is only checked further."""
        return self._unsound

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return run_folder(self.name, self.output_dir)


def _in_place_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Data that exists takes the place of the stages that would make it, also of those that a parent file has."""
    replaced: set[str] = set()
    if values.get("pairs") is not None:
        replaced = {"prompts", "sample", "responses", "verify", "judge", "pair"}
    elif values.get("responses") is not None:
        replaced = {"prompts", "sample"}
    return {key: value for key, value in values.items() if key not in replaced}


def _misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Sections that lack another one, and what it is."""
    given = {name for name, value in values.items() if value is not None and value != ""}
    rules: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
        (("verify", "judge", "pair"), ("sample", "responses"), "nothing to {}; add `sample` or `responses`"),
        (("mask", "inspect", "train"), ("pair", "pairs"), "no pairs to {}; add `pair` or `pairs`"),
    )
    for names, either, problem in rules:
        yield from ((name, problem.format(name)) for name in names if name in given and not given.intersection(either))
    analyze = values.get("analyze")
    if analyze is not None and "train" not in given and not (isinstance(analyze, Mapping) and analyze.get("policies")):
        yield "analyze", "no trained model to analyze; add `train`, or name models in `analyze.policies`"
    needing = [name for name in ("inspect", "train", "evaluate", "analyze") if name in given]
    if needing and "model" not in given:
        yield "model", f"required by {', '.join(needing)}, not given"
    evaluate = values.get("evaluate")
    if isinstance(evaluate, Mapping) and (verifier := evaluate.get("verifier")) not in (None, *VERIFIERS):
        yield "evaluate.verifier", f"expected one of {', '.join(VERIFIERS)}, got {verifier!r}"
    report = values.get("report")
    if isinstance(report, Mapping) and report.get("figures") is not None and "analyze" not in given:
        yield "report.figures", "no token rewards to draw; add `analyze`"


def run_folder(name: str, output_dir: str = "") -> Path:
    """Where a recipe works: `output_dir`, or runs/<name> unless given."""
    return Path(output_dir or f"runs/{name}")


def load_recipe(
    path: Path, overrides: Sequence[str] = (), ahead: Callable[[Recipe], list[str]] | None = None
) -> Recipe:
    """Recipe of a YAML file with `key=value` overrides on top.

    ahead: finds further problems of a recipe, to be reported along with those of its settings.
    Raises ConfigError that lists every problem with its key.
    """
    return checked_recipe(apply_overrides(read_yaml(path), overrides), str(path), ahead)


def checked_recipe(values: Mapping[str, Any], where: str, ahead: Callable[[Recipe], list[str]] | None = None) -> Recipe:
    """Recipe of settings; what is wrong with them and what `ahead` finds is reported together.

    Raises ConfigError that lists every problem with its key.
    """
    try:
        recipe = parse_recipe(values, where)
    except ConfigError as error:
        if ahead is None:
            raise
        reject(where, [*error.problems, *ahead(_sound_sections(values))])
        raise  # unreachable: it has at least one problem
    reject(where, ahead(recipe) if ahead is not None else [])
    return recipe


def _sound_sections(values: Mapping[str, Any]) -> Recipe:
    """What is right of a recipe that has problems: for further checks only, it may not fit together."""
    sound: dict[str, Any] = {"name": "recipe"}
    unsound: set[str] = set()
    for name, value in _in_place_of(with_seeds(values)).items():
        if (field := Recipe.model_fields.get(name)) is not None and value is not None:
            found = sound_part(field.rebuild_annotation(), value)
            unsound |= {name} if found is None else set()
            sound |= {} if found is None else {name: found}
    recipe = Recipe.model_construct(**sound)
    recipe._unsound = frozenset(unsound)
    return recipe


def parse_recipe(values: Mapping[str, Any], where: str) -> Recipe:
    """Recipe of settings. Raises ConfigError that lists every problem with its key."""
    return Recipe.parse(with_seeds(values), where)


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings with `key=value` overrides on top.

    An override of `train.<key>` also holds for every entry of `train.methods` (what is typed last should win over what
    a method brings along), unless it names the entry: `train.methods.dpo.beta=0.3`. What methods to be trained lose
    by that is said on the terminal, for it makes them equal where the recipe does not.
    Raises ConfigError that lists every override that cannot be read.
    """
    parsed: list[dict[str, Any]] = []
    problems: list[str] = []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except ConfigError as error:
            problems.append(str(error))
    reject("overrides", problems)
    result = dict(values)
    for override in sorted(parsed, key=_names_a_method):
        result = merge(_without_in_methods(result, override), override)
    if is_first_process():
        for line in replaced_in_methods(values, result):
            console.print(line, style="yellow", markup=False, soft_wrap=True)
    return result


def replaced_in_methods(before: Mapping[str, Any], after: Mapping[str, Any], place: str = "") -> list[str]:
    """A line for each common setting that took the place of other values of methods which are trained."""
    lines = []
    methods, objective = before.get("methods"), after.get("objective")
    if isinstance(methods, Mapping):
        # Settings of a wrong kind are refused later.
        named = [objective] if isinstance(objective, str) else objective
        trained = named if isinstance(named, list | tuple) and named else list(methods)
        lost: dict[str, list[str]] = {}
        for name in trained:
            own, left = (_entry(values.get("methods"), name) for values in (before, after))
            for key, value in own.items():
                if key not in left and key in after and after[key] != value:
                    lost.setdefault(key, []).append(f"{name} {value}")
        lines = [
            f"{place}{key}={after[key]} replaces what the recipe has for single methods: {', '.join(values)}. To keep "
            f"those, set the others by name: {place}methods.NAME.{key}=…"
            for key, values in lost.items()
        ]
    for key, value in before.items():
        if key != "methods" and isinstance(value, Mapping) and isinstance(now := after.get(key), Mapping):
            lines += replaced_in_methods(value, now, f"{place}{key}.")
    return lines


def _entry(methods: Any, name: Any) -> Mapping[str, Any]:
    entry = methods.get(name) if isinstance(methods, Mapping) and isinstance(name, str) else None
    return entry if isinstance(entry, Mapping) else {}


def _names_a_method(override: Mapping[str, Any]) -> bool:
    return any(
        key == "methods" or (isinstance(value, Mapping) and _names_a_method(value)) for key, value in override.items()
    )


def _without_in_methods(values: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The values, without what methods say about keys that the override sets beside them."""
    result = dict(values)
    for key, value in override.items():
        if isinstance(result.get("methods"), Mapping) and key != "methods":
            result["methods"] = {name: _without(entry, key) for name, entry in result["methods"].items()}
        below = values.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = _without_in_methods(below, value)
    return result


def _without(entry: Any, key: str) -> Any:
    return {own: value for own, value in entry.items() if own != key} if isinstance(entry, Mapping) else entry


def with_seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe, with its seed in every section that takes one and gives none."""
    seed = values.get("seed", Recipe.model_fields["seed"].default)
    if type(seed) is not int or seed < 0:
        return dict(values)  # an error of its own, which need not show in every section
    result = dict(values)
    for name, field in Recipe.model_fields.items():
        section = section_type(field.annotation)
        if isinstance(result.get(name), Mapping) and section is not None and _takes_seed(section):
            result[name] = {"seed": seed, **result[name]}
    if isinstance(pretrain := result.get("pretrain"), Mapping):
        result["pretrain"] = {
            name: _with_own_seed(entry, seed, place) if isinstance(entry, Mapping) else entry
            for place, (name, entry) in enumerate(pretrain.items())
        }
    return result


def _with_own_seed(entry: Mapping[str, Any], seed: Any, place: int) -> dict[str, Any]:
    """A model to pretrain, with the recipe's seed, and with random weights that no other model starts from."""
    result = {"seed": seed, **entry}
    model = entry.get("model")
    if isinstance(seed, int) and isinstance(model, Mapping) and model.get("architecture") is not None:
        result["model"] = {"init_seed": MODELS * seed + place, **model}
    return result


def _takes_seed(section: type[Section]) -> bool:
    return "seed" in section.model_fields or issubclass(section, TrainConfig)


def section_type(annotation: Any) -> type[Section] | None:
    """The section class of a field that holds one or none."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    sections = [option for option in options if isinstance(option, type) and issubclass(option, Section)]
    return sections[0] if sections else None
