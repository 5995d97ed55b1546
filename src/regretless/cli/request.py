"""One call of a stage's verb on the command line: its flags, its config file and its overrides, as typed settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from regretless.core.errors import ConfigError, reject
from regretless.core.run_folder import substitute
from regretless.core.settings import Section, merge, read_yaml, sound_part
from regretless.modeling.load import ModelConfig
from regretless.runs.preflight import Findings, Surroundings, input_problems, section_problems
from regretless.runs.recipe import apply_overrides, run_folder, with_seeds

S = TypeVar("S", bound=Section)
INPUTS = ("responses", "pairs")
"""Flags that name a file, a folder or a data set on the hub."""
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

    def settings(
        self,
        kind: type[S],
        *needs: str,
        flags: Mapping[str, Any] | None = None,
        done: Collection[str] = (),
        also: Sequence[str] = (),
    ) -> S:
        """Settings of the stage; what else the verb `needs` (`model`, and flags by their names) is checked as well.

        flags: settings that flags stand for. done: keys of settings whose work is done, and needs nothing any more.
        also: problems that the verb found itself.
        Raises ConfigError with every problem: flags that are missing, settings, and files that are not there.
        """
        found = Findings()
        here = Surroundings(done=done)
        missing = self._missing(needs)
        section = self._part(found, here, "", kind, lambda: self._values(flags or {}))
        if "model" in needs and "model" not in missing:
            self._part(found, here, "model", ModelConfig, self._model_values)
        for name in INPUTS:
            if name in needs and name not in missing:
                input_problems(found, here, f"--{name}", str(self.given[name]))
        required = [f"--{name.replace('_', '-')}: required" for name in missing]
        hint = " (or give --config RECIPE alone, to work in its run folder)" if missing else ""
        reject(f"regretless {self.verb}{hint}", [*required, *also, *found.all()])
        assert section is not None
        return section

    def _missing(self, names: Sequence[str]) -> list[str]:
        values = {**self.given, "output": self.output}
        values["model"] = values.get("model") or self._names_model() or None
        return [name for name in names if values.get(name) is None]

    def _names_model(self) -> bool:
        """Whether the config file or an override names a model."""
        return self._file().get("model") is not None or any(text.startswith(MODEL) for text in self.overrides)

    @staticmethod
    def _part(
        found: Findings, here: Surroundings, key: str, kind: type[S], values: Callable[[], dict[str, Any]]
    ) -> S | None:
        """A section of values, looked through as far as it is sound; None, and the problems noted, if it is not."""
        try:
            given = values()
        except ConfigError as error:
            found.problems += error.problems
            return None
        section = None
        try:
            section = kind.parse(given, "settings")
        except ConfigError as error:
            found.problems += [f"{key}.{one}" if key and not one.startswith("(") else one for one in error.problems]
        sound = sound_part(kind, given) if section is None else section
        if sound is not None:
            section_problems(found, here, sound, key)
        return section

    def other(self, name: str, kind: type[S]) -> S | None:
        """Another section of the recipe that the config file is; None where it has none."""
        value = self._file().get(name) if self._is_recipe() else None
        return None if value is None else kind.parse(value, f"{self.config}: {name}")

    def values(self) -> Any:
        """Settings of the stage in the config file: the file's own, or a recipe's section."""
        values = self._file()
        if not self._is_recipe():
            return values
        given = values.get(self.verb)
        return with_seeds({**values, self.verb: {} if given is None else given})[self.verb]

    def section(self, kind: type[S], **flags: Any) -> S:
        """Settings of the stage: the config file, then the flags, then the overrides. Nothing is looked for on disk."""
        return kind.parse(self._values(flags), f"settings of {self.verb}")

    def _values(self, flags: Mapping[str, Any]) -> Any:
        own = [text for text in self.overrides if not text.startswith(MODEL)]
        values = self.values()
        return apply_overrides(merge(values, flags), own) if isinstance(values, Mapping) else values

    def model(self) -> ModelConfig:
        """The model that the flags and `model.…` overrides name, on top of a recipe's."""
        return ModelConfig.parse(self._model_values(), "model")

    def _model_values(self) -> Any:
        values = self._file().get("model") if self._is_recipe() else None
        flags = {"name_or_path": self.given.get("model"), "adapter": self.given.get("adapter")}
        named = {key: value for key, value in flags.items() if value is not None}
        if "name_or_path" in named:
            values = None  # another model: nothing that the recipe says about its own holds for it
        own = [text.removeprefix(MODEL) for text in self.overrides if text.startswith(MODEL)]
        is_mapping = values is None or isinstance(values, Mapping)
        return apply_overrides({**(values or {}), **named}, own) if is_mapping else values

    def _is_recipe(self) -> bool:
        """Whether the config file is a recipe, and not one stage's settings."""
        values = self._file()
        return "name" in values or self.verb in values

    def _file(self) -> dict[str, Any]:
        """What the config file holds, with `{run}` as the folder of the recipe that it is."""
        values = read_yaml(self.config) if self.config else {}
        run = run_folder(str(values.get("name")), str(values.get("output_dir") or ""))
        return dict(substitute(values, run))
