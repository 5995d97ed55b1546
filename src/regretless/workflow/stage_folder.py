"""The folder of one stage: whether it is done, and whether its unfinished work is of the same question."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from regretless.core.errors import ConfigError
from regretless.core.files import LEFTOVER, fingerprint, leftover, write_json
from regretless.core.terminal import print_note
from regretless.core.versions import versions, versions_for

MANIFEST = "manifest.json"
PENDING = "pending.json"
CACHE = ".cache"
"""Suffix of the folder beside a unit's folder, for files from which the unit or its next run profits."""
EARLIER = "earlier"
REPLACED = "replaced"
"""Folder in a unit's cache with the finished result that work with other settings, or inputs, is about to replace."""
MOST_EARLIER = 4
"""Earlier results that are kept of one unit: a fifth removes the oldest."""
UNUSED = "unused"
"""Folder in a run folder for what it does not use."""
KEY = re.compile(r"[0-9a-f]{32}|none")
OF_A_MANIFEST = {"stage", "key", "settings", "summary", "seconds", "finished", "versions"}
OF_A_MARK = {"key", "files"}
OF_RESULTS = {".parquet", ".jsonl", ".json", ".safetensors", ".html"}
"""Suffixes of files that are a result. Others, and checkpoints, may be deleted to save space."""


def read_mark(file: Path) -> dict[str, Any] | None:
    """Content of a manifest, or of a mark of unfinished work, that this package has written; None for any other file.

    Many programs have a manifest.json, so a name says nothing. Damaged ones count as others.
    """
    try:
        value = json.loads(file.read_bytes()) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not KEY.fullmatch(str(value.get("key"))):
        return None
    is_ours = value.keys() >= OF_A_MANIFEST or (file.name == PENDING and value.keys() <= OF_A_MARK)
    return value if is_ours and all(map(_is_inside, value.get("files", ()))) else None


def _is_inside(name: Any) -> bool:
    return isinstance(name, str) and ".." not in (path := PurePosixPath(name)).parts and not path.is_absolute()


