"""Processes that a launcher (torchrun, accelerate) started together: how many, and whether this is the first."""

from __future__ import annotations

import os


def processes() -> int:
    """Number of processes that a launcher started together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """True on rank 0, the process that writes files."""
    return int(os.environ.get("RANK", "0")) == 0
