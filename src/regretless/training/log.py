"""The log that training writes while it runs, one JSON object per line, and its reader."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regretless.core.files import write_text

LOG_FILE = "training.log"
"""File name of the log, in training's output folder."""
SPEED_LINES = 10
"""Number of latest log lines used to compute the speed."""


@dataclass(frozen=True)
class TrainingLog:
    """The log of a training so far."""

    start: Mapping[str, Any]
    """Start time, process, method, first step and number of steps."""
    lines: tuple[Mapping[str, Any], ...]
    """The training's log lines, with `step`, and `time` (seconds since 1970) for those of this process."""
    end: Mapping[str, Any] | None
    """Set when training has ended; `failed` has the reason if it failed."""

    @property
    def step(self) -> int:
        """The last step with an entry."""
        last = self.end or (self.lines[-1] if self.lines else self.start)
        return int(last["step"])

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return int(self.start["steps"])

    @property
    def state(self) -> Literal["running", "ended", "failed", "lost"]:
        """`lost`: its process, on this machine, is gone without an entry. On another machine it counts as running."""
        if self.end is not None:
            return "failed" if "failed" in self.end else "ended"
        return "running" if is_alive_there(self.start["host"], int(self.start["process"])) else "lost"

    def seconds_left(self) -> float | None:
        """Time left at the speed of the latest log lines; None before the first one."""
        timed = [line for line in (self.start, *self.lines) if "time" in line][-SPEED_LINES:]
        steps, seconds = timed[-1]["step"] - timed[0]["step"], timed[-1]["time"] - timed[0]["time"]
        return (self.steps - self.step) * seconds / steps if steps else None


def begin(folder: Path, objective: str, step: int, steps: int, history: Iterable[Mapping[str, Any]]) -> None:
    """Start the log of a training that starts at `step`, with the entries up to there."""
    where = {"process": os.getpid(), "host": platform.node(), "time": time.time()}
    first = {"event": "start", "objective": objective, "step": step, "steps": steps, **where}
    past = ({"event": "log", **line} for line in history if "loss" in line and line["step"] <= step)
    write_text(folder / LOG_FILE, "".join(json.dumps(line) + "\n" for line in (first, *past)))


def add(folder: Path, event: Literal["log", "end"], values: Mapping[str, Any]) -> None:
    """Append a line. An interruption may leave the last one incomplete: the reader then ignores it."""
    line = json.dumps({"event": event, "time": time.time(), **values}, default=float)
    with (folder / LOG_FILE).open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")


def read(file: Path) -> TrainingLog | None:
    """The log in a file; None if there is none."""
    if not file.is_file():
        return None
    entries = [line for text in file.read_bytes().splitlines() if (line := _line(text)) is not None]
    start = next((line for line in entries if line["event"] == "start"), None)
    if start is None:
        return None
    lines = tuple(line for line in entries if line["event"] == "log")
    return TrainingLog(start, lines, next((line for line in entries if line["event"] == "end"), None))


LARGEST_NUMBER = 1e12
"""Upper bound on a step, process id or time."""
NUMBERS = {"start": ("step", "steps", "process", "time"), "log": ("step",), "end": ("step",)}
"""Numeric fields in the lines of each event."""


def _line(text: bytes) -> dict[str, Any] | None:
    """A line of the log, or None if it is incomplete."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    numbers = NUMBERS.get(str(line.get("event"))) if isinstance(line, dict) else None
    if numbers is None or not all(_is_number(line.get(name)) for name in numbers):
        return None
    return line if line["event"] != "start" or isinstance(line.get("host"), str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def is_alive_there(host: str, process: int) -> bool:
    """True if a process is alive; one of another machine counts as alive."""
    return host != platform.node() or is_alive(process)


def is_alive(process: int) -> bool:
    """True if a process of this machine is alive."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
