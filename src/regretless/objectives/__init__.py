"""Preference objectives: token log-probabilities in, loss out. Each is one file and one line of `OBJECTIVES`.

>>> objective = build("repo", beta=1.0)
>>> output = objective(Logps(policy, reference=reference, behavior=behavior, mask=mask), pairs)
>>> output.loss.backward()
"""

from __future__ import annotations

from typing import Any

from regretless.core.errors import lookup
from regretless.objectives.base import Hyperparameter, Logps, Need, Objective, Output
from regretless.objectives.dpo import DPO
from regretless.objectives.ipo import IPO
from regretless.objectives.kto import KTO
from regretless.objectives.repo import RePO
from regretless.objectives.repo_det import RePODet
from regretless.objectives.rpo import RPO
from regretless.objectives.sft import SFT
from regretless.objectives.tdpo import TDPO
from regretless.objectives.weights import repo_weights

OBJECTIVES: dict[str, type[Objective]] = {
    "repo": RePO,
    "repo_det": RePODet,
    "dpo": DPO,
    "ipo": IPO,
    "rpo": RPO,
    "kto": KTO,
    "tdpo": TDPO,
    "sft": SFT,
}
"""Every objective by the name that recipes and the command line use."""


def build(name: str, /, **hyperparameters: Any) -> Objective:
    """An objective ready to call. Raises ConfigError: unknown name, or all bad hyperparameters together."""
    return lookup("objective", OBJECTIVES, name).parse(hyperparameters, where=f"objective {name}")


def hyperparameter_names(name: str) -> tuple[str, ...]:
    """Names of an objective's hyperparameters, in order. Raises ConfigError for an unknown objective."""
    return tuple(lookup("objective", OBJECTIVES, name).model_fields)


__all__ = [
    "OBJECTIVES",
    "Hyperparameter",
    "Logps",
    "Need",
    "Objective",
    "Output",
    "RePO",
    "build",
    "hyperparameter_names",
    "repo_weights",
]
