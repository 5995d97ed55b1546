"""Processes that a launcher (torchrun, accelerate) started together: how many, and whether this is the first."""

from __future__ import annotations

import os

from regretless.core.errors import ConfigError, RegretlessError

COUNT, RANK, LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"
"""Environment variables that launchers set, all three: torchrun, accelerate and Ray Train."""
LOST = ("Connection reset by peer", "Connection closed by peer", "remote process exited")
"""What Gloo and NCCL say in a process after another one has ended."""


def processes() -> int:
    """Number of processes that a launcher started together; 1 without a launcher.

    Raises ConfigError if the environment names several and does not say which this one is: it would wait for others.
    """
    if os.environ.get(COUNT, "1") == "1":
        return 1
    values = {name: os.environ.get(name) for name in (COUNT, RANK, LOCAL_RANK)}
    if not all(value is not None and value.isdecimal() for value in values.values()):
        texts = ", ".join(f"{name} {'unset' if value is None else repr(value)}" for name, value in values.items())
        raise ConfigError(
            f"environment: expected whole numbers in {COUNT}, {RANK} and {LOCAL_RANK}, as launchers set them together, "
            f"got {texts}; start the processes with torchrun or accelerate launch, or, for a single one, unset {COUNT}"
        )
    return int(os.environ[COUNT])


def is_first_process() -> bool:
    """True on rank 0, the process that writes files, and where the environment names no rank."""
    rank = os.environ.get(RANK, "")
    return not rank.isdecimal() or int(rank) == 0


def lost_process_error(error: BaseException) -> RegretlessError | None:
    """The error to report for one that says only that another process of the launcher's has ended; None for others."""
    if processes() == 1 or not isinstance(error, RuntimeError) or not any(words in str(error) for words in LOST):
        return None
    return RegretlessError(
        f"process {os.environ[RANK]}: another of the {processes()} processes has ended, killed or with an error of its "
        "own; the same command resumes from the last checkpoint"
    )
