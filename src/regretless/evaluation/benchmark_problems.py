"""What the benchmarks of an evaluation ask, for a comparison with the training prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from regretless.core.settings import dump
from regretless.data.columns import Text, text_key
from regretless.data.contamination import Benchmarks
from regretless.data.prompts import load_prompts
from regretless.evaluation.chat.chat_results import next_prompts
from regretless.evaluation.conditions import SAMPLES
from regretless.evaluation.results import EvaluateConfig


def sources_of(config: EvaluateConfig) -> dict[str, Any]:
    """The settings that say which problems there are, as JSON. Tasks of lm-evaluation-harness are not among them."""
    return {
        **{label: dump(benchmark.source) for label, benchmark in config.benchmarks.items()},
        **{label: {"questions": chat.questions, "limit": chat.limit} for label, chat in config.chat.items()},
    }


def read_problems(config: EvaluateConfig) -> Benchmarks:
    """The problems of all benchmarks, from their sources.

    Raises DataError or ConfigError if one cannot be read.
    """
    problems = {
        label: {row.prompt_id: row.prompt for row in load_prompts(benchmark.source, f"evaluate.benchmarks.{label}.")}
        for label, benchmark in config.benchmarks.items()
    }
    for label, chat in config.chat.items():
        problems[label] = {row.prompt_id: row.prompt for rows in next_prompts(chat, []).values() for row in rows}
    return Benchmarks(problems)


def contamination(evaluate_dir: Path, config: EvaluateConfig, pairs: Sequence[Path]) -> list[str]:
    """What a reader of the results must know of problems that stand in the training prompts (`Benchmarks.notes`).

    The problems are those that models in the folder of an evaluation were asked; pairs: files of those trained on
    (parquet).
    """
    answers = {label: label for label in config.benchmarks} | {name: chat.answers for name, chat in config.chat.items()}
    problems: dict[str, dict[str, Text]] = {}
    for label, folder in answers.items():
        for file in evaluate_dir.glob(f"{SAMPLES}/*/{folder}/*/responses.parquet"):
            table = pq.read_table(file, columns=["prompt_id", "prompt"])
            problems.setdefault(label, {}).update(zip(*(column.to_pylist() for column in table.columns), strict=True))
    prompts = {
        text_key(prompt): prompt
        for path in pairs
        for prompt in pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
    }
    return Benchmarks(problems).notes(prompts.values())
