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

    def is_interrupted(self) -> bool:
        """True if it contains unfinished work with this key, from which the stage resumes."""
        return self._key_in(PENDING) == self.key and not (self.path / MANIFEST).exists()

    def manifest(self) -> dict[str, Any]:
        """Manifest of the finished stage."""
        return dict(read_json(self.path / MANIFEST))

    def begin(self) -> bool:
        """Prepare the folder; True if it contains unfinished work with the same key."""
        resumes = self.is_interrupted()
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
