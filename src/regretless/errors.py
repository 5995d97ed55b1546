"""The errors a user can act on. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class RegretlessError(Exception):
    """Base of all errors that the command line prints as one message and turns into its exit code."""

    exit_code = 1


class ConfigError(RegretlessError):
    """Settings that cannot work. Raised once, with every problem found."""

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems) or [message]
        """What the message lists, one by one."""


class DataError(RegretlessError):
    """Input rows that cannot be used, or none left after refusing bad ones."""

    exit_code = 3


class NonFiniteLossError(RegretlessError):
    """Training met NaN or infinity; raised before the optimizer step, naming the rows."""

    exit_code = 4


class BudgetError(RegretlessError):
    """The budget for a server is used up. What was answered is kept; a larger budget goes on from there."""

    exit_code = 5


class ServerError(RegretlessError):
    """A server that cannot be used: the key is refused, the model unknown, or nothing comes back."""

    exit_code = 6


def reject(where: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists all problems; do nothing when there are none."""
    if problems:
        raise ConfigError("\n  - ".join([f"{where}: {len(problems)} problem(s)", *problems]), problems)


def problems_of(*checks: Callable[[], Any]) -> list[str]:
    """The problems of several checks that raise ConfigError, all together."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found += error.problems
    return found


def lookup(kind: str, table: Mapping[str, T], name: str) -> T:
    """Entry of a table by name. Raises ConfigError that lists the valid names."""
    if name not in table:
        raise ConfigError(f"{kind}: expected one of {', '.join(sorted(table))}; got {name!r}")
    return table[name]
