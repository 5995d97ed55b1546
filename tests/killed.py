"""Kills at planted moments, for processes that tests start."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any


class AtWrite:
    """A kill before a file below a folder is opened for writing, made, moved or deleted: the one of that number."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = str(folder), number

    def __call__(self) -> None:
        count = itertools.count()

        def watch(event: str, details: tuple[Any, ...]) -> None:
            writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") or (
                event == "open" and isinstance(details[1], str) and set(details[1]) & set("wax+")
            )
            if writes and str(details[0]).startswith(self.folder) and next(count) == self.number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)


class AtCall:
    """A kill within the calls of a method, before the one of that number."""

    def __init__(self, owner: type, name: str, number: int) -> None:
        self.owner, self.name, self.number = owner, name, number

    def __call__(self) -> None:
        count, method = itertools.count(), getattr(self.owner, self.name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if next(count) == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(self.owner, self.name, watched)
