"""How the benchmarks print the measurements of several repeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and the least and the greatest of several values."""
    if not values:
        return "–"
    middle = f"{statistics.median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}}–{max(values):{form}})"
