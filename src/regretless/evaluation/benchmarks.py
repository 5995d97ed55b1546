"""The mathematics benchmarks by name: where they are on the hub, and which columns hold problem and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regretless.core.errors import problems_of
from regretless.core.plugins import Registry
from regretless.data.prompts import PromptSource


def _problem(name: str, part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return f"expected settings of PromptSource, got {part!r}"
    # Settings that it leaves open are the recipe's.
    problems = problems_of(lambda: PromptSource.parse({"dataset": "-", **part}, name))
    return f"expected settings of PromptSource: {'; '.join(problems)}" if problems else None


BENCHMARKS: Registry[Mapping[str, Any]] = Registry(
    "benchmarks",
    {
        "gsm8k": {
            "dataset": "openai/gsm8k",
            "subset": "main",
            "split": "test",
            "prompt_column": "question",
            "answer_column": "answer",
        },
        "math": {
            "dataset": "DigitalLearningGmbH/MATH-lighteval",
            "split": "test",
            "prompt_column": "problem",
            "answer_column": "solution",
        },
        "math500": {
            "dataset": "HuggingFaceH4/MATH-500",
            "split": "test",
            "prompt_column": "problem",
            "answer_column": "answer",
        },
        "amc23": {
            "dataset": "math-ai/amc23",
            "split": "test",
            "prompt_column": "question",
            "answer_column": "answer",
        },
        "minerva_math": {
            "dataset": "svc-huggingface/minerva-math",
            "split": "test",
            "prompt_column": "problem",
            "answer_column": "solution",
        },
    },
    _problem,
)
"""Settings of `PromptSource`, which a recipe's own settings override. The columns are also those of the original
files, so that `dataset: <local copy>` is all that a machine without the hub needs. The gold answer may be a worked
solution: the verifier reads what follows `####` or the last `\\boxed{}`."""
