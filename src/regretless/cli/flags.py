"""Options that a stage's command does not have, as other tools write settings: answered with the command to use."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from regretless.core.errors import ConfigError

TRL: Mapping[str, str] = {
    "model_name_or_path": "--model",
    "dataset_name": "--pairs",
    "output_dir": "--output",
    "dataset_config": "subset",
    "dataset_train_split": "split",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "truncation_mode": "truncation",
}
"""Options of TRL's command line with another name in a command that trains: an option, or the key of a setting."""
LOSS, WEIGHTS = "loss_type", "loss_weights"
TRL_LORA: Mapping[str, str] = {"lora.r": "16", "lora.alpha": "32", "lora.dropout": "0.05"}
"""What TRL's `--use_peft` means without further options."""


def check_options(command: str, arguments: Sequence[str], options: Collection[str], *, trains: bool) -> None:
    """Raise ConfigError that prints the command as it should be, if it has settings written as options.

    command: as it is typed, such as `regretless dpo`; options: those that it has. An option that is only misspelled
    (`--ouput`) is left to the parser, which names the one that was meant.
    """
    names = [text.partition("=")[0] for text in arguments if text.startswith("--") and len(text) > 2]
    unknown = [name for name in names if name not in options]
    renamed = TRL if trains else {}
    if not any(_key(name) in renamed or not difflib.get_close_matches(name, options) for name in unknown):
        return
    words, settings = _translated(arguments, options, renamed)
    if trains and LOSS in settings:
        command = _with_objective(command, settings)
    written = [*words, *(f"{key}={value}" for key, value in settings.items())]
    instead = " ".join([command, *map(shlex.quote, written)])
    raise ConfigError(
        f"{command}: no such option: {', '.join(dict.fromkeys(unknown))}; settings are written KEY=VALUE "
        f"(`{command} --help` lists them). The same with settings:\n  {instead}"
    )


def _translated(
    arguments: Sequence[str], options: Collection[str], renamed: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Options and other words, and the settings that were written as options."""
    kept: list[str] = []
    settings: dict[str, str] = {}
    adapter = False
    for name, value in _read(arguments):
        key = _key(name)
        target = renamed.get(key, key)
        if not name.startswith("-"):
            kept.append(name)
        elif name in options or target.startswith("--"):
            kept += [target if name not in options else name, *([] if value is None else [value])]
        elif key == "use_peft" and renamed:
            adapter = value is None or value.lower() == "true"
        elif value is None and key.startswith("no_"):
            settings[key.removeprefix("no_")] = "false"
        else:
            settings[target] = "true" if value is None else value
    if adapter:
        settings = {**TRL_LORA, **settings}
    return kept, settings


def _with_objective(command: str, settings: dict[str, str]) -> str:
    """The command with the objective that TRL's losses are, whose hyperparameters join the settings.

    Losses that are not known here stay in the settings, where they are refused.
    """
    # Objectives load torch, which takes seconds.
    from regretless.training.trl_arguments import LOSSES, hyperparameters_of, objective_of

    names = settings[LOSS].strip("[]").split(",")
    try:
        weights = [float(text) for text in settings[WEIGHTS].strip("[]").split(",")] if WEIGHTS in settings else None
    except ValueError:
        return command
    if not LOSSES.keys() >= {*names} or len(weights or names) != len(names):
        return command
    del settings[LOSS]
    settings.pop(WEIGHTS, None)
    beta = float(settings.pop("beta")) if "beta" in settings and len(names) > 1 else None
    found = hyperparameters_of(names, weights, beta, 0.0)
    settings |= {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}
    return f"{command.rpartition(' ')[0]} {objective_of(names, weights)}"


def _read(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Options with their values (the words up to the next option), and other arguments, which have none."""
    words = list(arguments)
    while words:
        name = words.pop(0)
        if not name.startswith("--") or "=" in name:
            text, _, value = name.partition("=")
            yield (text, value) if name.startswith("--") else (name, None)
            continue
        values = []
        while words and not words[0].startswith("--") and "=" not in words[0]:
            values.append(words.pop(0))
        yield name, None if not values else values[0] if len(values) == 1 else f"[{','.join(values)}]"


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