def mark_of(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or its mark of unfinished work; None for a folder that is not one of this package."""
    return read_mark(folder / MANIFEST) or read_mark(folder / PENDING)


def check_ours(folder: Path) -> None:
    """Raise ConfigError unless a unit may use this folder: it does not exist, is empty, or is one of this package."""
    if not folder.is_symlink() and (not folder.exists() or mark_of(folder) is not None):
        return
    damaged = [name for name in (MANIFEST, PENDING) if (folder / name).exists()] if folder.is_dir() else []
    if damaged:
        reason = f"its {damaged[0]} was not written by regretless, or is damaged"
    elif folder.is_symlink() or not folder.is_dir():
        reason = "expected a folder, found " + ("a symbolic link" if folder.is_symlink() else "a file")
    elif all(LEFTOVER.fullmatch(path.name) for path in folder.iterdir()):
        return  # empty, but for what a kill left of a file that was about to be ours
    else:
        reason = "exists and was not made by regretless"
    raise ConfigError(f"{folder}: {reason}; choose another output folder, or move it away")


def discard(folder: Path, unused: Path) -> None:
    """Delete what this package has written in a folder; everything else is moved to `unused`, and named in a note."""
    if folder.exists():
        set_strangers_aside(folder, unused)
        # Moved first, so that an interrupted deletion does not leave half a folder that looks complete.
        doomed = leftover(folder)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def set_strangers_aside(folder: Path, unused: Path) -> None:
    """Move files that this package has not written out of a folder to `unused`, and name them in a note.

    A folder without a list of its files, because it is of an earlier version or its process was killed, is moved whole.
    """
    mark = mark_of(folder)
    written = None if mark is None else mark.get("files")
    for path in _strangers(folder, folder, {*written, MANIFEST, PENDING} if written is not None else set()):
        target = free(unused / path.relative_to(folder))
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        print_note(f"moved {path} to {target}: not known to be written by regretless")


def _strangers(folder: Path, top: Path, written: set[str]) -> Iterator[Path]:
    """Files in a folder that are not `written` (by their paths in `top`), and folders without any that are."""
    for path in sorted(folder.iterdir()):
        name, mark = path.relative_to(top).as_posix(), mark_of(path)
        if name in written or (folder == top and name in (MANIFEST, PENDING) and read_mark(path) is not None):
            continue
        if path.is_dir() and not path.is_symlink() and any(other.startswith(f"{name}/") for other in written):
            yield from _strangers(path, top, written)
        elif mark is not None and "files" in mark and not path.is_symlink():  # a unit in the folder of another one
            yield from _strangers(path, path, {*mark["files"], MANIFEST, PENDING})
        elif path.is_dir() and not path.is_symlink() and all(inner.is_dir() for inner in path.rglob("*")):
            continue  # empty
        elif not LEFTOVER.fullmatch(path.name):
            yield path


def delete_results(tree: Path) -> None:
    """Delete what this package is known to have written in all units' folders below one; the rest stays."""
    for path in [path for name in (MANIFEST, PENDING) for path in tree.rglob(name)]:
        mark = read_mark(path)
        if mark is not None and "files" in mark:
            for name in mark["files"]:
                (path.parent / name).unlink(missing_ok=True)
            path.unlink()
    for folder, _, _ in os.walk(tree, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            Path(folder).rmdir()


def free(path: Path) -> Path:
    """The path, or with a number behind it the first that nothing has."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in itertools.chain([path], names) if not name.exists() and not name.is_symlink())


def earlier_results(folder: Path) -> list[Path]:
    """Folders with results of earlier settings, or content, of the unit whose folder this is, newest first."""
    return sorted(folder.with_name(folder.name + CACHE).glob(f"{EARLIER}/*"), reverse=True)


@dataclass(frozen=True)
class StageFolder:
    """The folder of one stage: finished if its manifest has the key of the current request.

    An unfinished folder with the same key remains, so that an interrupted stage can resume; a folder with another key
    is emptied first. What was finished in it is kept until the new result is finished, because a key may differ by
    mistake: an input that is missing for the moment.
    """

    path: Path
    key: str
    unused: Path | None = None
    """Where files go that somebody else has put here; by default the folder `unused` beside it."""
    writes: tuple[str, ...] = ("*",)
    """Patterns of the names that the stage writes here: what else appears while it works is somebody else's."""

    @staticmethod
    def key_of(stage: str, settings: Any, inputs: Mapping[str, str]) -> str:
        """Key of a stage: its settings, hashes of its inputs' content and the versions that its results depend on."""
        used = versions_for(settings)
        return fingerprint({"stage": stage, "settings": settings, "inputs": inputs, "versions": used})

    def is_done(self) -> bool:
        """True if the stage finished with this key, and its result is there."""
        manifest = read_mark(self.path / MANIFEST)
        return manifest is not None and manifest["key"] == self.key and not self._lost(manifest.get("files", ()))

    def _lost(self, files: Sequence[str]) -> bool:
        results = [name for name in files if "/" not in name and Path(name).suffix in OF_RESULTS]
        return not all((self.path / name).exists() for name in results)

    def is_interrupted(self) -> bool:
        """True if it contains unfinished work with this key, from which the stage resumes."""
        mark = None if read_mark(self.path / MANIFEST) else read_mark(self.path / PENDING)
        return mark is not None and mark["key"] == self.key

    def manifest(self) -> dict[str, Any]:
        """Manifest of the finished stage; {} if it is not finished."""
        return read_mark(self.path / MANIFEST) or {}

    def begin(self, keeps: Sequence[str] = ()) -> bool:
        """Prepare the folder; True if it contains unfinished work with the same key.

        keeps: names of results that are set aside among the `earlier_results` when the folder is emptied. Without
        these, a finished folder is kept as a whole until this unit is finished (`put_back`). Files of somebody else are
        moved to the folder `unused`. Raises ConfigError for a folder that is not one of this package.
        """
        check_ours(self.path)
        resumes = self.is_interrupted()
        if resumes:
            self.set_strangers_aside()
            # From now on, what is there is not known: this process may be killed at any moment.
        elif self.manifest() and not keeps:
            discard(self._replaced, self._unused)
            self.set_strangers_aside()
            self._replaced.parent.mkdir(exist_ok=True)
            self.path.rename(self._replaced)
        else:
            self._set_aside([self.path / name for name in keeps if (self.path / name).exists()])
            self.discard()
        # It may exist again: `give_up` in another process.
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / PENDING, {"key": self.key})
        return resumes

    def set_strangers_aside(self) -> None:
        """Move files that this package has not written to the folder `unused`, if it is known what it has written."""
        if "files" in (mark_of(self.path) or {}):
            set_strangers_aside(self.path, self._unused)

    def discard(self) -> None:
        """Delete what this package has written here; everything else is moved to the folder `unused`."""
        discard(self.path, self._unused)

    @property
    def _unused(self) -> Path:
        return self.path.parent / UNUSED / self.path.name if self.unused is None else self.unused

    @property
    def _replaced(self) -> Path:
        return self.path.with_name(self.path.name + CACHE) / REPLACED

    def put_back(self) -> None:
        """Take back the finished result that `begin` has kept, if it has this key and nothing has replaced it yet."""
        if self.manifest():
            self._drop_replaced()  # an interruption came between the two
            return
        is_ours = read_mark(self.path / PENDING) is not None or not self.path.exists()
        if is_ours and StageFolder(self._replaced, self.key).is_done():
            self.discard()
            self._replaced.rename(self.path)
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        discard(self._replaced, self._unused)
        with contextlib.suppress(OSError):  # other files are there, or it does not exist
            self._replaced.parent.rmdir()

    def _set_aside(self, results: Sequence[Path]) -> None:
        if not results:
            return
        # First, so that an interruption leaves no finished folder without its results.
        StageFolder(self.path, "none").give_up()
        before = earlier_results(self.path)
        for oldest in before[MOST_EARLIER - 1 :]:
            for path in results:
                with contextlib.suppress(FileNotFoundError):
                    (oldest / path.name).unlink()
            with contextlib.suppress(OSError):  # somebody else's files are there
                oldest.rmdir()
        number = int(before[0].name) + 1 if before else 0
        folder = self.path.with_name(self.path.name + CACHE) / EARLIER / f"{number:06d}"
        folder.mkdir(parents=True)
        for path in results:
            path.rename(folder / path.name)

    def give_up(self) -> None:
        """Mark the folder as unfinished, whatever it contains, so that the next run of its stage starts over."""
        written = (mark_of(self.path) or {}).get("files")
        write_json(self.path / PENDING, {"key": self.key, **({} if written is None else {"files": written})})
        (self.path / MANIFEST).unlink(missing_ok=True)

    def pause(self) -> None:
        """Note what unfinished work has written, at the end of its process: files that come later are not its own."""
        if (mark := read_mark(self.path / PENDING)) is not None:
            write_json(self.path / PENDING, {"key": mark["key"], "files": self._written()})

    def _written(self) -> list[str]:
        """Paths of the files that the stage has written; what interrupted writes have left is deleted."""
        files = []
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path)
            if LEFTOVER.fullmatch(path.name) and path.is_file():
                path.unlink()
            elif (path.is_symlink() or not path.is_dir()) and any(
                fnmatchcase(name.parts[0], pattern) for pattern in self.writes
            ):
                files.append(name.as_posix())
        return [name for name in files if name not in (MANIFEST, PENDING)]

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
                "files": self._written(),
            },
        )
        (self.path / PENDING).replace(self.path / MANIFEST)  # atomic: an interruption leaves one or the other
        self._drop_replaced()
