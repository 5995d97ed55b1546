"""The folder of one stage: whether it is done, and whether its unfinished work is of the same question."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.core.files import fingerprint, path_fingerprint, read_json, write_json
from regretless.core.versions import versions

MANIFEST = "manifest.json"
PENDING = "pending.json"


@dataclass(frozen=True)
class StageFolder:
    """The folder of one stage: finished when its manifest carries the key of what is asked for now.

    An unfinished folder with the same key is kept, so that a stage can go on where it was killed; a folder that was
    made for another key is emptied first.
    """

    path: Path
    key: str

    @staticmethod
    def key_of(stage: str, settings: Any, inputs: Mapping[str, Path]) -> str:
        """Key of a stage: its settings, its inputs' content and the versions its results depend on."""
        content = {name: path_fingerprint(path) for name, path in sorted(inputs.items())}
        return fingerprint({"stage": stage, "settings": settings, "inputs": content, "versions": versions()})

    def is_done(self) -> bool:
        """Whether the stage finished with this very key."""
        return self._key_in(MANIFEST) == self.key

    def manifest(self) -> dict[str, Any]:
        """Manifest of the finished stage."""
        return dict(read_json(self.path / MANIFEST))

    def begin(self) -> bool:
        """Make the folder ready; True when it holds the unfinished work of the same key."""
        resumes = self._key_in(PENDING) == self.key and not (self.path / MANIFEST).exists()
        if not resumes:
            if self.path.exists():
                # Moved first: a kill in the middle of deleting must not leave half a folder that looks whole.
                doomed = self.path.with_name(f".{self.path.name}.{os.getpid()}.old")
                self.path.rename(doomed)
                shutil.rmtree(doomed)
            # It may be there again: `give_up` in another process.
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / PENDING, {"key": self.key})
        return resumes

    def give_up(self) -> None:
        """Leave the folder as one of ours that is not done, whatever it holds: the next run of its stage redoes it."""
        write_json(self.path / PENDING, {"key": self.key})
        (self.path / MANIFEST).unlink(missing_ok=True)

    def finish(self, stage: str, settings: Any, summary: Mapping[str, Any], seconds: float) -> None:
        """Write the manifest: from now on the stage is done, and nothing tells of unfinished work any more."""
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
        (self.path / PENDING).replace(self.path / MANIFEST)  # in one step: a kill leaves the one or the other

    def _key_in(self, name: str) -> str | None:
        file = self.path / name
        return str(read_json(file).get("key")) if file.is_file() else None
