"""AlpacaEval 2: models on its board that have rows left out, and whose rows got the difficulty of other instructions.

The published tool takes an instruction's difficulty by the row's position. Where a judgment failed and its row was left
out, every later row got the difficulty of another instruction. The published coefficients show it: they give the
published win rate with the difficulties of the first rows, and not with those of all instructions. (Where the last row
alone was left out, positions are right.) A model whose judgments are given is also fitted anew, with the difficulties
by position and by instruction.

    python experiments/alpaca_eval_rows.py ../shared/data/alpaca_eval

From a clone of tatsu-lab/alpaca_eval, with df_gamed.csv and alpaca_eval_gpt4_baseline.json from the hub beside it:

    python experiments/alpaca_eval_rows.py --leaderboard …/weighted_alpaca_eval_gpt4_turbo_leaderboard.csv \\
        --weights …/baseline_gpt4_1106_preview.csv --gamed df_gamed.csv --results alpaca_eval/results \\
        --questions alpaca_eval_gpt4_baseline.json
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from regretless.core.errors import DataError
from regretless.evaluation.chat.alpaca_eval import JudgedAnswer, win_rates
from regretless.evaluation.chat.files import read_table
from regretless.evaluation.chat.length_control import Coefficients, GamedBaselines, predict, read_gamed_baselines

ANNOTATOR = "weighted_alpaca_eval_gpt4_turbo"
EXACT = 1e-6
"""Points; with the right difficulties, the published coefficients give the published number to 1e-9."""


@dataclass(frozen=True)
class Board:
    """What is published, by model."""

    rows: dict[str, int]
    """Judgments that were used."""
    win_rates: dict[str, float]
    """Length-controlled, in percent."""
    coefficients: dict[str, Coefficients]


def read_board(leaderboard: Path, weights: Path) -> Board:
    """The published tables; both have a first column without a name, which is the model."""
    published, fitted = _table(leaderboard), _table(weights)
    return Board(
        {model: int(row["n_total"]) for model, row in published.items()},
        {model: float(row["length_controlled_winrate"]) for model, row in published.items()},
        {model: Coefficients(*map(float, list(row.values())[1:])) for model, row in fitted.items()},
    )


def _table(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as handle:
        return {row[""]: row for row in csv.DictReader(handle)}


def incomplete(board: Board, instructions: int) -> list[str]:
    """Models that have fewer rows than there are instructions."""
    return [model for model, rows in board.rows.items() if rows < instructions]


def published_by(board: Board, model: str, gamed: GamedBaselines) -> str:
    """What the published number took difficulties by: position, instruction, or it cannot be told."""
    if model not in board.coefficients:
        return "no coefficients"
    difficulties = np.array([gamed.difficulty[index] for index in sorted(gamed.difficulty)])
    # Where rows were left out of the judgments alone, all instructions are predicted.
    for name, used in (("position", difficulties[: board.rows[model]]), ("instruction", difficulties)):
        if abs(predict(board.coefficients[model], used).mean() - board.win_rates[model]) < EXACT:
            return name
    return "neither"


def read_compact(path: Path) -> dict[str, list[JudgedAnswer]]:
    """Judgments by model, in the order of their rows: model, index, preference (1 to 2), len_1 and len_2."""
    found: dict[str, list[JudgedAnswer]] = {}
    with path.open(newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            preference = (float(row["preference"]) or 1.5) - 1
            lengths = int(row["len_1"]), int(row["len_2"])
            found.setdefault(row["model"], []).append(JudgedAnswer(int(row["index"]), preference, *lengths))
    return found


def read_annotations(path: Path, questions: str) -> list[JudgedAnswer]:
    """Comparisons from a file of annotations in AlpacaEval's format (annotations.json).

    questions: the reference's file. Rows are matched by instruction, because positions differ if failed rows were
    omitted. A preference of 0 is a draw; a missing one, or one outside [1, 2], counts as failed.
    Raises DataError if an instruction is not in the file or occurs twice.
    """
    index = {row["instruction"]: number for number, row in enumerate(read_table(questions, ["instruction"]))}
    comparisons = []
    for number, row in enumerate(read_table(str(path), ["instruction", "output_1", "output_2"]), 1):
        if row["instruction"] not in index:
            raise DataError(f"{path}:{number}: instruction not in {questions}, or a duplicate")
        raw = row.get("preference")
        raw = 1.5 if raw == 0 else raw
        preference = raw - 1 if isinstance(raw, int | float) and 1 <= raw <= 2 else None
        position, problem = index.pop(row["instruction"]), None if preference is not None else "no preference"
        comparisons.append(JudgedAnswer(position, preference, len(row["output_1"]), len(row["output_2"]), problem))
    return comparisons


def read_results(folder: Path, questions: Path, models: Sequence[str]) -> dict[str, list[JudgedAnswer]]:
    """Judgments by model from the folders of AlpacaEval's repository, as far as they are there."""
    files = {model: folder / model / ANNOTATOR / "annotations.json" for model in models}
    return {model: read_annotations(file, str(questions)) for model, file in files.items() if file.is_file()}


