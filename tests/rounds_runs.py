"""Rounds in the embedded world's easiest problems, for tests. Not a test by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regretless.runs.recipe import Recipe, parse_recipe


def rounds_recipe(folder: Path, made: Path, rounds: dict[str, Any], **others: Any) -> Recipe:
    """A recipe that runs in `folder` with world and model of a finished run, `made`. others: of its training."""
    training = {"objective": "dpo", "pairs_per_step": 4, "learning_rate": 0.01, "max_length": 64, "logging_steps": 1}
    values = {
        "name": "rounds",
        "output_dir": str(folder),
        "threads": 1,
        "model": {"name_or_path": str(made / "pretrain/base")},
        "sample": {
            "prompts": {"dataset": str(made / "world/prompts.jsonl"), "answer_column": "answer"},
            **{"n": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
            **{"max_new_tokens": 16, "batch_size": 512},
        },
        "verify": {},
        "pair": {},
        "train": {**training, "save_strategy": "no", **others},
        "rounds": {"measured": 16, **rounds},
    }
    return parse_recipe(values, "test")
