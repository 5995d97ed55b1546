"""How long responses will be: what finished work shows, else the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regretless.runs.planning.dry_run import PlannedFolder, PlannedUnit, State
from regretless.sampling.engine_settings import SamplingParams

CHARACTERS_PER_TOKEN = 4.0


@dataclass(frozen=True)
class ResponseLengths:
    """Lengths of the responses of every model of a recipe, in tokens."""

    folder: PlannedFolder
    given: float | None = None
    """Length that the user said."""

    def of(self, unit: PlannedUnit, model: Mapping[str, Any]) -> tuple[float, str]:
        """Mean length of what a model would write in a unit of sampling, and where it is known from.

        model: as in the unit's settings.
        """
        most = params_of(unit).max_new_tokens
        if self.given is not None:
            return min(self.given, most), "as you said"

        def distance(other: PlannedUnit) -> tuple[bool, bool, str]:
            return model not in models_in(other), benchmark_of(other) != benchmark_of(unit), other.name

        finished = [
            other
            for other in self.folder.units.values()
            if other.state is not State.RUN and other.summary.get("responses")
            if model in models_in(other) or benchmark_of(other) in (benchmark_of(unit), None)
        ]
        if not finished:
            return most, f"the limit, max_new_tokens: at most {most}"
        nearest = min(finished, key=distance)
        return nearest.summary["tokens"] / nearest.summary["responses"], f"the finished {nearest.name}"


def models_in(unit: PlannedUnit) -> list[Mapping[str, Any]]:
    """Models of a unit of sampling, as in its settings."""
    settings = unit.unit.settings
    return list(settings.get("models") or [settings["model"]]) if is_sampling(unit) else []


def is_sampling(unit: PlannedUnit) -> bool:
    """True if responses are sampled in this unit."""
    return unit.kind == "sample"


def benchmark_of(unit: PlannedUnit) -> str | None:
    """The benchmark that a unit of sampling answers, whichever way it is decoded; None for one that answers none."""
    return unit.folder.parent.name if "sampling" in unit.unit.settings else None


def params_of(unit: PlannedUnit) -> SamplingParams:
    """How a unit of sampling draws tokens."""
    values = unit.unit.settings.get("sampling", unit.unit.settings)
    return SamplingParams.parse({key: values[key] for key in SamplingParams.model_fields if key in values}, unit.name)