def refitted(comparisons: Sequence[JudgedAnswer], gamed: GamedBaselines) -> tuple[float, float]:
    """Length-controlled win rates in percent, with difficulties by position and by instruction."""
    moved = [replace(row, index=position) for position, row in enumerate(comparisons)]

    def win_rate(rows: Sequence[JudgedAnswer]) -> float:
        # Lengths that fit in any case: the misalignment is intended.
        fitting = replace(gamed, reference_lengths={row.index: row.length_1 for row in rows})
        return float(win_rates(rows, fitting, rounds=2)["metrics"]["length_controlled_win_rate"]["value"])

    return win_rate(moved), win_rate(comparisons)


def table(board: Board, gamed: GamedBaselines, judged: dict[str, list[JudgedAnswer]]) -> list[list[str]]:
    """A row for each model with rows left out."""
    rows = []
    for model in incomplete(board, len(gamed.difficulty)):
        published, by = board.win_rates[model], published_by(board, model, gamed)
        cells = ["–"] * 3
        if model in judged:
            position, instruction = refitted(judged[model], gamed)
            cells = [f"{position:.2f}", f"{instruction:.2f}", f"{instruction - published:+.2f}"]
        rows.append([model, str(board.rows[model]), f"{published:.2f}", by, *cells])
    return rows


def main() -> None:
    """Print a Markdown table; exits with one line about a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where the defaults below are")
    parser.add_argument("--leaderboard", type=Path, help="leaderboard_subset.csv")
    parser.add_argument("--weights", type=Path, help="glm_weights_subset.csv: published coefficients")
    parser.add_argument("--gamed", type=Path, help="gamed_baselines_reconstructed.csv, or df_gamed.csv")
    parser.add_argument("--judgments", type=Path, help="judgments_compact.csv, if it is there")
    parser.add_argument("--results", type=Path, help="folder of AlpacaEval's results, in place of --judgments")
    parser.add_argument("--questions", type=Path, help="alpaca_eval_gpt4_baseline.json; for --results and df_gamed.csv")
    given = parser.parse_args()
    try:
        _print(given)
    except (DataError, OSError) as error:
        parser.error(f"{error}; name the folder that holds the tables, or each of them")


def _print(given: argparse.Namespace) -> None:
    folder: Path = given.folder
    questions = given.questions or folder / "alpaca_eval_gpt4_baseline.json"
    gamed = read_gamed_baselines(given.gamed or folder / "gamed_baselines_reconstructed.csv", str(questions))
    board = read_board(
        given.leaderboard or folder / "leaderboard_subset.csv", given.weights or folder / "glm_weights_subset.csv"
    )
    compact: Path = given.judgments or folder / "judgments_compact.csv"
    if given.results:
        judged = read_results(given.results, questions, incomplete(board, len(gamed.difficulty)))
    else:
        judged = read_compact(compact) if compact.is_file() else {}
    header = ["model", "rows", "published", "difficulty taken by", "fit by position", "by instruction", "off by"]
    for line in [header, ["---"] * len(header), *table(board, gamed, judged)]:
        print("| " + " | ".join(line) + " |")
    print(f"\n{len(board.rows)} models, {len(gamed.difficulty)} instructions")


if __name__ == "__main__":
    main()
