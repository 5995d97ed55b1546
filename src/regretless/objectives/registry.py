"""The list of objectives: a line for each."""

from __future__ import annotations

from regretless.objectives.apo import APO
from regretless.objectives.cpl import CPL
from regretless.objectives.cpo import CPO
from regretless.objectives.dpo import DPO
from regretless.objectives.dpop import DPOP
from regretless.objectives.hinge import Hinge
from regretless.objectives.ipo import IPO
from regretless.objectives.kto import KTO
from regretless.objectives.lookup import OBJECTIVES
from regretless.objectives.orpo import ORPO
from regretless.objectives.ppl import PPL
from regretless.objectives.repo import RePO
from regretless.objectives.repo_det import RePODet
from regretless.objectives.repo_listwise import RePOListwise
from regretless.objectives.repo_unpaired import RePOUnpaired
from regretless.objectives.rpo import RPO
from regretless.objectives.sft import SFT
from regretless.objectives.simpo import SimPO
from regretless.objectives.tdpo import TDPO
from regretless.objectives.weighted_sum import WeightedSum

__all__ = ["OBJECTIVES"]

OBJECTIVES.enter(
    {
        "repo": RePO,
        "repo_det": RePODet,
        "repo_unpaired": RePOUnpaired,
        "repo_listwise": RePOListwise,
        "ppl": PPL,
        "cpl": CPL,
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
