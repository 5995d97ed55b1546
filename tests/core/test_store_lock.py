"""The lock in a store: one owner at a time, whatever the others do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regretless.core import store_lock
from regretless.core.errors import ConfigError, StorageError
from regretless.core.object_store import ObjectStore
from regretless.core.store_lock import StoreLock


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store")


def test_lock_when_many_take_it_at_once_then_one_has_it(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lock, "_held_here", {"somebody"})
    locks = [StoreLock(store) for _ in range(8)]
    start = threading.Barrier(len(locks))
    said: list[Exception] = []

    def take(lock: StoreLock) -> None:
        start.wait()
        try:
            lock.acquire()
        except Exception as error:
            said.append(error)

    # Each of them is of this process, and none of them is dead.
    store_lock._held_here.update(lock.owner for lock in locks)
    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in said] == [ConfigError] * (len(locks) - 1), said
    (winner,) = (lock for lock in locks if lock.number)
    winner.check()


def test_lock_when_released_then_the_next_one_has_it_at_once(store: ObjectStore) -> None:
    with StoreLock(store).held():
        pass
    with StoreLock(store).held():
        assert list(store.list(".locks")) == [".locks/000002.json"]


def test_lock_of_a_process_of_this_machine_when_it_has_ended_then_it_is_taken_over_at_once(
    store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, sys; from regretless.core.object_store import ObjectStore\n"
        "from regretless.core.store_lock import StoreLock\n"
        "StoreLock(ObjectStore(sys.argv[1])).acquire(); print(os.getpid(), flush=True); os._exit(1)"
    )
    ended = subprocess.run([sys.executable, "-c", code, store.url], capture_output=True, text=True, check=False)
    with StoreLock(store).held():
        assert f"taken over from process {ended.stdout.strip()} on " in capsys.readouterr().err


def test_lock_of_another_machine_when_silent_then_it_is_taken_over_after_the_stated_time_only(
    store: ObjectStore,
) -> None:
    elsewhere = StoreLock(store, machine="another")
    elsewhere.acquire()
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* takes over in 1[12]\d s"):
        StoreLock(store).acquire()
    lock = Path(store.url.removeprefix("file://")) / ".locks" / "000001.json"
    os.utime(lock, (lock.stat().st_mtime - 200,) * 2)
    elsewhere.beat()
    with pytest.raises(ConfigError, match="last sign of life 0 s ago"):
        StoreLock(store).acquire()
    os.utime(lock, (lock.stat().st_mtime - 200,) * 2)
    here = StoreLock(store)
    here.acquire()
    with pytest.raises(StorageError, match="taken over by another run"):
        elsewhere.check()
    # It wakes up: its heartbeat and its end leave the new owner's lock alone.
    elsewhere.beat()
    elsewhere.release()
    here.check()
    assert json.loads(store.read(".locks/000002.json") or b"")["released"] is False


def test_heartbeat_when_the_block_lasts_then_the_lock_is_written_again(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "HEARTBEAT", 0.01)
    lock = StoreLock(store)
    beats = threading.Semaphore(0)
    real = StoreLock.beat

    def counted(self: StoreLock) -> None:
        real(self)
        beats.release()

    monkeypatch.setattr(StoreLock, "beat", counted)
    with lock.held():
        before = store.modified(".locks/000001.json")
        for _ in range(3):
            assert beats.acquire(timeout=60)
        assert store.modified(".locks/000001.json") > before
