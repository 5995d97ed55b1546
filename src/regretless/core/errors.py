"""The errors a user can act on. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

import errno
import os
import re
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


class StorageError(RegretlessError):
    """A file or folder that cannot be read or written. What was there before is whole."""

    exit_code = 7


ADVICE = {
    errno.ENOSPC: "make room there; then the same command goes on from here",
    errno.EDQUOT: "make room there; then the same command goes on from here",
    errno.EFBIG: "a limit on the size of files is set (ulimit -f); raise it, then the same command goes on from here",
    errno.EROFS: "name a place that can be written to",
    errno.EACCES: "name a place that you may use, or change its permissions",
    errno.EPERM: "name a place that you may use, or change its permissions",
    errno.ENOTDIR: "a file stands where a folder is needed; name another place, or move the file away",
    errno.EEXIST: "something else stands where a folder is needed; name another place, or move it away",
    errno.EISDIR: "a folder stands where a file is needed; name another place, or move the folder away",
    errno.ENOTEMPTY: "another process works there; name another place, or wait for it",
    errno.ENOENT: "check the path, and whether a link in it leads nowhere",
    errno.ELOOP: "links in it lead in a circle; name the file itself",
    errno.ENAMETOOLONG: "take a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs: the machine has no free file handle",
    errno.EIO: "the disk reports a fault; check it, or name another place",
}
"""What to do about an error of the operating system, by its number."""
OS_ERROR = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
"""How libraries in Rust and C++ pass on the number of an error of the operating system."""
SAYINGS = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    "disk I/O error": errno.EIO,
    "PytorchStreamWriter failed writing": errno.ENOSPC,
    "] . unexpected pos ": errno.ENOSPC,  # torch.save, closing a file that it could not write
    " requested and ": errno.ENOSPC,  # numpy: "8 requested and 0 written"
}
"""How libraries put it that pass on no number."""


def storage_error(error: BaseException) -> StorageError | None:
    """The error of a file or folder that an exception stands for, or None when it stands for something else.

    Libraries raise their own exceptions where the operating system fails; those that carry its number or are known by
    their words count, and so does a name that is not UTF-8.
    """
    if isinstance(error, UnicodeEncodeError) and "surrogates not allowed" in error.reason:
        text = str(error.object)
        return StorageError(
            f"{text if len(text) < NAME_LENGTH else 'a text'}: not valid UTF-8; rename the file or folder"
        )
    if isinstance(error, OSError) and error.errno is not None:
        number, where = error.errno, error.filename or error.filename2
    else:
        text = str(error)
        found = OS_ERROR.search(text)
        numbers = [int(found[1] or found[2])] if found else [code for words, code in SAYINGS.items() if words in text]
        if not numbers:
            return None
        number, where = numbers[0], getattr(error, "filename", None)
    if number not in ADVICE:
        return None
    place = (
        "a file cannot be written: "
        if where is None
        else f"{os.fsdecode(where) if isinstance(where, bytes) else where}: "
    )
    return StorageError(f"{place}{os.strerror(number)}; {ADVICE[number]}")


NAME_LENGTH = 300


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
