"""The train stage: a trained model or adapter from a pairs file and a model; an interrupted run resumes."""

from __future__ import annotations

import dataclasses
import difflib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig
from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regretless.core.settings import Section, lower, setting_error
from regretless.core.terminal import bar
from regretless.data.records import write_jsonl
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.modeling.trained import last_complete_checkpoint
from regretless.objectives import OBJECTIVES, build, hyperparameter_names
from regretless.training.argument_checks import argument_problems, problem_here
from regretless.training.arguments import PreferenceConfig
from regretless.training.data import Groups, PairDataset
from regretless.training.pair_store import PairTable
from regretless.training.reading import pair_table
from regretless.training.trainer import PreferenceTrainer


class LoraSettings(Section):
    """Low-rank adapter; the defaults are the paper's for 1.7B models (appendix, experimental configuration)."""

    r: int = Field(default=32, ge=1)
    """Rank."""
    alpha: int = Field(default=64, ge=1)
    """Scaling numerator."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the adapter's input."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter; `all-linear` leaves out the output layer."""


class TrainConfig(Section):
    """Preference training; any other argument of `PreferenceConfig` (so of TrainingArguments) may stand here too."""

    model_config = ConfigDict(extra="allow")

    objective: str | list[str] = "repo"
    """One method, or several to train side by side from the same start."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Hyperparameters and training arguments of single methods, which `objective` picks from. What a method has here
    counts over the common value of the file, and of a file that extends it; one that is typed replaces it, aloud."""
    lora: LoraSettings | None = LoraSettings()
    """None trains all weights."""
    eval_pairs: int = Field(default=0, ge=0)
    """Pairs held out (whole prompts) to watch `eval_rewards/…` on."""

    @property
    def objectives(self) -> list[str]:
        """The methods to train, in order."""
        return [self.objective] if isinstance(self.objective, str) else list(self.objective)

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
            found = error.errors()
            errors = [setting_error(item["loc"], item["msg"], item["input"], item["type"]) for item in found]
            bad = {item["loc"][0] for item in found if item["loc"]}
            config = cls.model_construct(**{key: value for key, value in values.items() if key not in bad})
        errors += config._problems()
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return config

    def _problems(self) -> list[InitErrorDetails]:
        """Problems of objectives, hyperparameters and training arguments, each under its own key."""
        found: dict[tuple[str, ...], tuple[str, Any]] = {}
        names = [name for name in self.objectives if isinstance(name, str)]
        if not names:
            found["objective",] = ("expected at least one method", self.objective)
        for place, given in (("objective", names), ("methods", self.methods)):
            for name in given:
                if name not in OBJECTIVES:
                    found[(place, name) if place == "methods" else (place,)] = (_unknown_method(name), name)
        if len(set(names)) < len(names):
            found["objective",] = ("a method is named twice", self.objective)
        # For a method that is not chosen, only its own entry counts.
        for name in dict.fromkeys((*names, *self.methods)):
            if name in OBJECTIVES:
                own = self.methods.get(name, {})
                for key, problem in self._problems_of(name).items():
                    if key in own or name in names:
                        found.setdefault(("methods", name, key) if key in own else (key,), problem)
        common = self.__pydantic_extra__ or {}
        known = [name for name in names if name in OBJECTIVES]
        for key, value in common.items():
            if known and _belongs_to_another(key) and not any(key in _known_keys(name) for name in known):
                found.setdefault((key,), (f"{', '.join(known)} has no such hyperparameter", value))
        return [setting_error(place, message, value) for place, (message, value) in found.items()]

    def _problems_of(self, objective: str) -> dict[str, tuple[str, Any]]:
        """Problems of one method's settings, by key, with the value."""
        values = self.values_for(objective)
        hyperparameters, arguments = self.split_for(objective)
        found = {key: _unknown_key(key, objective) for key in values if key not in _known_keys(objective)}
        found |= {key: UNUSED[key] for key in arguments if key in UNUSED}
        found |= argument_problems(PreferenceConfig, {key: arguments[key] for key in arguments if key not in found})
        try:
            OBJECTIVES[objective].model_validate(hyperparameters)
        except ValidationError as error:
            found |= {".".join(map(str, item["loc"][:1])): lower(item["msg"]) for item in error.errors()}
        if not self.eval_pairs and "eval_strategy" not in found and values.get("eval_strategy", "no") != "no":
            found["eval_strategy"] = "no pairs are held out to evaluate on; set eval_pairs"
        return {key: (problem, values.get(key)) for key, problem in found.items()}

    def problem_here(self, objective: str) -> str | None:
        """Why training with one method cannot start on this machine, as `key: reason`, or None."""
        arguments = {"output_dir": "unused", "report_to": "none", **self.split_for(objective)[1]}
        found = problem_here(PreferenceConfig, arguments)
        return None if found is None else f"{self.key_of(objective, found[0] or 'objective')}: {found[1]}"

    def key_of(self, objective: str, key: str) -> str:
        """Key of a setting of one method: in the method's entry, or in the common settings."""
        return f"methods.{objective}.{key}" if key in self.methods.get(objective, {}) else key

    def values_for(self, objective: str) -> dict[str, Any]:
        """Hyperparameters and arguments of one method: its own entry overrides the common ones."""
        common = {
            key: value
            for key, value in (self.__pydantic_extra__ or {}).items()
            if key in _argument_names() or key in hyperparameter_names(objective) or not _belongs_to_another(key)
        }
        return {**common, **self.methods.get(objective, {})}

    def split_for(self, objective: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(hyperparameters of the method, training arguments)."""
        values, names = self.values_for(objective), hyperparameter_names(objective)
        hyperparameters = {key: value for key, value in values.items() if key in names}
        return hyperparameters, {key: value for key, value in values.items() if key not in names}


STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")


def _spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with a strategy `no`, which YAML reads as false, as the word that transformers knows."""
    found = {key: "no" if key in STRATEGIES and value is False else value for key, value in values.items()}
    if isinstance(methods := found.get("methods"), Mapping):
        found["methods"] = {
            name: _spelled_out(entry) if isinstance(entry, Mapping) else entry for name, entry in methods.items()
        }
    return found


def _argument_names() -> set[str]:
    return {field.name for field in dataclasses.fields(PreferenceConfig) if field.init} - {"objective", "output_dir"}


def _belongs_to_another(key: str) -> bool:
    """A common hyperparameter that one of several methods does not have (eta, alpha …) is left out for that one."""
    return any(key in kind.model_fields for kind in OBJECTIVES.usable()[0].values())


def _known_keys(objective: str) -> set[str]:
    return _argument_names() | set(hyperparameter_names(objective))


UNUSED = {
    "objective_kwargs": "set hyperparameters by their own names, without it",
    "model_init_kwargs": "`model` defines how the model is loaded",
    "ref_model_init_kwargs": "the reference is `model`, as it is before training",
    "disable_tqdm": "this package has its own progress bar",
    "resume_from_checkpoint": "the same command resumes from the last checkpoint automatically",
    "do_train": "training has no such switch here",
    "do_eval": "training has no such switch here; set eval_pairs",
    "do_predict": "training has no such switch here; set eval_pairs",
}
"""Arguments of `PreferenceConfig` that the stage sets itself, or that have no meaning for it."""


def _unknown_key(key: str, objective: str) -> str:
    fields = set(TrainConfig.model_fields)
    close = difflib.get_close_matches(key, sorted(_known_keys(objective) - UNUSED.keys() | fields), n=1)
    return f"unknown for {objective}" + (f"; did you mean {close[0]}?" if close else "")


def _unknown_method(name: str) -> str:
    close = difflib.get_close_matches(name, OBJECTIVES, n=1)
    return f"expected one of {', '.join(OBJECTIVES)}" + (f"; did you mean {close[0]}?" if close else "")


def run(config: TrainConfig, objective: str, model: ModelConfig, pairs: Path | str, output: Path) -> dict[str, Any]:
    """Train `model` with one method on a pairs file; writes a model or adapter with tokenizer to `output`.

    Resumes from the last complete checkpoint in `output`. Also written: trainer_state.json (the log), pair_scores.jsonl
    with the rewards of the held-out pairs, where there are any, and, beside `output` in `<output>.cache`,
    refused-pairs.jsonl (rejected rows with reasons).

    Raises ConfigError, DataError or NonFiniteLossError.
    """
    hyperparameters, arguments = config.split_for(objective)
    args = PreferenceConfig(
        output_dir=str(output),
        objective=objective,
        objective_kwargs=hyperparameters,
        disable_tqdm=True,
        **({"report_to": "none"} | arguments),
    )
    tokenizer = load_tokenizer(model)
    method = build(objective, **hyperparameters)
    table = pair_table(pairs, tokenizer, args, method, "pairs")
    train, held_out = (
        PairDataset(table, mismatched=method.zero_point == "mismatched", numbers=numbers) if len(numbers) else None
        for numbers in _hold_out(table, config.eval_pairs, args.seed)
    )
    assert train is not None

    torch.manual_seed(args.seed)  # the adapter's initial weights are random, see below
    trainer = PreferenceTrainer(
        load_model(model, for_training=True),
        args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=_lora(config.lora),
    )
    checkpoint = last_complete_checkpoint(output)
    if checkpoint is None and trainer.is_world_process_zero():
        for useless in output.glob("checkpoint-*"):
            shutil.rmtree(useless)
    with _ProgressBar(f"train {objective}") as progress:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(progress)
        result = trainer.train(resume_from_checkpoint=checkpoint)
    summary: dict[str, Any] = {
        "pairs": len(train),
        "held_out_pairs": len(held_out or ()),
        "steps": result.global_step,
        "loss": result.training_loss,
    }
    if held_out is not None:
        summary |= _evaluate(trainer, held_out, output)
    _publish(trainer, output)
    return summary


def _lora(settings: LoraSettings | None) -> LoraConfig | None:
    if settings is None:
        return None
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )


