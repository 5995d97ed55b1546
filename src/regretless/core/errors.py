"""Errors that the user can act on. Any other exception is a bug and keeps its traceback."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class RegretlessError(Exception):
    """Base of all errors that the command line prints as one message with an exit code."""

    exit_code = 1


CODE_WORDS = 3
"""Most words of a problem's code."""


class Problem(str):
    """A problem of settings, as a line of a message. Tests and programs read its key and code, people its text."""

    __slots__ = ()

    @property
    def key(self) -> str:
        """The setting that the problem is about, such as `train.lora.r`; empty if the line names none."""
        key, colon, _ = self.partition(": ")
        return key if colon else ""

    @property
    def code(self) -> str:
        """What is wrong, without values: the first words after the key, such as `no-such-file`."""
        text = re.sub(r"input should be (?=\w)", "", self.removeprefix(f"{self.key}: "))
        words = re.search(r"[A-Za-z]\w*(?: [A-Za-z]\w*)*", text)
        return "-".join(words[0].lower().split()[:CODE_WORDS]) if words else ""


class ConfigError(RegretlessError):
    """Settings that cannot work. Raised once, with every problem."""

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = [Problem(problem) for problem in problems or [message]]
        """The problems in the message, one by one."""


class DataError(RegretlessError):
    """Input rows that cannot be used, or none left after rejecting bad ones."""

    exit_code = 3


class NonFiniteLossError(RegretlessError):
    """Training produced NaN or infinity; raised before the optimizer step, naming the rows."""

    exit_code = 4


class BudgetError(RegretlessError):
    """The budget for a server is spent. Replies so far are cached; with a larger budget, the same command resumes."""

    exit_code = 5


class ServerError(RegretlessError):
    """A server that cannot be used: the key is rejected, the model unknown, or there is no reply."""

    exit_code = 6


class StorageError(RegretlessError):
    """A file or folder that cannot be read or written. Existing files stay intact."""

    exit_code = 7


ADVICE = {
    errno.ENOSPC: "free space there; then the same command resumes",
    errno.EDQUOT: "free space there; then the same command resumes",
    errno.EFBIG: "the size of files is limited (ulimit -f); raise the limit, then the same command resumes",
    errno.EROFS: "choose a location that can be written to",
    errno.EACCES: "choose a location that you may use, or change its permissions",
    errno.EPERM: "choose a location that you may use, or change its permissions",
    errno.ENOTDIR: "expected a folder, and a file exists there; choose another location, or move the file away",
    errno.EEXIST: "expected a folder, and a file, or a link to something that does not exist, is there; choose another "
    "location, or move it away",
    errno.EISDIR: "expected a file, and a folder exists there; choose another location, or move the folder away",
    errno.ENOTEMPTY: "another process uses it; choose another location, or wait for it",
    errno.ENOENT: "check the path, and any broken links in it",
    errno.ELOOP: "its links form a circle; name the file itself",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close other programs: the machine has no free file handle",
    errno.EIO: "the disk reports a fault; check it, or choose another location",
}
"""What to do about an operating system error, by its number."""
OS_ERROR = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
"""How libraries in Rust and C++ include the number of an operating system error in their messages."""
SAYINGS = {
    "database or disk is full": errno.ENOSPC,
    "attempt to write a readonly database": errno.EROFS,
    "unable to open database file": errno.EACCES,
    "disk I/O error": errno.EIO,
    "PytorchStreamWriter failed writing": errno.ENOSPC,
    "] . unexpected pos ": errno.ENOSPC,  # torch.save, closing a file that it could not write
    " requested and ": errno.ENOSPC,  # numpy: "8 requested and 0 written"
}
"""Messages of libraries that include no number."""


def storage_error(error: BaseException) -> StorageError | None:
    """The StorageError for an exception about a file or folder, or None for any other exception.

    Libraries raise their own exceptions when the operating system fails; exceptions with its error number or a known
    message count, and so does a name, or a text, that is not UTF-8.
    """
    if isinstance(error, UnicodeEncodeError) and "surrogates not allowed" in error.reason:
        text = str(error.object)
        shown = text if len(text) < NAME_LENGTH else "a text"
        if not _may_be_a_name(text):
            return StorageError(f"{shown}: half of a character, which no file can store; correct what made this text")
        return StorageError(f"{shown}: not valid UTF-8; rename the file or folder")
    if isinstance(error, OSError) and error.errno is not None:
        number, where = error.errno, error.filename or error.filename2
    else:
        text = str(error)
        match = OS_ERROR.search(text)
        numbers = [int(match[1] or match[2])] if match else [code for words, code in SAYINGS.items() if words in text]
        if not numbers:
            return None
        number, where = numbers[0], getattr(error, "filename", None)
    if number not in ADVICE:
        return None
    subject = (
        "a file cannot be written: "
        if where is None
        else f"{os.fsdecode(where) if isinstance(where, bytes) else where}: "
    )
    return StorageError(f"{subject}{os.strerror(number)}; {ADVICE[number]}")


def _may_be_a_name(text: str) -> bool:
    """False if a text that is not valid UTF-8 cannot be the name of a file: those have placeholders for bytes only."""
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


NAME_LENGTH = 300


def error_line(error: BaseException) -> str:
    """An exception of code that may raise anything, in one line: its class, and the beginning of its message."""
    message = next(iter(str(error).strip().splitlines()), "")
    shown = message if len(message) <= NAME_LENGTH else message[: NAME_LENGTH - 1] + "…"
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def error_place(error: BaseException) -> str:
    """`error_line` of a caught exception, and the line of code that raised it, for code that the user may correct."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error_line(error)} ({Path(frame.filename).name}, line {frame.lineno})"


def reject(where: str, problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists all problems; do nothing if there are none."""
    if problems:
        raise ConfigError("\n  - ".join([f"{where}: {len(problems)} problem(s)", *problems]), problems)


def problems_of(*checks: Callable[[], Any]) -> list[str]:
    """The problems of several checks that raise ConfigError, all together."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    return problems


def lookup(kind: str, table: Mapping[str, T], name: str) -> T:
    """Entry of a table by name. Raises ConfigError that lists the valid names."""
    if name not in table:
        raise ConfigError(f"{kind}: expected one of {', '.join(sorted(table))}; got {name!r}")
    return table[name]
