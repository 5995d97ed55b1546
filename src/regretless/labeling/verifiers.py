"""The table of verifiers. To add one, write a file with a `check` function and add a line here, or use a plug-in."""

from __future__ import annotations

from regretless.core.plugins import Registry
from regretless.labeling import grading
from regretless.labeling.base import Verifier

VERIFIERS: Registry[Verifier] = Registry(
    "verifiers",
    {
        "math": Verifier(check=grading.grade, quick=grading.quick_grade, gold_problem=grading.gold_problem),
        "math_any": Verifier(check=grading.grade_any, quick=grading.quick_grade_any, gold_problem=grading.gold_problem),
    },
    lambda _, part: None if isinstance(part, Verifier) else f"expected a Verifier, got {part!r}",
)
"""Allowed values of `verify.verifier`."""
