"""What the card of a trainer's model says, with the code or the command that trains it again."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import TrainerState

from regretless.core.versions import versions
from regretless.core.yaml_settings import load_text
from regretless.modeling.forward import causal_model
from regretless.modeling.load import ModelConfig
from regretless.objectives import Objective
from regretless.training.argument_checks import changed_arguments
from regretless.training.data import PairDataset
from regretless.training.model_card import Facts, base_license, named, write_card

SHOWN_ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "num_train_epochs", "max_steps", "optim", "weight_decay"),
    *("max_grad_norm", "seed", "max_length", "truncation", "bf16", "trained_dtype", "group_pairs"),
)
"""Training arguments that a card lists: those that most change the result."""
RECORDING = (
    *("hub_", "push_to_hub", "logging_", "save_", "report_to", "run_name", "output_dir", "disable_tqdm", "trackio"),
)
"""Beginnings of the names of training arguments that no result depends on: where and how a training is recorded."""
ELSEWHERE = (*RECORDING, "model_init_kwargs", "ref_model_init_kwargs")
"""Beginnings of the names of arguments that change no result, or may hold an access token or a path."""
LOADED = ("dtype", "torch_dtype", "attn_implementation", "revision", "quantization_config")
"""Arguments of from_pretrained that a card shows; others may hold an access token or a path."""
MODEL_PATHS = ("name_or_path", "adapter", "tokenizer", "chat_template")
"""Settings of a model that may be paths of this machine."""
TIME_METRICS = ("_runtime", "_per_second", "epoch", "step", "total_flos")


class CardSource(Protocol):
    """What a card tells of a trainer."""

    args: Any
    accelerator: Any
    model: Any
    state: TrainerState
    objective: Objective
    train_dataset: Any
    eval_dataset: Any

    @property
    def pairs_per_step(self) -> int:
        """Pairs in an optimizer step, those of all processes together."""


class TrainerCard:
    """The card of the model that a trainer trains: what it says, and who writes it."""

    def __init__(self, trainer: CardSource, data: Any, start: str | None = None) -> None:
        """data: what the trainer was given to train on: a path, a hub id, a `datasets.Dataset`, or rows.

        start: the adapter that training goes on with, hub id or path.
        """
        self._trainer, self._start = trainer, start
        self._data = "rows passed in Python"
        if isinstance(data, str | Path):
            self._data = str(data)
        elif name := getattr(getattr(data, "info", None), "dataset_name", None):
            self._data = str(name)
        self._command: str | None = None
        self._changes: dict[str, Any] = {}
        self.measured_at_the_end: Mapping[str, float] = {}
        """Metrics of the trained model that are not in the log."""

    def describe(self, *, data: str, start: str | None, command: str) -> None:
        """Say what the trainer cannot know: the data's hub id or path, the adapter before, and the shell command."""
        self._data, self._start, self._command = data, start, command

    def change(self, **facts: Any) -> None:
        """Replace facts by those of a caller of `create_model_card`; what is empty stays."""
        self._changes |= {name: value for name, value in facts.items() if value}

    def attach(self) -> Callable[[str | Path], bool]:
        """Let an adapter write the card as it is now wherever it is saved; returns what writes it into a folder."""
        # Without the trainer in it, so that a model that has it can be copied.
        write = functools.partial(write_card, facts=self.facts())
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        if isinstance(model, PeftModel):
            model.create_or_update_model_card = write
        return write

    def facts(self) -> Facts:
        """What the card says of the model as it is now."""
        trainer, objective = self._trainer, self._trainer.objective
        model = trainer.accelerator.unwrap_model(trainer.model)
        plain = causal_model(model)
        adapter = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
        origin = str((adapter and adapter.base_model_name_or_path) or plain.config._name_or_path or "")
        base, on_hub = named(origin) if origin else ("a model with random weights", False)
        data, data_on_hub = named(self._data)
        return Facts(
            **{
                "name": f"{base.rpartition('/')[2] if origin else plain.config.model_type}-{objective.name}",
                "objective": objective.name,
                "title": _declared(type(objective), "title"),
                "paper": _declared(type(objective), "paper"),
                "formula": _declared(type(objective), "formula") or inspect.cleandoc(type(objective).__doc__ or ""),
                "hyperparameters": objective.model_dump(mode="json"),
                "arguments": self._shown_arguments(),
                "adapter": None if adapter is None else _adapter_settings(adapter, model),
                "base": base,
                "base_on_hub": on_hub,
                "start": None if self._start is None else named(self._start)[0],
                "architecture": type(plain).__name__,
                "data": {"data": data, **self._counts()},
                "datasets": [data] if data_on_hub else [],
                "measured": self._measured(),
                "versions": versions(),
                "command": self._command
                or _python(base, data, changed_arguments(trainer.args), adapter, model, self._start),
                "language": "python" if self._command is None else "bash",
                **(base_license(origin) if origin else {}),
                **self._changes,
            }
        )

    def _shown_arguments(self) -> dict[str, Any]:
        trainer, args = self._trainer, self._trainer.args
        values = {name: getattr(args, name) for name in SHOWN_ARGUMENTS}
        unused = "num_train_epochs" if args.max_steps > 0 else "max_steps"
        steps = {
            f"{self._unit} per optimizer step": trainer.pairs_per_step,
            "optimizer steps": trainer.state.global_step,
        }
        return steps | {
            name: getattr(value, "value", value)
            for name, value in values.items()
            if value is not None and name != unused
        }

    @property
    def _unit(self) -> str:
        """What a step counts."""
        return "lists" if self._trainer.objective.lists else "pairs"

    def _counts(self) -> dict[str, Any]:
        trainer, train = self._trainer, self._trainer.train_dataset
        if not isinstance(train, PairDataset):
            return {}
        held_out = trainer.eval_dataset.values() if isinstance(trainer.eval_dataset, dict) else [trainer.eval_dataset]
        reads_logps = "behavior" in trainer.objective.required
        return {
            f"training {self._unit}": len(train),
            "prompts of these": len(train.groups),
            "tokens of these": int(train.tokens.sum()),
            # Each is drawn once before any is drawn again.
            f"{self._unit} trained on": min(trainer.state.global_step * trainer.pairs_per_step, len(train)),
            f"{self._unit} held out": sum(len(data) for data in held_out if data is not None),
            "behavior policy": "its log-probabilities came with the pairs" if reads_logps else "not used by the method",
        }

    def _measured(self) -> dict[str, float]:
        """The last value of each metric in the log."""
        measured: dict[str, float] = {}
        for line in self._trainer.state.log_history:
            measured |= {
                name: float(value)
                for name, value in line.items()
                if isinstance(value, int | float) and not name.endswith(TIME_METRICS)
            }
        measured |= self.measured_at_the_end
        # In alphabetical order: a resumed training has read its log from a file with another one.
        return {name: value for name, value in sorted(measured.items()) if name != "learning_rate"}


