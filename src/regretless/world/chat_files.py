"""Problems of the embedded world in the file formats of the chat benchmarks, so that nothing is downloaded."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regretless.core.files import atomic_path, write_jsonl
from regretless.world.problems import Faults, Problem, solve

CATEGORIES = ("writing", "roleplay", "extraction", "math", "coding", "reasoning", "stem", "humanities")
"""MT-Bench's."""
WRONG = Faults(off_by_one=1.0)


def write_chat_benchmarks(folder: Path, problems: Sequence[Problem], rng: random.Random) -> None:
    """Write questions, references and baselines into a folder: an equal number of problems goes to each benchmark.

    alpaca_eval.jsonl (`instruction`, `output`), gamed_baselines.csv; arena_hard.jsonl (`uid`, `prompt`),
    arena_hard_baseline.jsonl; mt_bench.jsonl (`question_id`, `category`, `turns`), mt_bench_references.jsonl.
    Baselines are wrong, references are right. The gamed baselines are random numbers without meaning.
    """
    count = len(problems) // 4
    alpaca, arena, first, second = (problems[start * count : (start + 1) * count] for start in range(4))
    rows = [{"instruction": problem.prompt, "output": solve(problem, WRONG, rng)} for problem in alpaca]
    write_jsonl(folder / "alpaca_eval.jsonl", rows)
    _write_gamed_baselines(folder / "gamed_baselines.csv", [len(row["output"]) for row in rows], rng)
    questions = [{"uid": f"question-{number}", "prompt": problem.prompt} for number, problem in enumerate(arena)]
    write_jsonl(folder / "arena_hard.jsonl", questions)
    baseline = [_answered(row, solve(problem, WRONG, rng)) for row, problem in zip(questions, arena, strict=True)]
    write_jsonl(folder / "arena_hard_baseline.jsonl", baseline)
    turns = list(zip(first, second, strict=True))
    write_jsonl(
        folder / "mt_bench.jsonl",
        (
            {
                "question_id": number,
                "category": CATEGORIES[number % len(CATEGORIES)],
                "turns": [problem.prompt for problem in pair],
            }
            for number, pair in enumerate(turns)
        ),
    )
    write_jsonl(
        folder / "mt_bench_references.jsonl",
        (
            {"question_id": number, "choices": [{"turns": [solve(problem, Faults(), rng) for problem in pair]}]}
            for number, pair in enumerate(turns)
        ),
    )


def _answered(question: dict[str, str], answer: str) -> dict[str, Any]:
    """A model's answer in Arena-Hard's format."""
    messages = [{"role": "user", "content": question["prompt"]}, {"role": "assistant", "content": {"answer": answer}}]
    return {"uid": question["uid"], "messages": messages}


def _write_gamed_baselines(path: Path, reference_lengths: Sequence[int], rng: random.Random) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(["index", "len_1", "std_delta_len", "instruction_difficulty", "preference"])
        difficulty = [rng.gauss(0, 1) for _ in reference_lengths]
        for sign in (1, -1):  # one prompted to be short, one prompted to be long
            for index, length in enumerate(reference_lengths):
                writer.writerow([index, length, sign * rng.random(), difficulty[index], rng.random()])
