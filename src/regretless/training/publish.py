"""The Trainer's part of publishing: each saved model has a card, and only files of the model go to the hub."""

from __future__ import annotations

import inspect
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import HubStrategy

from regretless.core.versions import versions
from regretless.core.yaml_settings import load_text
from regretless.modeling.forward import causal_model
from regretless.modeling.load import ModelConfig
from regretless.modeling.quantization import write_quantization
from regretless.objectives import Objective
from regretless.training.argument_checks import given_arguments
from regretless.training.data import PairDataset
from regretless.training.model_card import Facts, base_license, named, write_card
from regretless.training.upload import public_files

SHOWN = (
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
NAMED = ("name_or_path", "adapter", "tokenizer", "chat_template")
"""Settings of a model that may be paths of this machine."""
TIMED = ("_runtime", "_per_second", "epoch", "step", "total_flos")


class CardWriter:
    """Writes a card where peft would write its template; plain data, so that a model that has it can be copied."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __call__(self, output_dir: str) -> None:
        """Called by peft's `save_pretrained` with the folder that it saves to."""
        write_card(Path(output_dir), self.facts)


class PublishingTrainer(Trainer):
    """A Trainer whose saved models have a card, and that uploads nothing but the model, its tokenizer and that card."""

    data_name = "rows passed in Python"
    """How cards name the training data: a hub id, or a file's path, of which only the last part is shown."""
    command: str | None = None
    """The shell command that trains this again; by default, cards show Python code."""
    start: str | None = None
    """The adapter that training goes on with, hub id or path; None if it begins without one."""
    measured_at_the_end: Mapping[str, float] = MappingProxyType({})
    """Metrics of the trained model that are not in the log."""
    card_changes: dict[str, Any]
    """Facts that a caller of `create_model_card` or `push_to_hub` set."""

    def begin_cards(self, data: Any, start: str | None = None) -> None:
        """Prepare the cards of a trainer with this training data: a path, a hub id, a `datasets.Dataset`, or rows.

        start: the adapter that training goes on with.
        """
        self.card_changes, self.start = {}, start
        if isinstance(data, str | Path):
            self.data_name = str(data)
        elif known := getattr(getattr(data, "info", None), "dataset_name", None):
            self.data_name = str(known)
        self.write_cards_in_saved_adapters()

    def facts(self) -> Facts:
        """What the card says of the model as it is now."""
        args: Any = self.args
        objective: Any = self.objective
        model = self.accelerator.unwrap_model(self.model)
        plain = causal_model(model)
        adapter = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
        origin = str((adapter and adapter.base_model_name_or_path) or plain.config._name_or_path or "")
        base, on_hub = named(origin) if origin else ("a model with random weights", False)
        data, data_on_hub = named(self.data_name)
        return Facts(
            **{
                "name": f"{base.rpartition('/')[2] if origin else plain.config.model_type}-{objective.name}",
                "objective": objective.name,
                "title": _own(type(objective), "title"),
                "paper": _own(type(objective), "paper"),
                "formula": _own(type(objective), "formula") or inspect.cleandoc(type(objective).__doc__ or ""),
                "hyperparameters": objective.model_dump(mode="json"),
                "arguments": self._shown_arguments(),
                "adapter": None if adapter is None else _adapter_settings(adapter, model),
                "base": base,
                "base_on_hub": on_hub,
                "start": None if self.start is None else named(self.start)[0],
                "architecture": type(plain).__name__,
                "data": {"data": data, **self._counts()},
                "datasets": [data] if data_on_hub else [],
                "measured": self._measured(),
                "versions": versions(),
                "command": self.command or _python(base, data, given_arguments(args), adapter, model, self.start),
                "language": "python" if self.command is None else "bash",
                **(base_license(origin) if origin else {}),
                **self.card_changes,
            }
        )

    def _shown_arguments(self) -> dict[str, Any]:
        args: Any = self.args
        pairs = args.per_device_train_batch_size * self._parts
        values = {name: getattr(args, name) for name in SHOWN}
        unused = "num_train_epochs" if args.max_steps > 0 else "max_steps"
        return {"pairs per optimizer step": pairs, "optimizer steps": self.state.global_step} | {
            name: getattr(value, "value", value)
            for name, value in values.items()
            if value is not None and name != unused
        }

    def _counts(self) -> dict[str, Any]:
        train = self.train_dataset
        if not isinstance(train, PairDataset):
            return {}
        held_out = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        objective: Any = self.objective
        logps = (
            "its log-probabilities came with the pairs"
            if "behavior" in objective.required
            else "not used by the method"
        )
        args: Any = self.args
        drawn = self.state.global_step * args.per_device_train_batch_size * self._parts
        return {
            "training pairs": len(train),
            "prompts of these": len(train.groups),
            "tokens of these": int(train.tokens.sum()),
            # Each is drawn once before any is drawn again.
            "pairs trained on": min(drawn, len(train)),
            "pairs held out": sum(len(data) for data in held_out if data is not None),
            "behavior policy": logps,
        }

    def _measured(self) -> dict[str, float]:
        """The last value of each metric in the log."""
        found: dict[str, float] = {}
        for line in self.state.log_history:
            found |= {
                name: float(value)
                for name, value in line.items()
                if isinstance(value, int | float) and not name.endswith(TIMED)
            }
        found |= self.measured_at_the_end
        # In alphabetical order: a resumed training has read its log from a file with another one.
        return {name: value for name, value in sorted(found.items()) if name != "learning_rate"}

    def write_cards_in_saved_adapters(self) -> None:
        """Make the adapter write this card wherever it is saved, also by its own `save_pretrained`."""
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            model.create_or_update_model_card = CardWriter(self.facts())

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.write_cards_in_saved_adapters()
        # It writes all arguments beside the model.
        args: Any = vars(self)["args"]
        self.args = args.without_secrets()
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args = args
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            if isinstance(model, PeftModel):
                write_quantization(causal_model(model), Path(output_dir or str(self.args.output_dir)))
            write_card(Path(output_dir or str(self.args.output_dir)), self.facts())

    def create_model_card(
        self,
        language: str | Sequence[str] | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Any = None,
        dataset_tags: Any = None,
        dataset: str | Sequence[str] | None = None,
        dataset_args: Any = None,
        dataset_name: str | Sequence[str] | None = None,
    ) -> None:
        """Write the card into output_dir; the arguments are those of transformers' Trainer, and change its metadata.

        dataset_name: TRL's name of `dataset`. tasks, dataset_tags, dataset_args: not used, because the card's metadata
        has no such fields.
        """
        changes = {
            "languages": _texts(language),
            "license": license,
            "tags": _texts(tags),
            "name": model_name,
            "datasets": _texts(dataset_name if dataset is None else dataset),
            **(
                {} if finetuned_from is None else dict(zip(("base", "base_on_hub"), named(finetuned_from), strict=True))
            ),
        }
        self.card_changes = {**self.card_changes, **{name: value for name, value in changes.items() if value}}
        if self.is_world_process_zero():
            write_card(Path(str(self.args.output_dir)), self.facts())

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model, tokenizer and card to output_dir and upload these, and nothing else that lies there.

        kwargs: those of `create_model_card`. Returns what transformers' Trainer returns; every process has to call it.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**{"model_name": self.hub_model_id, **kwargs})
        self._finish_current_push()
        return self._upload(
            Path(str(self.args.output_dir)),
            commit_message,
            token,
            revision or self.args.hub_revision,
            blocking=blocking,
        )

    def _upload(
        self,
        folder: Path,
        message: str | None,
        token: str | None,
        revision: str | None,
        *,
        blocking: bool,
        place: str | None = None,
    ) -> Any:
        api: Any = HfApi()  # its two signatures, with and without `run_as_future`, cannot be called by a variable
        return api.upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            path_in_repo=place,
            commit_message=message,
            token=token,
            revision=revision,
            allow_patterns=public_files(folder),
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the model of a checkpoint, without the optimizer's state and the Trainer's arguments."""
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._finish_current_push()
        folder = Path(checkpoint_folder)
        places = [None, folder.name] if strategy == HubStrategy.ALL_CHECKPOINTS else [None]
        for place in places:
            message = f"Training in progress, step {self.state.global_step}"
            self._upload(folder, message, self.args.hub_token, self.args.hub_revision, blocking=True, place=place)


def _texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _own(objective: type[Objective], fact: str) -> str:
    """The objective's title, paper or formula; empty if only a method that it is derived from has one."""
    for kind in objective.__mro__:
        if fact in vars(kind):
            return str(vars(kind)[fact])
        if "name" in vars(kind):
            break
    return ""


def _adapter_settings(config: Any, model: nn.Module) -> dict[str, Any]:
    names = ["peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "modules_to_save"]
    found = {name: getattr(config, name, None) for name in names}
    if isinstance(found["target_modules"], set | list):
        found["target_modules"] = _short_targets(set(found["target_modules"]), model)
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in found.items()
        if value is not None
    }


def _short_targets(names: set[str], model: nn.Module) -> set[str]:
    """The last parts of the adapted layers' names, if they name exactly these layers; peft lists all in full."""
    targets = Counter(name.rpartition(".")[2] for name in names)
    there = Counter(name.rpartition(".")[2] for name, _ in model.named_modules())
    return set(targets) if all(there[last] == count for last, count in targets.items()) else names


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


def _python(base: str, data: str, given: Mapping[str, Any], adapter: Any, model: nn.Module, start: str | None) -> str:
    """Python code with the arguments that were set; `start`: the adapter that training goes on with."""
    values = {name: getattr(value, "value", value) for name, value in given.items()}
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
    eval_pairs: int,
    model: ModelConfig,
    data: str,
) -> str:
    """The command of the train stage with these settings; model and data without the folders that they are in."""
    settings = {"objective": objective, **_kept(values), "eval_pairs": eval_pairs}
    settings |= {"lora": None} if lora is None else {f"lora.{name}": value for name, value in lora.items()}
    given = model.model_dump(mode="json", exclude_unset=True)
    loading = {name: value for name, value in given.items() if value is not None}
    loading |= {name: named(loading[name])[0] for name in NAMED if name in loading}
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
