"""Multi-step arithmetic word problems with worked solutions, and the faults that demonstrations can contain."""

from __future__ import annotations

import random
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from regretless.core.errors import ConfigError
from regretless.core.settings import Section

FIRST_NAMES = ("Tom", "Eva", "Max", "Lea")
FRIENDS = ("Ann", "Ben", "Ida", "Sam")
ITEMS = ("apples", "books", "coins", "stamps", "shells", "cards")
LARGEST = 99
"""Largest intermediate value of a problem."""
MOST_DRAWS = 1000
"""Consecutive draws of problems in use, after which none are assumed to be left."""


class Operation(StrEnum):
    """The event of a step."""

    BUYS = "buys"
    GIVES = "gives"
    DOUBLES = "doubles"
    HALVES = "halves"


@dataclass(frozen=True)
class Step:
    """One event; `amount` is the number bought or given away, and 2 for the other operations."""

    operation: Operation
    amount: int

    def apply(self, value: int) -> int:
        """Value after the step. An odd value, possible only after a planted fault, is rounded down when halved."""
        match self.operation:
            case Operation.BUYS:
                return value + self.amount
            case Operation.GIVES:
                return value - self.amount
            case Operation.DOUBLES:
                return value * 2
            case Operation.HALVES:
                return value // 2


DRAWN = (Operation.BUYS, Operation.BUYS, Operation.GIVES, Operation.DOUBLES, Operation.HALVES)
"""Operations that a step is drawn from. Buying is listed twice, so that two in five problems have no "gives"."""
SYMBOLS = {Operation.BUYS: "+", Operation.GIVES: "-", Operation.DOUBLES: "*", Operation.HALVES: "/"}

Arithmetic = tuple[int, tuple[Step, ...]]
"""Start and steps: they identify a problem, whatever the names and things in it."""


@dataclass(frozen=True)
class Problem:
    """A story about a person's things."""

    name: str
    friend: str
    item: str
    start: int
    steps: tuple[Step, ...]

    @property
    def arithmetic(self) -> Arithmetic:
        """The identity of the problem without its names: train and test have none in common."""
        return self.start, self.steps

    @property
    def answer(self) -> int:
        """The exact answer."""
        value = self.start
        for step in self.steps:
            value = step.apply(value)
        return value

    @property
    def prompt(self) -> str:
        """The story and its question, with a newline at the end."""
        events = "".join(f"{self.name} {self._event(step)}. " for step in self.steps)
        return f"{self.name} has {self.start} {self.item}. {events}How many?\n"

    def _event(self, step: Step) -> str:
        match step.operation:
            case Operation.BUYS:
                return f"buys {step.amount}"
            case Operation.GIVES:
                return f"gives {step.amount} to {self.friend}"
            case Operation.DOUBLES:
                return "doubles"
            case Operation.HALVES:
                return "loses half"


class Faults(Section):
    """Fault rates of demonstrations: they produce bad habits that hide a skill, which preferences can bring out."""

    gives_as_plus: float = Field(default=0.0, ge=0, le=1)
    """Probability that a "gives" is computed as an addition; drawn separately for each one."""
    forget_third: float = Field(default=0.0, ge=0, le=1)
    """Probability that the third step is left out, in problems that have one."""
    off_by_one: float = Field(default=0.0, ge=0, le=1)
    """Probability that a result is one too high or one too low; drawn separately for each line."""
    off_at_end: float = Field(default=0.0, ge=0, le=1)
    """Probability that the last result is one too high or one too low: a good start with a wrong end."""
    no_work: float = Field(default=0.0, ge=0, le=1)
    """Probability that a solution has no line of work, only the answer."""


def solve(problem: Problem, faults: Faults, rng: random.Random) -> str:
    """Worked solution, one line per step and then `\\boxed{}`, with random faults at their probabilities.

    Without faults it is exact. A faulty value is carried on to the next step.
    """
    # All random numbers are drawn, used or not: with the same seed, faults stay at the same positions at other rates.
    forgets = rng.random() < faults.forget_third
    value, lines = problem.start, []
    for number, step in enumerate(problem.steps, 1):
        misreads, slips, upwards = (rng.random() for _ in range(3))
        if number == 3 and forgets:
            continue
        if step.operation is Operation.GIVES and misreads < faults.gives_as_plus:
            step = Step(Operation.BUYS, step.amount)
        result = step.apply(value)
        if slips < faults.off_by_one:
            result += 1 if upwards < 0.5 or result == 0 else -1
        # After a fault, more may be given away than there is; the result is at least zero.
        result = max(result, 0)
        lines.append(f"{value}{SYMBOLS[step.operation]}{step.amount}={result}")
        value = result
    # Only drawn where they can occur: worlds without these faults keep their demonstrations.
    if faults.off_at_end and rng.random() < faults.off_at_end:
        value += 1 if rng.random() < 0.5 or value == 0 else -1
        lines[-1] = f"{lines[-1].partition('=')[0]}={value}"
    if faults.no_work and rng.random() < faults.no_work:
        lines = []
    return "\n".join([*lines, f"\\boxed{{{value}}}"])


@dataclass(frozen=True)
class Generator:
    """Draws problems of `steps` (fewest, most) events with values from 1 to 99."""

    steps: tuple[int, int]
    largest_amount: int
    """Most things bought or given away at once."""

    def draw(self, rng: random.Random, taken: Set[Arithmetic] = frozenset()) -> Problem:
        """A random problem whose arithmetic is not in `taken`.

        Number of steps and start are uniform; so are the operation and amount of each step, over the possible ones.
        Raises ConfigError if no such problem is drawn.
        """
        for _ in range(MOST_DRAWS):
            start = rng.randint(2, LARGEST)
            steps = tuple(self._steps(start, rng))
            if (start, steps) not in taken:
                return Problem(rng.choice(FIRST_NAMES), rng.choice(FRIENDS), rng.choice(ITEMS), start, steps)
        raise ConfigError(
            f"world: no problem of {self.steps[0]} to {self.steps[1]} steps is left besides the {len(taken)} in use; "
            "ask for fewer test problems and prompts, or allow more steps or larger amounts"
        )

    def distinct(self, count: int, rng: random.Random, taken: Set[Arithmetic] = frozenset()) -> list[Problem]:
        """`count` problems that differ from each other and from `taken` in their arithmetic.

        Raises ConfigError if there seem to be fewer.
        """
        problems, seen = [], set(taken)
        for _ in range(count):
            problems.append(self.draw(rng, seen))
            seen.add(problems[-1].arithmetic)
        return problems

    def _steps(self, value: int, rng: random.Random) -> Iterator[Step]:
        for _ in range(rng.randint(*self.steps)):
            step = self._step(value, rng)
            yield step
            value = step.apply(value)

    def _step(self, value: int, rng: random.Random) -> Step:
        limits = {
            Operation.BUYS: min(LARGEST - value, self.largest_amount),
            Operation.GIVES: min(value - 1, self.largest_amount),
            Operation.DOUBLES: 2 * (2 * value <= LARGEST),
            Operation.HALVES: 2 * (value % 2 == 0),
        }
        operation = rng.choice([name for name in DRAWN if limits[name] > 0])
        counted = operation in (Operation.BUYS, Operation.GIVES)
        return Step(operation, rng.randint(1, limits[operation]) if counted else 2)
