"""A recipe: one YAML file (and what it extends) plus `key=value` overrides, checked as a whole before anything runs."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from regretless.analysis.inspect import InspectConfig
from regretless.analysis.stage import AnalyzeConfig
from regretless.config import Section, merge, parse_override, read_yaml
from regretless.errors import ConfigError, reject
from regretless.evaluation.stage import EvaluateConfig
from regretless.labeling.judge import JudgeConfig
from regretless.labeling.stage import VerifyConfig
from regretless.labeling.verifiers import VERIFIERS
from regretless.models import ModelConfig
from regretless.pairing.mask import MaskConfig
from regretless.pairing.stage import PairConfig
from regretless.prompts import PromptSource
from regretless.reporting.stage import ReportConfig
from regretless.sampling.stage import SampleConfig
from regretless.training.stage import TrainConfig
from regretless.world.stage import WorldConfig

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

    name: str = Field(pattern=r"^[\w.-]+$")
    """Names the run and, unless `output_dir` is given, its folder."""
    output_dir: str = ""
    """Run folder; runs/<name> unless given."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stage that has none of its own, and of the random weights that `pretrain` starts from."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads to compute with; one for each core unless given. Very small models are faster with one in all."""
    world: WorldConfig | None = None
    """Make the embedded world: problems, tokenizer, demonstrations."""
    pretrain: dict[str, PretrainConfig] = Field(default_factory=dict)
    """Models trained from scratch first, by name; each lies in {run}/pretrain/<name>."""
    model: ModelConfig | None = None
    """The policy before preference training; also the reference."""
    prompts: dict[str, PromptSource] = Field(default_factory=dict)
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

    @model_validator(mode="before")
    @classmethod
    def _in_place_of(cls, values: Any) -> Any:
        """Data that exists takes the place of the stages that would make it, also of those that a parent file has."""
        if not isinstance(values, Mapping):
            return values
        replaced: set[str] = set()
        if values.get("pairs") is not None:
            replaced = {"prompts", "sample", "responses", "verify", "judge", "pair"}
        elif values.get("responses") is not None:
            replaced = {"prompts", "sample"}
        return {key: value for key, value in values.items() if key not in replaced}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        has_responses = bool(self.sample or self.responses)
        no_pairs = not (self.pair or self.pairs)
        needs_model = [name for name in ("inspect", "train", "evaluate", "analyze") if getattr(self, name) is not None]
        rules = (
            (self.verify and not has_responses, "verify: nothing to verify; add `sample` or `responses`"),
            (self.judge and not has_responses, "judge: nothing to judge; add `sample` or `responses`"),
            (self.pair and not has_responses, "pair: nothing to pair; add `sample` or `responses`"),
            (self.mask and no_pairs, "mask: no pairs to mask; add `pair` or `pairs`"),
            (self.inspect and no_pairs, "inspect: no pairs to inspect; add `pair` or `pairs`"),
            (self.train and no_pairs, "train: no pairs to train on; add `pair` or `pairs`"),
            (self.analyze and not self.train, "analyze: no trained model to analyze; add `train`"),
            (
                self.evaluate and self.evaluate.verifier not in (None, *VERIFIERS),
                f"evaluate.verifier: expected one of {', '.join(sorted(VERIFIERS))}",
            ),
            (needs_model and self.model is None, f"model: required by {', '.join(needs_model)}"),
        )
        problems = [problem for broken, problem in rules if broken]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return run_folder(self.name, self.output_dir)


def run_folder(name: str, output_dir: str = "") -> Path:
    """Where a recipe works: `output_dir`, or runs/<name> unless given."""
    return Path(output_dir or f"runs/{name}")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Recipe of a YAML file with `key=value` overrides on top.

    Raises ConfigError that lists every problem with its key.
    """
    return parse_recipe(apply_overrides(read_recipe_file(path), overrides), str(path))


def read_recipe_file(path: Path) -> dict[str, Any]:
    """Settings of a YAML file and of what it extends. Raises ConfigError when it cannot be read."""
    try:
        return read_yaml(path)
    except RecursionError as error:
        raise ConfigError(f"{path}: extends itself, directly or through another file") from error


def parse_recipe(values: Mapping[str, Any], where: str) -> Recipe:
    """Recipe of settings. Raises ConfigError that lists every problem with its key."""
    return Recipe.parse(with_seeds(values), where)


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Settings with `key=value` overrides on top.

    An override of `train.<key>` also holds for every entry of `train.methods` (what is typed last should win over what
    a method brings along), unless it names the entry: `train.methods.dpo.beta=0.3`.
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
    return result


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
