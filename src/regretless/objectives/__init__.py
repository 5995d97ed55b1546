"""Preference objectives: token log-probabilities in, loss out. Each is one file and one line of `OBJECTIVES`.

>>> objective = build("repo", beta=1.0)
>>> output = objective(Logps(policy, reference=reference, behavior=behavior, mask=mask), pairs)
>>> output.loss.backward()
"""

from __future__ import annotations

import inspect
from typing import Any

from regretless.core.plugins import Registry
from regretless.objectives.apo import APO
from regretless.objectives.base import Logps, Objective, Output
from regretless.objectives.cpo import CPO
from regretless.objectives.dpo import DPO
from regretless.objectives.dpop import DPOP
from regretless.objectives.hinge import Hinge
from regretless.objectives.ipo import IPO
from regretless.objectives.kto import KTO
from regretless.objectives.orpo import ORPO
from regretless.objectives.repo import RePO
from regretless.objectives.repo_det import RePODet
from regretless.objectives.rpo import RPO
from regretless.objectives.sft import SFT
from regretless.objectives.simpo import SimPO
from regretless.objectives.tdpo import TDPO
from regretless.objectives.weighted_sum import WeightedSum
from regretless.objectives.weights import repo_weights


def _problem(name: str, kind: Any) -> str | None:
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        return f"expected a subclass of regretless.objectives.Objective, got {kind!r}"
    if inspect.isabstract(kind):
        return f"it has no {' and no '.join(sorted(kind.__abstractmethods__))}; define it"
    found = getattr(kind, "name", None)
    return None if found == name else f"its `name` is {found!r}; make it equal to the entry point's"


OBJECTIVES: Registry[type[Objective]] = Registry(
    "objectives",
    {
        "repo": RePO,
        "repo_det": RePODet,
        "dpo": DPO,
        "ipo": IPO,
        "rpo": RPO,
        "kto": KTO,
        "tdpo": TDPO,
        "hinge": Hinge,
        "apo": APO,
        "dpop": DPOP,
        "simpo": SimPO,
        "cpo": CPO,
        "orpo": ORPO,
        "sft": SFT,
        "weighted_sum": WeightedSum,
    },
    _problem,
)
"""Every objective, by its name in recipes and on the command line."""


def build(name: str, /, **hyperparameters: Any) -> Objective:
    """An objective ready to call.

    Raises ConfigError for an unknown name, for all bad hyperparameters together, and for properties of another form.
    """
    return OBJECTIVES.find(name).parse(hyperparameters, where=f"objective {name}").check_properties()


def hyperparameter_names(name: str) -> tuple[str, ...]:
    """Names of an objective's hyperparameters, in order. Raises ConfigError for an unknown objective."""
    return tuple(OBJECTIVES.find(name).model_fields)


__all__ = [
    "OBJECTIVES",
    "Logps",
    "Objective",
    "Output",
    "RePO",
    "build",
    "hyperparameter_names",
    "repo_weights",
]
