"""Files that are written whole or not at all, under another name and moved; JSON and JSONL; hashes of content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from regretless.core.errors import DataError
from regretless.core.text_cleaning import MAX_DEPTH, MOST_DIGITS, clean_text, json_value, text_of

LEFTOVER = re.compile(r"\..+\.[0-9a-f]{12}\.regretless")
"""What an interrupted process was about to delete, or to move: no other program has such names (`leftover`)."""
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe; write it to a file first", stat.S_IFSOCK: "a socket"}
"""What else than a file may be at a path, by its type; all others are devices."""


def leftover(path: Path) -> Path:
    """A name beside `path` that nothing has, for what is about to be moved there, or deleted."""
    # Not the process id: workers on two machines may have the same one, and write the same file.
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.regretless")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Temporary sibling of `path` to write to; moved onto `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(path) as temporary:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)


@contextlib.contextmanager
def _sibling(path: Path) -> Iterator[Path]:
    """Name of a temporary file beside `path`, gone when the block ends; errors name `path` itself."""
    temporary = leftover(path)
    try:
        yield temporary
    except OSError as error:
        # Errors of open files contain no name, and the temporary name is meaningless to users.
        if error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with contextlib.suppress(NotADirectoryError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise, before any work is done, the OSError that writing `path` would raise; an existing file stays intact."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(path) as probe:
        probe.touch()


def write_text(path: Path, text: str) -> None:
    """Write text atomically (UTF-8)."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises ValueError on NaN or infinity: files must contain null instead of NaN."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    if clean_text(text) != text:
        # Names of files that are not UTF-8: written as escapes, they can be read back unchanged.
        text = json.dumps(value, indent=2, allow_nan=False, default=str)
    write_text(path, text + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(json_line(row) for row in rows)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a JSONL file for any row: values without a JSON form are written as text (`json_value`)."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=text_of)
    except (ValueError, TypeError, RecursionError):
        line = json.dumps(json_value(row), ensure_ascii=False, allow_nan=False)
    return clean_text(line) + "\n"


def what_is_not_a_file(path: Path) -> str | None:
    """What is at a path instead of a file, for messages; None if there is a file, or nothing.

    A pipe would block its reader, and a device may have no end.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else KINDS.get(stat.S_IFMT(mode), "a device")


def read_text(path: Path, most: int | None = None) -> str:
    """Text of a file (UTF-8) of at most so many characters.

    Raises OSError if there is no file, or something else than one, and ValueError if it is longer, or not UTF-8.
    """
    if kind := what_is_not_a_file(path):
        raise OSError(errno.EINVAL, f"expected a file, found {kind}", str(path))
    with path.open(encoding="utf-8") as handle:
        text = handle.read(-1 if most is None else most + 1)
    if most is not None and len(text) > most:
        raise ValueError(f"more than {most} characters")
    return text


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text, in which a duplicate key is an error: Python's own reader uses the last one.

    Raises ValueError.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        if "digits" in str(error):
            raise ValueError(f"an integer of more than {MOST_DIGITS} digits") from error
        raise


def _object(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(entries)
    if len(values) < len(entries):
        twice = next(name for name, count in Counter(name for name, _ in entries).items() if count > 1)
        raise ValueError(f"{twice!r:.60} occurs twice in an object that begins with {entries[0]!r:.60}")
    return values


def read_json(path: Path) -> Any:
    """Value of a JSON file. Raises DataError that names the file if it is missing or broken."""
    try:
        return parse_json(read_text(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error


def fingerprint(value: Any) -> str:
    """Hash of a JSON-like value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def path_fingerprint(path: Path) -> str:
    """Hash of a file's bytes, or of all files below a folder (names and bytes).

    Raises DataError if the path does not exist.
    """
    if not path.exists():
        raise DataError(f"{path}: not found")
    files = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(os.fsencode(file.relative_to(path).as_posix()))
        with file.open("rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
    return str(digest.hexdigest())