def _declared(objective: type[Objective], fact: str) -> str:
    """The objective's title, paper or formula; empty if only a method that it is derived from has one."""
    for kind in objective.__mro__:
        if fact in vars(kind):
            return str(vars(kind)[fact])
        if "name" in vars(kind):
            break
    return ""


def _adapter_settings(config: Any, model: nn.Module) -> dict[str, Any]:
    names = ["peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "modules_to_save"]
    settings = {name: getattr(config, name, None) for name in names}
    if isinstance(settings["target_modules"], set | list):
        settings["target_modules"] = _short_targets(set(settings["target_modules"]), model)
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in settings.items()
        if value is not None
    }


def _short_targets(names: set[str], model: nn.Module) -> set[str]:
    """The last parts of the adapted layers' names, if they name exactly these layers; peft lists all in full."""
    targets = Counter(name.rpartition(".")[2] for name in names)
    layers = Counter(name.rpartition(".")[2] for name, _ in model.named_modules())
    return set(targets) if all(layers[last] == count for last, count in targets.items()) else names


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a published command may show: no token, no path of this machine, nothing but plain values."""
    return {
        name: value
        for name, value in values.items()
        if not name.startswith(ELSEWHERE) and not name.endswith(("_dir", "_config")) and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(map(_is_plain, value.values()))
    return isinstance(value, bool | int | float | str | None | list | tuple)


def _python(base: str, data: str, changed: Mapping[str, Any], adapter: Any, model: nn.Module, start: str | None) -> str:
    """Python code with the arguments that were set; `start`: the adapter that training goes on with."""
    values = {name: getattr(value, "value", value) for name, value in changed.items()}
    hyperparameters = dict(values.get("objective_kwargs") or {})
    loaded = {**_quantization(model), **values.get("model_init_kwargs", {})}
    loading = {name: _as_written(value) for name, value in loaded.items() if name in LOADED}
    more_settings = {"objective_kwargs": hyperparameters, "model_init_kwargs": loading}
    kept = {"output_dir": "trained", **_kept(values)} | {name: value for name, value in more_settings.items() if value}
    lines = [f"config = PreferenceConfig({', '.join(f'{name}={value!r}' for name, value in kept.items())})"]
    more = ""
    if start is not None:
        base = named(start)[0]
    elif isinstance(adapter, LoraConfig):
        settings = {name: value for name, value in _adapter_settings(adapter, model).items() if name != "peft_type"}
        lines.append(f"adapter = LoraConfig({', '.join(f'{name}={value!r}' for name, value in settings.items())})")
        more = ", peft_config=adapter"
    lines.append(f"PreferenceTrainer({base!r}, args=config, train_dataset={data!r}{more}).train()")
    return "\n".join(lines)


def _quantization(model: nn.Module) -> dict[str, Any]:
    """How the base model was quantized when it was loaded, if it was."""
    quantizer: Any = getattr(causal_model(model), "hf_quantizer", None)
    return (
        {} if quantizer is None or quantizer.pre_quantized else {"quantization_config": quantizer.quantization_config}
    )


def _as_written(value: Any) -> Any:
    """A data type by its name, a quantization as a mapping, a choice as its value: from_pretrained takes these."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not hasattr(value, "to_diff_dict"):
        return getattr(value, "value", value)
    settings = {name: _as_written(setting) for name, setting in value.to_diff_dict().items()}
    return {name: setting for name, setting in settings.items() if not name.startswith("_")}


