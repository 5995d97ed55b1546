"""Weighted sums of objectives, as in mixed preference optimization (arXiv:2411.10442)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from torch import Tensor

from regretless.core.errors import ConfigError, reject
from regretless.core.settings import setting_error
from regretless.objectives.base import Logps, NonNegative, Objective, Output
from regretless.objectives.lookup import build


class WeightedSum(Objective):
    """Σ_i weight_i loss_i of other objectives, each with hyperparameters and modifiers of its own.

    The loss of a term that has one for each side of a pair is the mean of the two. Rewards are those of the first term
    that has some.
    """

    name: ClassVar[str] = "weighted_sum"
    title: ClassVar[str] = "Weighted sum of objectives"
    paper: ClassVar[str] = "arXiv:2411.10442"
    formula: ClassVar[str] = "loss = Σ_i weight_i · loss_i"

    terms: list[dict[str, Any]] = Field(
        default=[{"objective": "dpo", "weight": 1.0}, {"objective": "sft", "weight": 1.0}]
    )
    """Objectives to add: of each its name as `objective`, its `weight` (default 1), and its hyperparameters, as in
    `[{objective: dpo, beta: 0.2}, {objective: sft, weight: 0.5}]`."""

    @field_validator("terms")
    @classmethod
    def _check_terms(cls, terms: list[dict[str, Any]]) -> list[dict[str, Any]]:
        problems = [] if terms else [setting_error((), "expected at least one term", terms)]
        zero_points = set()
        for number, term in enumerate(terms):
            try:
                objective = _term(term)[1]
                zero_points.add(objective.zero_point)
                if objective.lists:
                    text = f"{objective.name} compares lists of responses, and the other terms pairs; train it alone"
                    problems.append(setting_error((number, "objective"), text, objective.name))
                if objective.soft_labels:
                    text = "it is for all terms: a pair has one label; set it for the sum"
                    problems.append(setting_error((number, "soft_labels"), text, True))
            except ConfigError as error:
                for key, _, text in (problem.partition(": ") for problem in error.problems):
                    problems.append(setting_error((number, key), text, term))
        if len(zero_points - {None}) > 1:
            text = "terms have different zero points (reference_point); a step has one"
            problems.append(setting_error((), text, terms))
        if problems:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return terms

    @model_validator(mode="after")
    def _check_modifiers_of_terms(self) -> Self:
        problems: dict[str, list[str]] = {"ld_alpha": [], "importance": []}
        for place, one in self._parts():
            for name, found in problems.items():
                neutral = type(self).model_fields[name].default
                if getattr(self, name) == neutral:
                    continue
                if getattr(one, name) != neutral:
                    found.append(f"{place} ({one.name}) has one of its own, and the two would multiply")
                elif name == "ld_alpha" and one.rewards_means:
                    found.append(
                        f"{place} ({one.name}) cannot have it, because it divides by the length of a response and has "
                        "no reference"
                    )
        errors = [
            setting_error(
                (name,),
                f"it applies to all terms, but {'; '.join(found)}; set it in single terms instead",
                getattr(self, name),
            )
            for name, found in problems.items()
            if found
        ]
        if {"top_logps", "continuations"} <= self.needs:
            text = "one term needs top_logps and another continuations, and a step reads one of them; use one estimator"
            errors.append(setting_error(("terms",), text, self.terms))
        if errors:
            raise ValidationError.from_exception_data(type(self).__name__, errors)
        return self

    def _parts(self, place: str = "") -> Iterator[tuple[str, Objective]]:
        """Each term with its place, and the terms of those that are sums themselves."""
        for number, (_, one) in enumerate(self._weighted):
            yield f"{place}terms.{number}", one
            if isinstance(one, WeightedSum):
                yield from one._parts(f"{place}terms.{number}.")

    @cached_property
    def _weighted(self) -> tuple[tuple[float, Objective], ...]:
        return tuple(map(_term, self.terms))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset[str]().union(*(objective.required for _, objective in self._weighted))

    @property
    def reads_units(self) -> bool:
        return self.ld_alpha == 1 and all(one.reads_units for _, one in self._weighted if "behavior" in one.required)

    @property
    def zero_point(self) -> Literal["mismatched", "paired"] | None:
        return next((one.zero_point for _, one in self._weighted if one.zero_point is not None), None)

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        outputs = [objective(logps, pairs) for _, objective in self._weighted]
        losses = torch.zeros(len(pairs), dtype=logps.policy.dtype, device=pairs.device)
        for (weight, _), output in zip(self._weighted, outputs, strict=True):
            losses = losses + weight * output.pair_losses.view(len(pairs), -1).mean(dim=1)
        shown = next((output for output in outputs if output.rewards is not None), outputs[0])
        return replace(shown, pair_losses=losses)


def _term(term: Mapping[str, Any]) -> tuple[float, Objective]:
    """Weight and objective of a term. Raises ConfigError that lists its problems."""
    weight = term.get("weight", 1.0)
    problems = []
    try:
        TypeAdapter(NonNegative).validate_python(weight, strict=True)
    except ValidationError:
        problems.append(f"weight: expected a number of at least 0, got {weight!r}")
    settings = {key: value for key, value in term.items() if key not in ("objective", "weight")}
    try:
        objective = build(str(term.get("objective", "")), **settings)
    except ConfigError as error:
        problems += error.problems
    reject("term", problems)
    return float(weight), objective