def _hold_out(table: PairTable, count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training pairs and of the held-out pairs: whole prompts at random until `count` pairs."""
    numbers = np.arange(len(table))
    if not count:
        return numbers, numbers[:0]
    groups = Groups(table.prompts)
    # In the order of their tokens, so that the order of the rows changes nothing: big-endian bytes sort as numbers do.
    prompts = [np.array(table[int(first)].prompt_ids, ">i4").tobytes() for first in groups.members[groups.bounds[:-1]]]
    by_tokens = np.array(sorted(range(len(groups)), key=prompts.__getitem__), np.int64)
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).numpy()
    some = by_tokens[order[: len(groups) // 2]]
    before = np.cumsum(np.diff(groups.bounds)[some]) - np.diff(groups.bounds)[some]
    held = np.zeros(len(table), bool)
    for group in some[before < count].tolist():
        held[groups[group]] = True
    return numbers[~held], numbers[held]


def _evaluate(trainer: PreferenceTrainer, held_out: PairDataset, output: Path) -> dict[str, float]:
    loader = trainer.get_eval_dataloader()
    result = trainer.evaluation_loop(loader, "held-out pairs")
    if result.predictions is not None and trainer.is_world_process_zero():
        write_jsonl(
            output / "pair_scores.jsonl",
            (
                {"pair_id": item.pair.pair_id, "chosen_reward": float(chosen), "rejected_reward": float(rejected)}
                for item, (chosen, rejected) in zip(
                    map(held_out.__getitem__, range(len(held_out))), result.predictions, strict=True
                )
            ),
        )
    return dict(result.metrics or {})


def _publish(trainer: PreferenceTrainer, output: Path) -> None:
    """Final model, tokenizer and log at the root of `output`: written to a folder in it first, then moved."""
    # With push_to_hub the Trainer uploads while it saves, and leaves out what begins with an underscore.
    staging, accelerator = output / "_final", trainer.accelerator
    if accelerator.is_main_process:
        shutil.rmtree(staging, ignore_errors=True)
    accelerator.wait_for_everyone()
    trainer.save_model(str(staging))  # sharded weights are gathered: every process takes part
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    trainer.state.save_to_json(str(staging / "trainer_state.json"))
    for file in staging.iterdir():
        file.replace(output / file.name)
    staging.rmdir()


class _ProgressBar(TrainerCallback):
    """One progress bar for the whole training, on this package's console."""

    def __init__(self, description: str) -> None:
        self.description = description
        self._context: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*error)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._context = bar(self.description, state.max_steps, done=state.global_step)
            self._advance = self._context.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._context is not None:
            self._advance(1)
