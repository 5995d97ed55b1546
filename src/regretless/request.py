"""One call of a stage's verb on the command line: its flags, its config file and its overrides, as typed settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from regretless.config import Section, merge, read_yaml
from regretless.errors import reject
from regretless.models import ModelConfig
from regretless.recipe import apply_overrides, run_folder, with_seeds
from regretless.units import substitute

S = TypeVar("S", bound=Section)
MODEL = "model."
"""Begins the overrides of a stage's verb that are about the model."""


@dataclass(frozen=True)
class Request:
    """One call of a stage's verb."""

    verb: str
    config: Path | None
    output: Path | None
    overrides: Sequence[str]
    given: Mapping[str, Any]
    """What the flags named; None where they were left out."""

    def need(self, *names: str) -> None:
        """Raise ConfigError that lists all flags which are missing."""
        values = {**self.given, "output": self.output}
        missing = [f"--{name.replace('_', '-')}: required" for name in names if values.get(name) is None]
        reject(f"regretless {self.verb} (or give --config RECIPE alone, to work in its run folder)", missing)

    def values(self) -> dict[str, Any]:
        """Settings of the stage in the config file: the file's own, or a recipe's section."""
        values = self._file()
        return dict(with_seeds(values)[self.verb] or {}) if self.verb in values else values

    def section(self, kind: type[S], **flags: Any) -> S:
        """Settings of the stage: the config file, then the flags, then the overrides."""
        own = [text for text in self.overrides if not text.startswith(MODEL)]
        values = apply_overrides(merge(self.values(), flags), own)
        return kind.parse(values, f"settings of {self.verb}")

    def model(self) -> ModelConfig:
        """The model that the flags and `model.…` overrides name, on top of a recipe's."""
        values = self._file().get("model")
        flags = {"name_or_path": self.given.get("model"), "adapter": self.given.get("adapter")}
        named = {key: value for key, value in flags.items() if value is not None}
        if "name_or_path" in named:
            values = None  # another model: nothing that the recipe says about its own holds for it
        own = [text.removeprefix(MODEL) for text in self.overrides if text.startswith(MODEL)]
        return ModelConfig.parse(apply_overrides({**(values or {}), **named}, own), "model")

    def _file(self) -> dict[str, Any]:
        """What the config file holds, with `{run}` as the folder of the recipe that it is."""
        values = read_yaml(self.config) if self.config else {}
        run = run_folder(str(values.get("name")), str(values.get("output_dir") or ""))
        return dict(substitute(values, run))
