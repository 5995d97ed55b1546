"""Files that survive a kill, written under another name and moved; stage folders that record whether they are done."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from regretless.core.errors import DataError
from regretless.core.plugins import plugin_versions
from regretless.core.text_gate import clean_text

MANIFEST = "manifest.json"
PENDING = "pending.json"
VERSIONED = ("regretless", "torch", "transformers", "peft", "accelerate", "datasets", "math-verify", "numpy")


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def read_json(path: Path) -> Any:
    """Value of a JSON file. Raises DataError that names the file if it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
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


def versions() -> dict[str, str]:
    """Versions of this package, of the packages that its results depend on (including plug-ins), and of Python."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | plugin_versions()


@dataclass(frozen=True)
class StageFolder:
    """The folder of one stage: finished if its manifest has the key of the current request.

    An unfinished folder with the same key remains, so that an interrupted stage can resume; a folder with another key
    is emptied first.
    """

    path: Path
    key: str

    @staticmethod
    def key_of(stage: str, settings: Any, inputs: Mapping[str, Path]) -> str:
        """Key of a stage: its settings, its inputs' content and the versions that its results depend on."""
        content = {name: path_fingerprint(path) for name, path in sorted(inputs.items())}
        return fingerprint({"stage": stage, "settings": settings, "inputs": content, "versions": versions()})

    def is_done(self) -> bool:
        """True if the stage finished with this key."""
        return self._key_in(MANIFEST) == self.key

    def manifest(self) -> dict[str, Any]:
        """Manifest of the finished stage."""
        return dict(read_json(self.path / MANIFEST))

    def begin(self) -> bool:
        """Prepare the folder; True if it contains unfinished work with the same key."""
        resumes = self._key_in(PENDING) == self.key and not (self.path / MANIFEST).exists()
        if not resumes:
            if self.path.exists():
                # Moved first, so that an interrupted deletion does not leave half a folder that looks complete.
                doomed = self.path.with_name(f".{self.path.name}.{os.getpid()}.old")
                self.path.rename(doomed)
                shutil.rmtree(doomed)
            # It may exist again: `give_up` in another process.
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / PENDING, {"key": self.key})
        return resumes

    def give_up(self) -> None:
        """Mark the folder as unfinished, whatever it contains, so that the next run of its stage starts over."""
        write_json(self.path / PENDING, {"key": self.key})
        (self.path / MANIFEST).unlink(missing_ok=True)

    def finish(self, stage: str, settings: Any, summary: Mapping[str, Any], seconds: float) -> None:
        """Write the manifest: from now on the stage is finished, and no trace of unfinished work is left."""
        write_json(
            self.path / PENDING,
            {
                "stage": stage,
                "key": self.key,
                "settings": settings,
                "summary": dict(summary),
                "seconds": round(seconds, 3),
                "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "versions": versions(),
            },
        )
        (self.path / PENDING).replace(self.path / MANIFEST)  # atomic: an interruption leaves one or the other

    def _key_in(self, name: str) -> str | None:
        file = self.path / name
        return str(read_json(file).get("key")) if file.is_file() else None
