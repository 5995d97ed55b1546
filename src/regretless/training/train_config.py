"""Settings of the train stage: methods, their hyperparameters, training arguments and the adapter."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from regretless.core.errors import problems_of
from regretless.core.hub import no_upload
from regretless.core.ranks import processes
from regretless.core.secrets import Secret, revealed
from regretless.core.settings import Section, Unquoted, setting_error
from regretless.objectives import OBJECTIVES, build, hyperparameter_names
from regretless.training.argument_checks import argument_problems, argument_problems_here, as_declared
from regretless.training.arguments import ARGUMENTS, NOT_IN_RECIPES, PreferenceConfig
from regretless.training.methods import DEFAULT_METHOD, methods_of
from regretless.training.processes import visible_gpus

PAIRS, PER_DEVICE, ACCUMULATION = "pairs_per_step", "per_device_train_batch_size", "gradient_accumulation_steps"
STEP_SIZE = frozenset({PAIRS, PER_DEVICE, ACCUMULATION})
"""Settings that say how many pairs a step has, or how it is divided."""
SEQUENCE = "sequence_parallel_size"
"""The setting that says how many processes compute the same pairs."""


class LoraSettings(Section):
    """Low-rank adapter; the defaults are the paper's for 1.7B models (appendix, experimental configuration)."""

    r: int = Field(default=32, ge=1, le=2**16)
    """Rank of the adapter."""
    alpha: int | None = Field(default=None, ge=1)
    """Numerator of the adapter's scale, which is alpha / r; twice r by default."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout probability on the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an adapter; `all-linear` means all linear layers except the output layer."""
    target_parameters: list[str] | None = None
    """Ends of the names of parameters that get an adapter and belong to no linear layer, such as the experts of a
    mixture: `[mlp.experts.gate_up_proj, mlp.experts.down_proj]`. It needs `dropout: 0`."""

    @model_validator(mode="after")
    def _no_dropout_on_parameters(self) -> Self:
        if self.target_parameters and self.dropout:
            raise ValueError(
                f"dropout: an adapter of target_parameters cannot have any; set it to 0, got {self.dropout:g}"
            )
        return self


