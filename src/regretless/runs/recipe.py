"""A recipe: a YAML file (and what it extends) plus `key=value` overrides, validated as a whole before anything runs."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from regretless.analysis.analyze import AnalyzeConfig
from regretless.analysis.inspect import InspectConfig
from regretless.core.bundled import find
from regretless.core.errors import ConfigError, problems_of, reject
from regretless.core.paths import OutputPath, PathSetting, at_home
from regretless.core.settings import (
    MOST_SEED,
    REMOVABLE,
    ByFolder,
    FolderName,
    Section,
    Seed,
    setting_error,
    sound_part,
)
from regretless.core.terminal import print_note
from regretless.core.yaml_settings import merge, parse_override, read_yaml
from regretless.data.prompt_templates import TEMPLATES
from regretless.data.prompts import PromptSource
from regretless.evaluation.results import EvaluateConfig
from regretless.labeling.judge import JudgeConfig
from regretless.labeling.mask import MaskConfig
from regretless.labeling.pair import PairConfig
from regretless.labeling.verify import VerifyConfig
from regretless.modeling.load import ADAPTER, ModelConfig
from regretless.reporting.report import ReportConfig
from regretless.rollouts.rollout import RolloutConfig
from regretless.rounds.round_settings import RoundsConfig
from regretless.runs.stages import STAGES
from regretless.sampling.sample import SampleConfig
from regretless.training.train_config import TrainConfig
from regretless.workflow.cluster import ClusterConfig
from regretless.workflow.run_folder import RUN
from regretless.world.world import WorldConfig

MODELS = 1000
"""Exceeds the number of models in any recipe, so that no two models of two seeds share random weights."""


class PretrainConfig(TrainConfig):
    """Supervised training of one model before all other stages: the settings of `train`, plus model and data."""

    objective: str | list[str] = "sft"
    """Objective to train with. The default `sft` is supervised training on the demonstrations."""
    model: ModelConfig
    """Model to start from."""
    data: PathSetting
    """Demonstrations: a file or a hub id, with the columns `prompt` and `chosen` (or `response`)."""

    @field_validator("objective")
    @classmethod
    def _one_method(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and len(value) != 1:
            raise ValueError(f"expected one method, got {', '.join(value) or 'none'}")
        return value


class PairsSource(Section):
    """Existing preference pairs, instead of sampling, verifying and pairing."""

    dataset: PathSetting
    """Preference pairs to read: a hub id, a folder of a data set, or a .parquet, .jsonl, .json or .csv file."""
    split: str = "train"
    """Split to read, of a hub data set or a folder."""
    subset: str | None = None
    """Configuration of a hub data set."""
    prompt_key: str | None = None
    """Column with the prompt; several columns, separated by commas, are joined. By default `prompt`, `instruction` or
    `question`, whichever the data has."""
    chosen_key: str = "chosen"
    """Column with the preferred response."""
    rejected_key: str = "rejected"
    """Column with the rejected response."""
    template: Annotated[str, AfterValidator(TEMPLATES.check)] | None = None
    """Template that makes a prompt of a text: math, assistant, user, plain, or the name of a plug-in. By default a text
    is a user message (`user`) where the model has a chat template, and stays as it is (`plain`) where it has none, and
    in rows with recorded tokens or with special tokens of the chat template in the text."""
    smallest_margin: float | None = Field(default=None, ge=0)
    """Least difference of `chosen_score` and `rejected_score`, in rows that have both; those with a smaller one are
    skipped."""
    limit: int | None = Field(default=None, ge=1)
    """Most pairs to read, from the start; all by default."""


class Recipe(Section):
    """One run from prompts to a report. The stage of an omitted section does not run."""

    name: FolderName
    """Name of the run, and of its folder unless `output_dir` is given."""
    output_dir: OutputPath | None = None
    """Run folder, on a disk or a file system that machines share; by default `runs/<name>`."""
    seed: Seed = 0
    """Random seed of every stage that does not set its own, and of the random weights that `pretrain` starts from."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads to compute with; one per core by default. Very small models are faster with a single thread."""
    parallel: Literal["auto"] | Annotated[int, Field(ge=1, strict=True)] = 1
    """Models that `pretrain`, `train` and `evaluate` work on at the same time, each in a process of its own with
    `threads` threads; as many processes share the work of `sample`. `auto` takes as many as the cores allow that this
    command may use, and 1 where something else divides the work (GPUs, a cluster, `processes`). No result depends on
    it."""
    decontaminate: bool = False
    """Whether to leave out pairs whose prompt stands in a benchmark of `evaluate`: equal after normalization, or with
    thirteen words in a row in common. Without it, they are counted in `inspect` and beside the results."""
    cluster: ClusterConfig | None = None
    """The Ray cluster that does the work; by default this process, or all GPUs of this machine if it has several."""
    world: WorldConfig | None = None
    """Generate the embedded world: problems, tokenizer and demonstrations."""
    pretrain: Annotated[ByFolder[PretrainConfig], REMOVABLE] = Field(default_factory=dict)
    """Models to train from scratch before anything else, by name; each is written to `{run}/pretrain/<name>`. Null
    removes one of a recipe that is extended."""
    model: ModelConfig | None = None
    """The policy before preference training; it is also the reference model."""
    prompts: Annotated[ByFolder[PromptSource], REMOVABLE] = Field(default_factory=dict)
    """Sources of prompts, by name; they are combined into `{run}/prompts/prompts.jsonl` (`prompt`, `answer`).
    Null removes one of a recipe that is extended."""
    sample: SampleConfig | None = None
    """Answer the prompts with behavior models, with the log-probability of every token."""
    responses: PathSetting | None = None
    """File of existing responses (.parquet, .jsonl) to use in place of the stages `prompts` and `sample`."""
    verify: VerifyConfig | None = None
    """Compare responses with their gold answers."""
    judge: JudgeConfig | None = None
    """Score responses with a language model on an OpenAI-compatible server."""
    rollout: RolloutConfig | None = None
    """Measure the regret of each step of a response by continuations from its beginnings."""
    pair: PairConfig | None = None
    """Make preference pairs of verified or scored responses."""
    pairs: PairsSource | None = None
    """Existing pairs to use in place of the stages `prompts`, `sample`, `verify`, `judge`, `rollout` and `pair`."""
    mask: MaskConfig | None = None
    """Add pairs of a chosen response against its own beginning."""
    inspect: InspectConfig | None = None
    """Report before training what the objectives will see in the pairs."""
    train: TrainConfig | None = None
    """Train one model per objective on the pairs."""
    rounds: RoundsConfig | None = None
    """Repeat the stages from `sample` to `train`, each time with the model of the round before."""
    evaluate: EvaluateConfig | None = None
    """Evaluate the base model and the trained models on benchmarks."""
    analyze: AnalyzeConfig | None = None
    """Measure what training changed: token rewards, score distances, drift, gradients, calibration."""
    report: ReportConfig | None = None
    """Write one HTML page about the run."""
    _unsound: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report sections that do not fit together, along with the problems inside them."""
        if not isinstance(values, Mapping):
            return handler(values)
        values = _completed(values)
        errors: list[InitErrorDetails] = []
        try:
            recipe = handler(values)
        except ValidationError as error:
            errors = [setting_error(item["loc"], item["msg"], item["input"], item["type"]) for item in error.errors()]
        else:
            errors = [setting_error(key, problem, name) for key, problem, name in _taken_labels(recipe)]
        errors += [setting_error(tuple(key.split(".")), problem, {}) for key, problem in _misfits(values)]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return recipe

    @property
    def unsound(self) -> frozenset[str]:
        """Sections that exist and could not be parsed, in a recipe that is only checked further."""
        return self._unsound

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return run_folder(self.name, self.output_dir)


def _completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the stages that existing data replaces, including those of a parent file; the policy writes responses
    where no behavior model is named.
    """
    replaced: set[str] = set()
    if values.get("pairs") is not None:
        replaced = {"prompts", "sample", "responses", "verify", "judge", "rollout", "pair"}
    elif values.get("responses") is not None:
        replaced = {"prompts", "sample"}
    kept = {key: value for key, value in values.items() if key not in replaced}
    sample, model = kept.get("sample"), kept.get("model")
    if isinstance(sample, Mapping) and sample.get("models") is None and model is not None:
        kept["sample"] = {**sample, "models": [model]}
    return kept


