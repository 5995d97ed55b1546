"""What a plug-in holds: an objective, a verifier and a benchmark. Entry points in `pyproject.toml` give their names."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from regretless.data.columns import Verdict
from regretless.labeling.base import Check, Verifier
from regretless.objectives import Logps, Objective, Output
from regretless.objectives.base import Positive, margins


class Exponential(Objective):
    """exp(−β (ρ⁺ − ρ⁻)), ρ the summed log-ratio of policy to reference in nats (GPO, arXiv:2402.05749)."""

    name: ClassVar[str] = "exponential"

    beta: Positive = 0.1
    """Inverse temperature β of the implicit reward."""

    def compute(self, logps: Logps, pairs: Tensor) -> Output:
        rewards = self.beta * logps.log_ratio()
        return Output(torch.exp(-margins(rewards, pairs)), rewards=rewards.detach())


def same_last_word(response: str, answer: str) -> Check:
    """Correct when response and gold answer end with the same word, whatever its case."""
    words, gold = response.split(), answer.split()
    if not gold:
        return Check(Verdict.UNKNOWN, "gold answer is empty")
    if not words:
        return Check(Verdict.WRONG, "no answer found")
    verdict = Verdict.CORRECT if words[-1].lower() == gold[-1].lower() else Verdict.WRONG
    return Check(verdict, "last word", words[-1])


LAST_WORD = Verifier(check=same_last_word)

PARITY = {"dataset": str(Path(__file__).with_name("parity.jsonl")), "answer_column": "answer", "template": "plain"}
"""Settings of `PromptSource`: here a file that the package brings along; else a hub id."""
