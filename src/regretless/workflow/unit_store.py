"""Finished units of work that several run folders share, by key: what one of them has done, the others take.

A unit's key covers its settings, the content of its inputs and the versions that its results depend on
(`workflow.stage_folder`), so equal keys mean equal results. Its files are linked into the run folders, not copied.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regretless.core.files import leftover
from regretless.workflow.stage_folder import StageFolder, check_ours


@dataclass(frozen=True)
class UnitStore:
    """A folder of finished units; each is a folder with its key as name."""

    path: Path

    @contextlib.contextmanager
    def held(self, keys: Iterable[str]) -> Iterator[None]:
        """Hold these keys for the block: another process that needs one of them waits until it has been done here."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            # In one order for all processes, so that no two wait for each other.
            for key in sorted(set(keys)):
                handle = stack.enter_context((self.path / f".{key}.lock").open("a"))
                fcntl.lockf(handle, fcntl.LOCK_EX)  # released with the file, also by a process that is killed
            yield

    def has(self, folder: StageFolder) -> bool:
        """True if the unit of the folder's key is here."""
        return StageFolder(self.path / folder.key, folder.key).is_done()

    def take(self, folder: StageFolder) -> None:
        """Make the folder the finished unit of its key, if there is one."""
        if self.has(folder):
            _link(self.path / folder.key, folder)

    def put(self, folder: StageFolder) -> None:
        """Add a finished unit, unless it is there already."""
        if not self.has(folder):
            _link(folder.path, StageFolder(self.path / folder.key, folder.key))


def _link(source: Path, target: StageFolder) -> None:
    """Make `target` a folder with the files of `source`, at once: nobody sees it with only some of them."""
    check_ours(target.path)
    temporary = leftover(target.path)
    shutil.copytree(source, temporary, copy_function=link_or_copy)
    target.discard()
    temporary.rename(target.path)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has none: finished files are replaced, never written to."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