def stage_command(
    objective: str,
    values: Mapping[str, Any],
    lora: Mapping[str, Any] | None,
    holding_out: Mapping[str, Any],
    model: ModelConfig,
    data: str,
) -> str:
    """The command of the train stage with these settings; model and data without the folders that they are in."""
    settings = {"objective": objective, **_kept(values), **holding_out}
    settings |= {"lora": None} if lora is None else {f"lora.{name}": value for name, value in lora.items()}
    chosen = model.model_dump(mode="json", exclude_unset=True)
    loading = {name: value for name, value in chosen.items() if value is not None}
    loading |= {name: named(loading[name])[0] for name in MODEL_PATHS if name in loading}
    flags = ["--model", loading.pop("name_or_path")] if "name_or_path" in loading else []
    flags += ["--pairs", named(data)[0], "--output", "trained"]
    settings |= {f"model.{name}": value for name, value in loading.items()}
    words = [f"{name}={_yaml(value)}" for name, value in settings.items()]
    return " ".join(["regretless train", *(shlex.quote(word) for word in [*flags, *words])])


def _yaml(value: Any) -> str:
    """A value as an override says it; a text that YAML reads as something else, such as a number, in quotes."""
    if isinstance(value, str):
        with suppress(yaml.YAMLError, ValueError):
            if load_text(value) == value:
                return value
    return json.dumps(value, ensure_ascii=False)
