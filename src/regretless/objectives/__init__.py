"""Preference objectives: token log-probabilities in, loss out. Each is one file and one line of `registry`.

>>> objective = build("repo", beta=1.0)
>>> output = objective(Logps(policy, reference=reference, behavior=behavior, mask=mask), pairs)
>>> output.loss.backward()
"""

from __future__ import annotations

from regretless.objectives.base import Logps, Objective, Output
from regretless.objectives.lookup import build, hyperparameter_names
from regretless.objectives.registry import OBJECTIVES
from regretless.objectives.repo import RePO
from regretless.objectives.weights import repo_weights

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
