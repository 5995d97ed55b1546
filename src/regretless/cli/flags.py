"""Options that a stage's command does not have, as other tools write settings: answered with the command to use."""

from __future__ import annotations

import difflib
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
}
"""Options of TRL's command line with another name in a command that trains: an option, or the key of a setting."""
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
    instead = " ".join([command, *map(shlex.quote, _translated(arguments, options, renamed))])
    raise ConfigError(
        f"{command}: no such option: {', '.join(dict.fromkeys(unknown))}; settings are written KEY=VALUE "
        f"(`{command} --help` lists them). The same with settings:\n  {instead}"
    )


def _translated(arguments: Sequence[str], options: Collection[str], renamed: Mapping[str, str]) -> list[str]:
    """The arguments, options first; settings that were written as options are KEY=VALUE."""
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
    return [*kept, *(f"{key}={value}" for key, value in settings.items())]


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
