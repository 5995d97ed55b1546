"""A lock in an object store: who uses a run folder, with a heartbeat, so that the lock of a dead process ends.

Locks are numbered objects, and the highest number holds. To take the lock is to create the next number, which the store
grants to one process only (a conditional put). Numbers only grow: a process that was believed dead and goes on finds a
higher one and can do no harm. Ages are differences between two times of the store, so no machine's clock matters.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regretless.core.errors import ConfigError, StorageError
from regretless.core.object_store import ObjectStore
from regretless.core.terminal import console

LOCKS = ".locks"
HEARTBEAT = 15.0
"""Seconds between two signs of life of a lock's owner."""
STALE = 120.0
"""Seconds without one after which the next run takes the lock over."""
ATTEMPTS = 5
_held_here: set[str] = set()
"""Owners in this process."""


def machine() -> str | None:
    """Where process numbers of this process mean the same: machine, its start, and container; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None


@dataclass
class StoreLock:
    """The lock on a run folder in a store, for one process."""

    store: ObjectStore
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)
    machine: str | None = field(default_factory=machine)
    number: int = 0
    """Number of the lock that this process holds; 0 for none."""
    taken_by: str | None = None
    """Who took the lock over while this process was believed dead."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for the block, with a heartbeat. Raises ConfigError if another process has it."""
        self.acquire()
        _held_here.add(self.owner)
        stop = threading.Event()
        beating = threading.Thread(target=self._beat_until, args=(stop,), daemon=True, name="lock heartbeat")
        beating.start()
        try:
            yield
        finally:
            stop.set()
            beating.join()
            self.release()
            _held_here.discard(self.owner)

    def acquire(self) -> None:
        """Take the lock. Raises ConfigError that says who has it, and from when on it could be taken over."""
        for _ in range(ATTEMPTS):
            number, holder = self._latest()
            if holder is not None and not holder.get("released"):
                self._check_stale(number, holder)
            if self.store.create(_name(number + 1), self._content(released=False)):
                self.number, numbers = number + 1, self._numbers()
                if numbers[-1:] == [self.number]:
                    self.store.delete(_name(lower) for lower in numbers[:-1])
                    return
        raise ConfigError(f"{self.store.url}: other runs take it at this very moment; wait for them")

    def beat(self) -> None:
        """One sign of life."""
        if self._is_mine():
            self.store.write(_name(self.number), self._content(released=False))

    def check(self) -> None:
        """Raise StorageError if another process has taken the lock over."""
        if not self._is_mine():
            raise StorageError(
                f"{self.store.url}: taken over by another run ({self.taken_by}), because this process gave no sign of "
                f"life for {STALE:g} seconds; nothing more is written there. Its folder is now the other run's"
            )

    def release(self) -> None:
        """Leave the lock to the next process at once. A store that fails now costs only the wait for a stale lock."""
        with contextlib.suppress(Exception):
            if self._is_mine():
                self.store.write(_name(self.number), self._content(released=True))

    def _is_mine(self) -> bool:
        if self.taken_by is None:
            number, holder = self._latest()
            # A lock that somebody deleted by hand excludes nobody; the next heartbeat writes it again.
            if number > self.number or (number == self.number and holder and holder.get("owner") != self.owner):
                self.taken_by = _described(holder or {})
        return self.taken_by is None

    def _beat_until(self, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT):
            # An unreachable store is reported where files are written to it.
            with contextlib.suppress(Exception):
                self.beat()

    def _numbers(self) -> list[int]:
        names = (Path(name).stem for name in self.store.list(LOCKS))
        return sorted(int(name) for name in names if name.isdigit())

    def _latest(self) -> tuple[int, dict[str, Any] | None]:
        numbers = self._numbers()
        if not numbers:
            return 0, None
        text = self.store.read(_name(numbers[-1]))
        try:
            holder = json.loads(text or b"{}")
        except ValueError:
            holder = {}
        return numbers[-1], holder if isinstance(holder, dict) else {}

    def _check_stale(self, number: int, holder: dict[str, Any]) -> None:
        """Return if the lock may be taken over. Raises ConfigError if its owner may be alive."""
        who = _described(holder)
        # Of a process on this machine the system knows whether it lives.
        if holder.get("owner") not in _held_here and holder.get("machine") == machine() and _has_ended(holder):
            console.print(f"{self.store.url}: taken over from {who}, which has ended", soft_wrap=True)
            return
        silent = self._seconds_silent(number)
        if silent < STALE:
            raise ConfigError(
                f"{self.store.url}: another run uses it ({who}, last sign of life {silent:.0f} s ago); wait for it, or "
                f"choose another output folder. If that process is dead, the same command takes over in "
                f"{STALE - silent:.0f} s"
            )
        console.print(f"{self.store.url}: taken over from {who}, silent for {silent:.0f} s", soft_wrap=True)

    def _seconds_silent(self, number: int) -> float:
        now = f"{LOCKS}/now-{self.owner}"
        self.store.write(now, b"")
        try:
            return (self.store.modified(now) - self.store.modified(_name(number))).total_seconds()
        except FileNotFoundError:
            return 0.0  # another process has just replaced it
        finally:
            self.store.delete([now])

    def _content(self, *, released: bool) -> bytes:
        who = {"owner": self.owner, "process": os.getpid(), "host": platform.node(), "machine": self.machine}
        text = json.dumps({**who, "released": released, "written": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        return text.encode()


def _name(number: int) -> str:
    return f"{LOCKS}/{number:06d}.json"


def _described(holder: dict[str, Any]) -> str:
    return f"process {holder.get('process', 'unknown')} on {holder.get('host', 'unknown')}"


def _has_ended(holder: dict[str, Any]) -> bool:
    """True if the holder's process, of this machine, is certainly gone."""
    process = holder.get("process")
    if not isinstance(process, int) or machine() is None:
        return False
    if process == os.getpid():
        return True  # an earlier process with this one's number
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
