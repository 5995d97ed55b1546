"""Pairwise judgments of MT-Bench in the format of its tools: both orders of two models' answers, A, B or tie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.core.intervals import ratio
from regretless.evaluation.chat.files import read_table
from regretless.evaluation.chat.judging import bounded, counted, means
from regretless.evaluation.chat.verdicts import THREE_WAY, parse_label
from regretless.servers.ask import UnreadableError

WINNERS = {1: "model_1", 0: "tie", -1: "model_2"}


@dataclass(frozen=True)
class PairJudgment:
    """Verdicts on one turn of one question: 1 for model_1, -1 for model_2, 0 a tie, None if missing."""

    question_id: str
    turn: int
    games: tuple[int | None, int | None]
    """With model_1 first, and with model_2 first; the sign of the second is already reversed."""

    @property
    def winners(self) -> tuple[str, str]:
        """The games' winners in the terms of the file."""
        first, second = ("error" if game is None else WINNERS[game] for game in self.games)
        return first, second

    @property
    def verdict(self) -> int | None:
        """The verdict if both games agree, else a tie; None if one is missing."""
        first, second = self.games
        if first is None or second is None:
            return None
        return first if first == second else 0


def read_pair_judgments(path: Path) -> list[PairJudgment]:
    """Judgments of a file with `g1_judgment` and `g2_judgment`, parsed from the judge's replies.

    Raises DataError for a row that cannot be used.
    """
    rows = read_table(str(path), ["question_id", "turn", "g1_judgment", "g2_judgment"])
    return [
        PairJudgment(
            str(row["question_id"]),
            int(row["turn"]),
            (_verdict(row["g1_judgment"], 1), _verdict(row["g2_judgment"], -1)),
        )
        for row in rows
    ]


def _verdict(reply: str, sign: int) -> int | None:
    try:
        return sign * parse_label(reply, THREE_WAY)
    except UnreadableError:
        return None


def second_win_rate(judgments: list[PairJudgment]) -> dict[str, Any]:
    """Win rate of model_2 against model_1 in percent (a tie counts half), with uncertainty; failures are counted."""
    sums: dict[str, tuple[float, float]] = {}
    for judgment in judgments:
        if judgment.verdict is not None:
            total, count = sums.get(judgment.question_id, (0.0, 0.0))
            sums[judgment.question_id] = (total + (1 - judgment.verdict) / 2, count + 1)
    known = [judgment.verdict for judgment in judgments if judgment.verdict is not None]
    return {
        "failed": len(judgments) - len(known),
        "verdicts": counted(WINNERS[verdict] for verdict in known),
        "win_rate": bounded(ratio(sums, 100.0), means(sums), 0, 100).shown(judgments=len(known)),
    }
