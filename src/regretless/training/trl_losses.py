"""Losses by TRL's names: the objective with the hyperparameters that are the same loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regretless.core.paths import page
from regretless.objectives import OBJECTIVES
from regretless.training.methods import DEFAULT_METHOD

LOSSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sigmoid": ("dpo", {}),
    "robust": ("dpo", {}),
    "sigmoid_norm": ("dpo", {"reduction": "mean"}),
    "ipo": ("ipo", {"reduction": "mean"}),
    "hinge": ("hinge", {}),
    "apo_zero": ("apo", {"variant": "zero"}),
    "apo_down": ("apo", {"variant": "down"}),
}
"""TRL's name of a loss → the objective that is the same loss, and the hyperparameters that make it so."""
SMOOTHED = ("robust",)
"""Those of `LOSSES` that use label_smoothing."""


def losses_of(loss_type: str | Sequence[str] | None) -> list[str]:
    """The names in `loss_type`."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type or ())


def objective_of(names: Sequence[str], weights: Sequence[float] | None) -> str:
    """The objective that TRL's losses with these weights are; empty without losses."""
    if len(names) > 1 or (names and weights not in (None, [1.0])):
        return "weighted_sum"
    return LOSSES[names[0]][0] if names else ""


def hyperparameters_of(
    names: Sequence[str], weights: Sequence[float] | None, beta: float | None, label_smoothing: float
) -> dict[str, Any]:
    """Hyperparameters of this objective; without losses those that are given."""
    common = {} if beta is None else {"beta": beta}
    smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
    each = [{**common, **(smoothing if name in SMOOTHED else {}), **LOSSES[name][1]} for name in names]
    if objective_of(names, weights) != "weighted_sum":
        return each[0] if each else {**common, **smoothing}
    terms = zip(names, weights or [1.0] * len(names), each, strict=True)
    return {"terms": [{"objective": LOSSES[name][0], "weight": weight, **values} for name, weight, values in terms]}


def loss_problems(
    loss_type: str | Sequence[str] | None, weights: Sequence[float] | None, objective: str, label_smoothing: float
) -> list[str]:
    """Why these four cannot be trained as TRL means them; `objective` is empty if none was chosen."""
    names = losses_of(loss_type)
    problems = []
    if loss_type is not None and not names:
        problems.append("loss_type: expected at least one loss, got an empty list; omit it")
    if weights is not None and len(weights) != len(names):
        problems.append(f"loss_weights: expected a weight for each of {len(names)} losses in loss_type, got {weights}")
    for name in names:
        if name not in LOSSES:
            instead = f"; set objective={name!r}, without loss_type" if name in OBJECTIVES else ""
            problems.append(
                f"loss_type: expected one of {', '.join(LOSSES)}, got {name!r}{instead} ({page('from_trl')})"
            )
    meant = "" if problems else objective_of(names, weights)
    if meant and objective not in ("", meant):
        shown = repr(names[0]) if len(names) == 1 else " + ".join(names)
        problems.append(f"loss_type: {shown} is objective={meant!r}, got {objective!r}; remove one")
    if label_smoothing:
        if names and not set(SMOOTHED) & set(names):
            problems.append(f"label_smoothing: {' + '.join(names)} does not use it; set loss_type='robust', or omit it")
        elif not problems and not names and (method := objective or DEFAULT_METHOD) != "dpo":
            problems.append(f"label_smoothing: {method} has none; set loss_type='robust', or omit it")
    return problems