NEEDED = (
    ("responses", "nothing", ("sample", "responses")),
    ("pairs", "no pairs", ("pair", "pairs")),
)
"""What stages use (`Stage.uses`): how its lack is said, and the sections of which one has to be there."""


def _misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Sections that lack another one, with the problem."""
    present = {name for name, value in values.items() if value is not None and value != ""}
    stages = [stage for name, stage in STAGES.items() if name in present]
    for stage in stages:
        for given, nothing, either in NEEDED:
            if given in stage.uses and not present.intersection(either):
                yield stage.name, f"{nothing} to {stage.name}; add {' or '.join(f'`{name}`' for name in either)}"
    analyze = values.get("analyze")
    if (
        analyze is not None
        and "train" not in present
        and not (isinstance(analyze, Mapping) and analyze.get("policies"))
    ):
        yield "analyze", "no trained model to analyze; add `train`, or name models in `analyze.policies`"
    if values.get("decontaminate") is True and not _benchmarks(values.get("evaluate")):
        yield "decontaminate", "no benchmark whose problems could be left out; add `evaluate`, or remove this setting"
    if "rounds" in present:
        yield from _no_rounds(values, present)
    needing = [stage.name for stage in stages if "model" in stage.uses]
    if needing and "model" not in present:
        yield "model", f"required by {', '.join(needing)}, not given"
    model, train = values.get("model"), values.get("train")
    if isinstance(model, Mapping) and isinstance(train, Mapping):
        adapted = model.get("adapter") or (Path(at_home(str(model.get("name_or_path")))) / ADAPTER).is_file()
        if model.get("quantization") and not adapted and not train.get("lora"):
            yield "train.lora", "required by model.quantization, for only an adapter can be trained; set it to {r: 32}"
        if adapted and train.get("lora"):
            yield (
                "train.lora",
                "the model has an adapter already, which is trained without this setting; leave it out, or merge the "
                "adapter first (regretless merge)",
            )


def _benchmarks(evaluate: Any) -> bool:
    return isinstance(evaluate, Mapping) and bool(evaluate.get("benchmarks") or evaluate.get("chat"))


def _no_rounds(values: Mapping[str, Any], present: Set[str]) -> Iterator[tuple[str, str]]:
    """Sections that do not fit to rounds, with the problem."""
    if existing := [name for name in ("responses", "pairs") if name in present]:
        yield existing[0], "each round makes its own; leave it out, or `rounds`"
    elif absent := [name for name in ("sample", "train") if name not in present]:
        yield "rounds", f"nothing to repeat; add {' and '.join(f'`{name}`' for name in absent)}"
    rounds, sample = values["rounds"], values.get("sample")
    if isinstance(rounds, Mapping) and rounds.get("rest") is not None and "verify" not in present:
        yield "rounds.rest", "prompts rest by the verdicts of their responses; add `verify`, or leave it out"
    if isinstance(sample, Mapping) and (models := sample.get("models")) is not None:
        if models != [values.get("model")]:
            yield "sample.models", "each round's model writes its responses; leave it out, or `rounds`"
        elif sample.get("server") is not None:
            yield (
                "sample.server",
                "a server does not have the model that a round has trained; sample with another engine",
            )


def _taken_labels(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Key, problem and label of models that settings name like other models of the run."""
    trained = {} if recipe.train is None else {name: f"{RUN}/train/{name}" for name in recipe.train.objectives}
    evaluated = {} if recipe.evaluate is None else recipe.evaluate.policies
    analyzed = {} if recipe.analyze is None else recipe.analyze.policies
    for section, labels, others in (("evaluate", evaluated, trained), ("analyze", analyzed, trained | evaluated)):
        for label, folder in labels.items():
            same = [other for name, other in others.items() if name.casefold() == label.casefold()]
            if same and (section == "evaluate" or _in_run(folder, recipe) != _in_run(same[0], recipe)):
                yield (section, "policies", label), "another model of the run has this name; choose another one", label


