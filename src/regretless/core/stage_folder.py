"""The folder of one stage: whether it is done, and whether its unfinished work is of the same question."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.core.files import fingerprint, read_json, write_json
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

    @staticmethod
    def key_of(stage: str, settings: Any, inputs: Mapping[str, str]) -> str:
        """Key of a stage: its settings, hashes of its inputs' content and the versions that its results depend on."""
        used = versions_for(settings)
        return fingerprint({"stage": stage, "settings": settings, "inputs": inputs, "versions": used})

    def is_done(self) -> bool:
        """True if the stage finished with this key."""
        return self._key_in(MANIFEST) == self.key

    def is_interrupted(self) -> bool:
        """True if it contains unfinished work with this key, from which the stage resumes."""
        return self._key_in(PENDING) == self.key and not (self.path / MANIFEST).exists()

    def manifest(self) -> dict[str, Any]:
        """Manifest of the finished stage."""
        return dict(read_json(self.path / MANIFEST))

    def begin(self, keeps: Sequence[str] = ()) -> bool:
        """Prepare the folder; True if it contains unfinished work with the same key.

        keeps: names of results that are set aside among the `earlier_results` when the folder is emptied. Without
        these, a finished folder is kept as a whole until this unit is finished (`put_back`).
        """
        resumes = self.is_interrupted()
        if not resumes:
            if (self.path / MANIFEST).is_file() and not keeps:
                _delete(self._replaced)
                self._replaced.parent.mkdir(exist_ok=True)
                self.path.rename(self._replaced)
            elif self.path.exists():
                self._set_aside([self.path / name for name in keeps if (self.path / name).exists()])
                _delete(self.path)
            # It may exist again: `give_up` in another process.
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / PENDING, {"key": self.key})
        return resumes

    @property
    def _replaced(self) -> Path:
        return self.path.with_name(self.path.name + CACHE) / REPLACED

    def put_back(self) -> None:
        """Take back the finished result that `begin` has kept, if it has this key and nothing has replaced it yet."""
        if (self.path / MANIFEST).is_file():
            self._drop_replaced()  # an interruption came between the two
            return
        is_ours = (self.path / PENDING).is_file() or not self.path.exists()
        if is_ours and StageFolder(self._replaced, self.key).is_done():
            _delete(self.path)
            self._replaced.rename(self.path)
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        _delete(self._replaced)
        with contextlib.suppress(OSError):  # other files are there, or it does not exist
            self._replaced.parent.rmdir()

    def _set_aside(self, results: Sequence[Path]) -> None:
        if not results:
            return
        # First, so that an interruption leaves no finished folder without its results.
        StageFolder(self.path, "none").give_up()
        before = earlier_results(self.path)
        for oldest in before[MOST_EARLIER - 1 :]:
            shutil.rmtree(oldest)
        number = int(before[0].name) + 1 if before else 0
        place = self.path.with_name(self.path.name + CACHE) / EARLIER / f"{number:06d}"
        place.mkdir(parents=True)
        for path in results:
            path.rename(place / path.name)

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
        self._drop_replaced()

    def _key_in(self, name: str) -> str | None:
        file = self.path / name
        return str(read_json(file).get("key")) if file.is_file() else None


def _delete(folder: Path) -> None:
    if folder.exists():
        # Moved first, so that an interrupted deletion does not leave half a folder that looks complete.
        doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(doomed)
        shutil.rmtree(doomed)
