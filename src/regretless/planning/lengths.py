"""How long responses will be: what finished work shows, else the data that a model is trained on, else the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regretless.core.run_folder import RUN
from regretless.modeling.load import ModelConfig
from regretless.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.planning.trainings import Trainings
from regretless.runs.recipe import Recipe
from regretless.sampling.base import SamplingParams


@dataclass(frozen=True)
class Lengths:
    """Tokens of a model's responses, and where this is known from."""

    mean: float
    source: str
    values: NDArray[np.integer[Any]] | None = None
    """Lengths of single responses, where they are known."""

    def longest(self, count: int) -> float:
        """Expected length of the longest of `count` responses; `mean` where single lengths are not known."""
        if self.values is None or not len(self.values):
            return self.mean
        return float(np.quantile(self.values, count / (count + 1)))


@dataclass
class ResponseLengths:
    """Lengths of the responses of every model of a recipe."""

    recipe: Recipe
    folder: PlannedFolder
    trainings: Trainings
    measured: dict[str, Lengths] = field(default_factory=dict)
    """What a calibration showed, by `key_of`."""
    given: float | None = None
    """Length that the user said."""

    @staticmethod
    def key_of(model: Mapping[str, Any], params: SamplingParams) -> str:
        """Identity of a model and how its tokens are drawn."""
        return f"{model} {params.temperature} {params.top_p} {params.top_k} {params.max_new_tokens}"

    def of(self, unit: PlannedUnit, model: Mapping[str, Any], params: SamplingParams) -> Lengths:
        """Lengths of the responses that a unit of sampling would write; `model`: as in its settings."""
        most = params.max_new_tokens
        if self.given is not None:
            return Lengths(min(self.given, most), "as you said")
        finished = self._finished(unit, model)
        found = finished or self.measured.get(self.key_of(model, params)) or self._of_demonstrations(model, most)
        return found or self._of_others(unit) or Lengths(most, f"the limit, max_new_tokens: at most {most}")

    def _finished(self, unit: PlannedUnit, model: Mapping[str, Any]) -> Lengths | None:
        """What the same model did in finished units, on the same benchmark first."""
        found = [one for one in self._samplings() if model in models_in(one)]
        found.sort(key=lambda one: (benchmark_of(one) != benchmark_of(unit), one.name))
        return next((_shown(one) for one in found), None)

    def _of_others(self, unit: PlannedUnit) -> Lengths | None:
        """What other models did on the same benchmark, or in the stage `sample`."""
        found = [one for one in self._samplings() if benchmark_of(one) in (benchmark_of(unit), None)]
        found.sort(key=lambda one: benchmark_of(one) is None)
        return next((_shown(one) for one in found), None)

    def _samplings(self) -> list[PlannedUnit]:
        units = self.folder.units.values()
        return [one for one in units if one.state is not State.RUN and one.summary.get("responses")]

    def _of_demonstrations(self, model: Mapping[str, Any], most: int) -> Lengths | None:
        """A model that supervised training makes here answers like its demonstrations."""
        name = self.pretrained(ModelConfig.parse(model, "model"))
        data = None if name is None else self.trainings.data(f"pretrain/{name}")
        if data is None:
            return None
        values = np.minimum(data.train.table.response_tokens, most)
        return Lengths(float(values.mean()), f"the demonstrations that pretrain/{name} learns from", values)

    def pretrained(self, model: ModelConfig) -> str | None:
        """Name of the entry of `pretrain` that a model is, or was trained from; None for other models."""
        named = model.name_or_path or ""
        if named.startswith(f"{RUN}/train/") and self.recipe.model is not None:
            return self.pretrained(self.recipe.model)
        name = named.removeprefix(f"{RUN}/pretrain/")
        return name if named.startswith(f"{RUN}/pretrain/") and name in self.recipe.pretrain else None


def models_in(unit: PlannedUnit) -> list[Mapping[str, Any]]:
    """Models of a unit of sampling, as in its settings."""
    if unit.name == "sample":
        return [dict(model) for model in unit.settings.get("models", ())]
    return [dict(unit.settings["model"])] if is_sampling(unit) else []


def is_sampling(unit: PlannedUnit) -> bool:
    """True if responses are sampled in this unit."""
    return unit.name == "sample" or "sampling" in unit.settings


def benchmark_of(unit: PlannedUnit) -> str | None:
    """The benchmark that a unit of sampling answers; None for the stage `sample`."""
    return unit.name.split("/")[3] if unit.name.startswith("evaluate/samples/") else None


def params_of(unit: PlannedUnit) -> SamplingParams:
    """How a unit of sampling draws tokens."""
    values = unit.settings.get("sampling", unit.settings)
    return SamplingParams.parse({key: values[key] for key in SamplingParams.model_fields if key in values}, unit.name)


def _shown(unit: PlannedUnit) -> Lengths:
    tokens, responses = unit.summary["tokens"], unit.summary["responses"]
    return Lengths(tokens / responses, f"the finished {unit.name}")