def _in_run(folder: str, recipe: Recipe) -> Path:
    return Path(folder.replace(RUN, str(recipe.run_dir)))


def run_folder(name: str, output_dir: str | None = None) -> Path:
    """The folder of a recipe: `output_dir`, by default runs/<name>."""
    return Path(f"runs/{name}" if output_dir is None else at_home(output_dir))


def load_recipe(
    path: Path, overrides: Sequence[str] = (), ahead: Callable[[Recipe], list[str]] | None = None
) -> Recipe:
    """Recipe of a YAML file, or of a packaged recipe's name, with `key=value` overrides on top.

    ahead: returns further problems of a recipe, to be reported along with those of its settings.
    Raises ConfigError that lists every problem with its key.
    """
    values = read_yaml(find(path))
    unreadable = {text: problem for text in overrides for problem in problems_of(partial(parse_override, text))}
    try:
        readable = [text for text in overrides if text not in unreadable]
        recipe = checked_recipe(apply_overrides(values, readable), str(path), ahead)
    except ConfigError as error:
        reject(str(path), [*unreadable.values(), *error.problems])
        raise  # it lists nothing
    reject("overrides", list(unreadable.values()))
    return recipe


def checked_recipe(values: Mapping[str, Any], where: str, ahead: Callable[[Recipe], list[str]] | None = None) -> Recipe:
    """Recipe from settings; its problems and those that `ahead` returns are reported together.

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
    """The valid part of a recipe with problems, for further checks only: its sections may not fit together."""
    sound: dict[str, Any] = {"name": "recipe"}
    unsound: set[str] = set()
    for name, value in _completed(with_seeds(values)).items():
        if (field := Recipe.model_fields.get(name)) is not None and value is not None:
            section = sound_part(field.rebuild_annotation(), value)
            unsound |= {name} if section is None else set()
            sound |= {} if section is None else {name: section}
    recipe = Recipe.model_construct(**sound)
    recipe._unsound = frozenset(unsound)
    return recipe


def parse_recipe(values: Mapping[str, Any], where: str) -> Recipe:
    """Recipe from settings. Raises ConfigError that lists every problem with its key."""
    return Recipe.parse(with_seeds(values), where)


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Settings with `key=value` overrides on top.

    An override of `train.<key>` also applies to every entry of `train.methods` (what the user types should win over the
    entry), unless it names the entry: `train.methods.dpo.beta=0.3`. Values that trained methods lose this way are
    printed, because the override makes methods equal that differ in the recipe; not if `quiet`, as in a study, where
    making them equal is the purpose.
    Raises ConfigError that lists every override that cannot be parsed.
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
    if not quiet:
        for line in replaced_in_methods(values, result):
            print_note(line)
    return result


def replaced_in_methods(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A line for each common setting that replaced other values in the entries of trained methods."""
    lines = []
    methods, objective = before.get("methods"), after.get("objective")
    if isinstance(methods, Mapping):
        # Settings of a wrong type are rejected later.
        named = [objective] if isinstance(objective, str) else objective
        trained = named if isinstance(named, list | tuple) and named else list(methods)
        lost: dict[str, list[str]] = {}
        for name in trained:
            before_entry, after_entry = (_entry(values.get("methods"), name) for values in (before, after))
            for key, value in before_entry.items():
                if key not in after_entry and key in after and after[key] != value:
                    lost.setdefault(key, []).append(f"{name} {value}")
        lines = [
            f"{prefix}{key}={after[key]} replaces the recipe's values for single methods: {', '.join(values)}. To keep "
            f"those, set the others by name: {prefix}methods.NAME.{key}=…"
            for key, values in lost.items()
        ]
    for key, value in before.items():
        if key != "methods" and isinstance(value, Mapping) and isinstance(now := after.get(key), Mapping):
            lines += replaced_in_methods(value, now, f"{prefix}{key}.")
    return lines


