"""Preference objectives: token log-probabilities in, loss out. Each is one file and one line of `OBJECTIVES`.

>>> objective = build("repo", beta=1.0)
>>> output = objective(Logps(policy, reference=reference, behavior=behavior, mask=mask), pairs)
>>> output.loss.backward()
"""

from __future__ import annotations

from regretless.objectives.apo import APO
from regretless.objectives.base import Logps, Objective, Output
from regretless.objectives.cpo import CPO
from regretless.objectives.dpo import DPO
from regretless.objectives.dpop import DPOP
from regretless.objectives.hinge import Hinge
from regretless.objectives.ipo import IPO
from regretless.objectives.kto import KTO
from regretless.objectives.orpo import ORPO
from regretless.objectives.registry import OBJECTIVES, build, hyperparameter_names
from regretless.objectives.repo import RePO
from regretless.objectives.repo_det import RePODet
from regretless.objectives.rpo import RPO
from regretless.objectives.sft import SFT
from regretless.objectives.simpo import SimPO
from regretless.objectives.tdpo import TDPO
from regretless.objectives.weighted_sum import WeightedSum
from regretless.objectives.weights import repo_weights

OBJECTIVES.enter(
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
    }
)

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
