"""What a plan says of one unit of work: its counts, what they rest on, and its time."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from regretless.core.settings import Section
from regretless.planning.dry_run import PlannedUnit, State

CHARACTERS_PER_TOKEN = 4.0
"""Of a text whose tokenizer is not at hand."""
COUNTS = ("prompts", "requests", "responses", "tokens_in", "tokens_out", "pairs", "steps", "trained_tokens", "dollars")
"""Counts in the order in which they are shown; `files` and `bytes` follow them."""


class Assumed(Section):
    """What the user said, in place of what a plan would assume."""

    response_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a response."""
    paired: float | None = Field(default=None, ge=0, le=1)
    """Share of prompts with a correct and a wrong response."""
    reply_tokens: float | None = Field(default=None, gt=0)
    """Mean tokens of a judge's reply."""


@dataclass
class Estimate:
    """What a unit of work has made, or would make."""

    unit: PlannedUnit
    counts: dict[str, float] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    """Counts that rest on an assumption."""
    parts: tuple[int, int] | None = None
    """Finished parts and all parts, of an interrupted unit."""
    seconds: float | None = None
    """Predicted for what is left to do; None where nothing says it."""
    is_judge: bool = False
    """True if its requests go to a judge."""

    @property
    def left(self) -> float:
        """Share of the work that is left to do."""
        if self.unit.state is State.DONE:
            return 0.0
        return 1.0 if self.parts is None or not self.parts[1] else 1 - self.parts[0] / self.parts[1]

    def put(self, guessed: bool, /, **counts: float | None) -> None:
        """Add counts; those that are None are unknown."""
        for name, value in counts.items():
            if value is not None:
                self.counts[name] = value
                if guessed:
                    self.guessed.add(name)