def _entry(methods: Any, name: Any) -> Mapping[str, Any]:
    entry = methods.get(name) if isinstance(methods, Mapping) and isinstance(name, str) else None
    return entry if isinstance(entry, Mapping) else {}


def _names_a_method(override: Mapping[str, Any]) -> bool:
    return any(
        key == "methods" or (isinstance(value, Mapping) and _names_a_method(value)) for key, value in override.items()
    )


def _without_in_methods(values: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The values, without the methods' entries for keys that the override sets in the common settings."""
    result = dict(values)
    for key, value in override.items():
        if isinstance(result.get("methods"), Mapping) and key != "methods":
            result["methods"] = {name: _without(entry, key) for name, entry in result["methods"].items()}
        below = values.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = _without_in_methods(below, value)
    return result


def _without(entry: Any, key: str) -> Any:
    return {name: value for name, value in entry.items() if name != key} if isinstance(entry, Mapping) else entry


def with_seeds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe, with its seed in every section that accepts a seed and does not set one."""
    seed = values.get("seed", Recipe.model_fields["seed"].default)
    if type(seed) is not int or not 0 <= seed <= MOST_SEED:
        return dict(values)  # reported once as its own error, and not for every section
    result = dict(values)
    for name, field in Recipe.model_fields.items():
        section = section_type(field.annotation)
        if isinstance(result.get(name), Mapping) and section is not None and _takes_seed(section):
            result[name] = {"seed": seed, **result[name]}
    if isinstance(pretrain := result.get("pretrain"), Mapping):
        result["pretrain"] = {
            name: _with_own_seed(entry, seed, index) if isinstance(entry, Mapping) else entry
            for index, (name, entry) in enumerate(pretrain.items())
        }
    return result


def _with_own_seed(entry: Mapping[str, Any], seed: Any, index: int) -> dict[str, Any]:
    """A model to pretrain, with the recipe's seed, and with random weights that differ from every other model's."""
    result = {"seed": seed, **entry}
    model = entry.get("model")
    if isinstance(seed, int) and isinstance(model, Mapping) and model.get("architecture") is not None:
        result["model"] = {"init_seed": MODELS * seed + index, **model}
    return result


def _takes_seed(section: type[Section]) -> bool:
    return "seed" in section.model_fields or issubclass(section, TrainConfig)


def section_type(annotation: Any) -> type[Section] | None:
    """The section class of a field that holds an optional section."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    sections = [option for option in options if isinstance(option, type) and issubclass(option, Section)]
    return sections[0] if sections else None