class TrainConfig(Section):
    """Preference training; any other argument of `PreferenceConfig` (so of TrainingArguments) may stand here too."""

    model_config = ConfigDict(extra="allow")

    objective: str | list[str] = DEFAULT_METHOD
    """Objective to train with, or a list of objectives to train one model each from the same start."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Hyperparameters and training arguments of single objectives, by name; used for those that `objective` names. A
    value here takes precedence over the common value in this file and in a file that extends it. A common value on the
    command line replaces it, with a message."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter (LoRA) with these settings, for example `{r: 32}`; null trains all weights, as
    `PreferenceTrainer` does without a `peft_config`."""
    pairs_per_step: int = Field(default=8, ge=1, strict=True)
    """Number of pairs in an optimizer step, those of all processes together; a method may bring its own. Each process
    gets an equal part, which therefore has to be a whole number. How the pairs are packed into memory is set by
    `max_tokens_per_microbatch`."""
    processes: Literal["auto"] | Annotated[int, Field(ge=1, strict=True)] = "auto"
    """Number of processes to train with, which this command starts itself; `auto` takes one for each visible GPU, and
    one on a CPU. The number does not change the experiment: a step has `pairs_per_step` pairs in any case. Under a
    launcher (torchrun, Ray) the launcher decides."""
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """What several processes share: `ddp` keeps a copy of the model on each, `fsdp2` shards weights, gradients and
    optimizer state over them, for models that do not fit on one GPU."""
    eval_pairs: int = Field(default=0, ge=0)
    """Number of pairs to hold out of training, rounded up to whole prompts, which training does not see in other pairs
    either, and at most half of all prompts; they give the metrics `eval_rewards/…`."""
    eval_by: Literal["prompt", "topic"] = "prompt"
    """What is held out as a whole: a prompt, or all pairs with the same text in the column `topic`, so that held-out
    pairs are about something else. Topics with a prompt in common count as one."""

    @property
    def objectives(self) -> list[str]:
        """The methods to train, in order."""
        return methods_of(self.objective)

    @property
    def holding_out(self) -> dict[str, Any]:
        """The settings that say which pairs are held out, the second one if it is set."""
        return {"eval_pairs": self.eval_pairs} | ({} if self.eval_by == "prompt" else {"eval_by": self.eval_by})

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report unknown keys and bad hyperparameters together with the problems of the fields above."""
        if not isinstance(values, Mapping):
            return handler(values)
        values = _spelled_out(values)
        errors: list[InitErrorDetails] = []
        try:
            config = handler(values)
        except ValidationError as error:
            problems = error.errors()
            errors = [setting_error(item["loc"], item["msg"], item["input"], item["type"]) for item in problems]
            bad = {item["loc"][0] for item in problems if item["loc"]}
            config = cls.model_construct(**{key: value for key, value in values.items() if key not in bad})
        errors += config._problems()
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return config

    def _problems(self) -> list[InitErrorDetails]:
        """Problems of objectives, hyperparameters and training arguments, each under its own key."""
        problems: dict[tuple[str, ...], tuple[str, Any]] = {}
        names = [name for name in self.objectives if isinstance(name, str)]
        if not names:
            problems["objective",] = ("expected at least one method", self.objective)
        for section, methods in (("objective", names), ("methods", self.methods)):
            for name in methods:
                if name not in OBJECTIVES:
                    problems[(section, name) if section == "methods" else (section,)] = (_unknown_method(name), name)
        if len(set(names)) < len(names):
            problems["objective",] = ("a method is named twice", self.objective)
        # For a method that is not chosen, only its own entry counts.
        for name in dict.fromkeys((*names, *self.methods)):
            if name in OBJECTIVES:
                entry = self.methods.get(name, {})
                for key, problem in self._problems_of(name).items():
                    is_in_entry = key.partition(".")[0] in entry  # the rest leads into a list or mapping
                    if is_in_entry or name in names:
                        problems.setdefault(("methods", name, key) if is_in_entry else (key,), problem)
        common = self.__pydantic_extra__ or {}
        usable = [name for name in names if name in OBJECTIVES]
        for key, value in common.items():
            if usable and _belongs_to_another(key) and not any(key in _known_keys(name) for name in usable):
                problems.setdefault((key,), (f"{', '.join(usable)} has no such hyperparameter", value))
        return [setting_error(section, message, value) for section, (message, value) in problems.items()]

    def _problems_of(self, objective: str) -> dict[str, tuple[str, Any]]:
        """Problems of one method's settings, by key, with the value."""
        values = self.values_for(objective)
        hyperparameters = self.split_for(objective)[0]
        arguments = {key: value for key, value in values.items() if key not in hyperparameters}
        problems = {key: _unknown_key(key, objective) for key in values if key not in _known_keys(objective)}
        problems |= {key: ARGUMENTS[key].advice for key in arguments if key in _argument_names() & NOT_IN_RECIPES}
        # A value could be meant for either.
        settings = {*_argument_names(), *TrainConfig.model_fields} - {"beta"}
        if clashes := sorted(settings.intersection(hyperparameter_names(objective))):
            problems["objective"] = (
                f"expected hyperparameters that are no settings of training, got {', '.join(clashes)} of {objective}; "
                "rename them in its package"
            )
        problems |= self._step_size_problems(values)
        others = {key: value for key, value in arguments.items() if key not in problems}
        problems |= argument_problems(PreferenceConfig, others, ARGUMENTS)
        for problem in problems_of(lambda: build(objective, **hyperparameters)):
            key, _, problems[key] = problem.partition(": ")
        if not self.eval_pairs and "eval_strategy" not in problems and values.get("eval_strategy", "no") != "no":
            problems["eval_strategy"] = "no pairs are held out to evaluate on; set eval_pairs"
        return {key: (problem, values.get(key)) for key, problem in problems.items()}

    def _step_size_problems(self, values: Mapping[str, Any]) -> dict[str, str]:
        problems = {}
        pairs = values.get(PAIRS, self.pairs_per_step)
        if type(pairs) is not int or pairs < 1:
            problems[PAIRS] = f"expected a whole number of at least 1, got {pairs!r:.80}"
        if PAIRS in values and PER_DEVICE in values:
            problems[PER_DEVICE] = f"{PAIRS} says how many pairs a step has, on any number of processes; remove one"
        if self.strategy == "fsdp2":
            if values.get("fsdp"):
                problems["fsdp"] = "fsdp2 is the strategy here, and sets up the sharding itself; remove one"
            if values.get("compile_layers"):
                problems["compile_layers"] = "fsdp2 gathers weights in the layers that would be compiled; remove one"
            if values.get("log_completions_steps") is not None:
                problems["log_completions_steps"] = (
                    "a model sharded by fsdp2 cannot answer on one process; leave it out"
                )
        return problems

    def process_count(self, objective: str) -> int:
        """Number of processes that train on this machine: the launcher's, else the setting's."""
        if processes() > 1:
            return processes()
        if self.processes != "auto":
            return self.processes
        return 1 if self.values_for(objective).get("use_cpu") else max(1, visible_gpus())

    def step_pairs(self, objective: str, count: int) -> int:
        """Number of pairs in an optimizer step of `count` processes together."""
        values = self.values_for(objective)
        if PER_DEVICE in values:
            return int(values[PER_DEVICE]) * int(values.get(ACCUMULATION, 1)) * self.parts(objective, count)
        return int(values.get(PAIRS, self.pairs_per_step))

    def batch_arguments(self, objective: str, count: int) -> dict[str, int]:
        """The training arguments that give a step its pairs, for each of `count` processes."""
        accumulation = int(self.values_for(objective).get(ACCUMULATION, 1))
        pairs = self.step_pairs(objective, count)
        return {PER_DEVICE: pairs // (self.parts(objective, count) * accumulation), ACCUMULATION: accumulation}

    def parts(self, objective: str, count: int) -> int:
        """Number of parts that a step's pairs are divided into among `count` processes.

        Processes that compute each row together have the same pairs.
        """
        size = self.values_for(objective).get(SEQUENCE, 1)
        return count // size if type(size) is int and 0 < size <= count else count

    def problems_here(self, objective: str, workers: int | None = None) -> list[str]:
        """Why training with one method cannot start, each as `key: reason`; `workers`: their number in a cluster."""
        count, gpus = self.process_count(objective) if workers is None else workers, visible_gpus()
        problems = self.division_problems(objective, count)
        # Of several processes, each would set up its devices for the rest; training reports a problem itself.
        if processes() > 1:
            return problems
        if workers is None and 0 < gpus < count and not self.values_for(objective).get("use_cpu"):
            problems.append(f"processes: {count} were asked for, and {gpus} GPU(s) are visible; each process needs one")
        if count == 1 and self.values_for(objective).get("fsdp"):
            problems.append(
                f"{self.key_of(objective, 'fsdp')}: shards a model over several processes, and one trains here; leave "
                "it out, or set processes"
            )
        arguments = {"output_dir": "unused", "report_to": "none", **self.split_for(objective)[1]}
        # The Trainer makes the repository when it begins: in a recipe, hours after the start.
        if arguments.get("push_to_hub") and (reason := no_upload(arguments.get("hub_token"))) is not None:
            problems.append(f"{self.key_of(objective, 'push_to_hub')}: {reason}")
        return problems + [
            f"{self.key_of(objective, name or 'objective')}: {reason}"
            for name, reason in argument_problems_here(PreferenceConfig, arguments)
        ]

    def division_problems(self, objective: str, count: int) -> list[str]:
        """Why a step's pairs cannot be divided by `count` processes, as `key: reason`; at most one."""
        size = self.values_for(objective).get(SEQUENCE, 1)
        if type(size) is int and size > 0 and count % size:
            return [f"{self.key_of(objective, SEQUENCE)}: {size} does not divide {count}, the number of processes"]
        accumulation = int(self.values_for(objective).get(ACCUMULATION, 1))
        pairs, parts_count = self.step_pairs(objective, count), self.parts(objective, count)
        if pairs % (parts_count * accumulation) == 0:
            return []
        fitting = max(each for each in range(1, parts_count + 1) if pairs % each == 0)
        together = f" of which {size} compute each row together" if parts_count < count else ""
        parts, instead = f"{count} processes{together}", f"{fitting * count // parts_count} processes"
        if accumulation > 1:
            parts += f" × {ACCUMULATION} {accumulation}"
            instead = f"leave out {ACCUMULATION}, which has no effect on a step of so many pairs"
        return [
            f"{self.key_of(objective, PAIRS)}: {pairs} pairs cannot be divided equally by {parts}; choose another "
            f"number of pairs, or {instead}"
        ]

    def key_of(self, objective: str, key: str) -> str:
        """Key of a setting of one method: in the method's entry, or in the common settings."""
        return f"methods.{objective}.{key}" if key in self.methods.get(objective, {}) else key

    def values_for(self, objective: str) -> dict[str, Any]:
        """Hyperparameters and arguments of one method: its own entry overrides the common ones."""
        return cast(dict[str, Any], revealed(self._kept_values_for(objective)))

    def environment(self, objective: str) -> dict[str, str]:
        """Variables that another process needs to train with one method, besides what may be written into a file."""
        token = self.values_for(objective).get("hub_token")
        return {} if token is None else {"HF_TOKEN": token}

    def _kept_values_for(self, objective: str) -> dict[str, Any]:
        common = {
            key: value
            for key, value in (self.__pydantic_extra__ or {}).items()
            if key in _argument_names() or key in hyperparameter_names(objective) or not _belongs_to_another(key)
        }
        if PAIRS in self.model_fields_set:
            common[PAIRS] = self.pairs_per_step
        return {**common, **self.methods.get(objective, {})}

    def result_settings(self, objective: str, count: int) -> dict[str, Any]:
        """The settings of one method that the result of `count` processes depends on."""
        values = {
            key: value
            for key, value in self._kept_values_for(objective).items()
            if key not in {*STEP_SIZE, SEQUENCE} and not isinstance(value, Secret)
        }
        return {**values, PAIRS: self.step_pairs(objective, count)}

    def split_for(self, objective: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(hyperparameters of the method, training arguments without those of the number of pairs)."""
        values, names = self.values_for(objective), hyperparameter_names(objective)
        hyperparameters = {key: value for key, value in values.items() if key in names}
        return hyperparameters, {key: value for key, value in values.items() if key not in {*names, *STEP_SIZE}}


STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")


def _spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with a strategy `false` as `no`, the word that transformers knows, and no text `Unquoted`."""
    settings = {key: "no" if key in STRATEGIES and value is False else value for key, value in values.items()}
    settings |= {
        key: as_declared(PreferenceConfig, key, value) for key, value in settings.items() if isinstance(value, Unquoted)
    }
    if isinstance(methods := settings.get("methods"), Mapping):
        settings["methods"] = {
            name: _spelled_out(entry) if isinstance(entry, Mapping) else entry for name, entry in methods.items()
        }
    return settings


@functools.cache
def _argument_names() -> frozenset[str]:
    names = {field.name for field in dataclasses.fields(PreferenceConfig) if field.init}
    # The last two are hyperparameters in a recipe.
    return frozenset(names) - {"objective", "output_dir", "label_smoothing", "ld_alpha"}


def _belongs_to_another(key: str) -> bool:
    """A common hyperparameter that one of several methods does not have (eta, alpha …) is left out for that one."""
    return any(key in kind.model_fields for kind in OBJECTIVES.usable()[0].values())


def _known_keys(objective: str) -> frozenset[str]:
    return _argument_names() | set(hyperparameter_names(objective)) | {PAIRS}


def _unknown_key(key: str, objective: str) -> str:
    if key in ARGUMENTS:
        return f"not used here: {ARGUMENTS[key].advice}"
    if key == "use_peft" or key.startswith("lora_"):
        return "an adapter's settings stand under lora: lora.r, lora.alpha, lora.dropout, lora.target_modules"
    fields = set(TrainConfig.model_fields)
    close = difflib.get_close_matches(key, sorted(_known_keys(objective) - NOT_IN_RECIPES | fields), n=1)
    lists = f"`regretless objectives {objective}` and `regretless settings train` list the known settings"
    return f"unknown for {objective}; " + (f"did you mean {close[0]}?" if close else lists)


def _unknown_method(name: str) -> str:
    close = difflib.get_close_matches(name, OBJECTIVES, n=1)
    return f"expected one of {', '.join(OBJECTIVES)}" + (f"; did you mean {close[0]}?" if close else "")
