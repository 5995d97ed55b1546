"""A run folder in a store and its working copies: what readers of the store see at any moment, and which side wins.

The store is a folder that fsspec serves (`file://`): every operation is real, and each can be a process's last.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regretless.core import mirror, store_lock
from regretless.core.errors import ConfigError, StorageError
from regretless.core.files import write_json, write_text
from regretless.core.mirror import CACHE_VARIABLE, Mirror, reading, working_copy
from regretless.core.object_store import ObjectStore
from regretless.core.run_folder import RunFolder

Work = Callable[[Path], dict[str, Any]]
FILES = ("a.txt", "b.txt", "deeper/c.txt")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "ATTEMPTS", 1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def stored(url: str) -> dict[str, bytes]:
    """What is in the store, but for locks."""
    root = Path(url.removeprefix("file://"))
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith((".locks", ".probe"))}


def local(folder: Path) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name != ".lock"}


class Machine:
    """A machine with a cache of its own, which runs a recipe of two units."""

    def __init__(self, url: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url, self.place, self._patch = url, place, monkeypatch

    def run(self, seed: int, work: Work | None = None) -> set[str]:
        """Run both units, of which the first depends on the seed; what was not done already."""
        self._patch.setenv(CACHE_VARIABLE, str(self.place))
        one = Mirror(self.url)
        folder = RunFolder(one.copy, mirror=one)

        def write(output: Path) -> dict[str, Any]:
            for name in FILES:
                write_text(output / name, f"{seed} {name}\n")
            return {}

        with folder.locked():
            write_text(folder.path / "recipe.yaml", "name: x\n")
            folder.do("unit/first", {"seed": seed}, work or write)
            folder.do("unit/second", {}, lambda output: write_text(output / "d.txt", "d") or {})
        return {name for name, outcome in folder.outcomes.items() if outcome.ran}

    @property
    def copy(self) -> Path:
        self._patch.setenv(CACHE_VARIABLE, str(self.place))
        return working_copy(self.url)


@pytest.fixture
def machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Machine]:
    return lambda name: Machine(url, tmp_path / name, monkeypatch)


class Dead(BaseException):
    """The end of a process in the middle of its work."""


class Death:
    """Lets the operations on a store end at the one of that number, as a killed process does, and all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        guard = threading.Lock()
        for name in ("write", "put", "create", "get"):
            real = getattr(ObjectStore, name)

            def counted(store: ObjectStore, *arguments: Any, real: Any = real) -> Any:
                with guard:
                    self.left -= 1
                    if self.left < 0:
                        raise Dead
                return real(store, *arguments)

            monkeypatch.setattr(ObjectStore, name, counted)
        delete = ObjectStore.delete

        def one_by_one(store: ObjectStore, names: Any) -> None:
            for name in names:
                with guard:
                    self.left -= 1
                    if self.left < 0:
                        raise Dead
                delete(store, [name])

        monkeypatch.setattr(ObjectStore, "delete", one_by_one)


def check_whole(found: dict[str, bytes]) -> None:
    """Every unit with a manifest has all its files, of one and the same work; any other says that it has not ended."""
    for unit in ("unit/first", "unit/second"):
        if any(name.startswith(f"{unit}/") for name in found):
            assert found.keys() & {f"{unit}/manifest.json", f"{unit}/pending.json"}
    if "unit/first/manifest.json" in found:
        seed = json.loads(found["unit/first/manifest.json"])["settings"]["seed"]
        assert {name: found.get(f"unit/first/{name}") for name in FILES} == {
            name: f"{seed} {name}\n".encode() for name in FILES
        }
    if "unit/second/manifest.json" in found:
        assert found["unit/second/d.txt"] == b"d"


def test_run_when_it_has_ended_then_store_and_copy_hold_the_same_files(
    machine: Callable[[str], Machine], url: str
) -> None:
    one = machine("one")
    assert one.run(1) == {"unit/first", "unit/second"}
    names = {"recipe.yaml", "unit/second/d.txt", "unit/second/manifest.json", "unit/first/manifest.json"}
    assert stored(url).keys() == names | {f"unit/first/{name}" for name in FILES}
    assert stored(url) == local(one.copy)


def test_run_when_it_goes_on_elsewhere_then_finished_units_are_there_and_the_newer_side_wins(
    machine: Callable[[str], Machine], url: str
) -> None:
    one, two = machine("one"), machine("two")
    one.run(1)
    assert two.run(1) == set()
    assert two.run(2) == {"unit/first"}
    assert one.run(2) == set()  # not its own, older work
    assert local(one.copy) == local(two.copy) == stored(url)


def deaths(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Let `run` die at its first operation on the store, then at its second, and so on until it ends."""
    for number in range(200):
        with monkeypatch.context() as patch:
            Death(patch, number)
            try:
                run()
            except Dead:
                pass
            else:
                return
        yield number
    raise AssertionError("no end")


@pytest.mark.parametrize("goes_on", ["there", "elsewhere"])
@pytest.mark.parametrize("before", [None, 1], ids=["new", "replaced"])
def test_upload_when_it_dies_at_any_operation_then_readers_see_whole_units_and_the_next_run_ends_equal(
    goes_on: str,
    before: int | None,
    machine: Callable[[str], Machine],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_lock, "STALE", -1.0)
    reference = f"file://{tmp_path}/reference/run"
    Machine(reference, tmp_path / "third", monkeypatch).run(2)
    expected = stored(reference)
    count = 0

    def fresh() -> None:
        for name in ("store", "one", "two"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        if before is not None:
            machine("one").run(before)

    fresh()
    for _ in deaths(lambda: machine("one").run(2), monkeypatch):
        count += 1
        check_whole(stored(url))
        machine("one" if goes_on == "there" else "two").run(2)
        found = stored(url)
        check_whole(found)
        assert found.keys() == expected.keys()
        assert {name: found[name] for name in found if not name.endswith("manifest.json")} == {
            name: expected[name] for name in expected if not name.endswith("manifest.json")
        }
        fresh()
    assert count > 10


def test_download_when_it_dies_at_any_operation_then_the_next_run_has_everything(
    machine: Callable[[str], Machine], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "STALE", -1.0)
    machine("one").run(1)
    expected = stored(url)
    for _ in deaths(lambda: machine("two").run(1), monkeypatch):
        assert machine("two").run(1) == set()
        assert local(machine("two").copy) == expected
        shutil.rmtree(tmp_path / "two")


def test_unit_when_its_manifest_is_missing_in_the_store_then_it_runs_again(
    machine: Callable[[str], Machine], url: str
) -> None:
    machine("one").run(1)
    before = stored(url)
    Path(url.removeprefix("file://"), "unit/first/manifest.json").unlink()
    assert machine("two").run(1) == {"unit/first"}
    assert stored(url).keys() == before.keys()
    Path(url.removeprefix("file://"), "unit/first/manifest.json").unlink()
    assert machine("two").run(1) == {"unit/first"}  # where the copy still has it: the store says that it is to run


def test_work_that_the_store_did_not_get_when_the_same_machine_goes_on_then_it_is_uploaded(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    one.run(1)

    def broken(*_: object) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", broken)
        with pytest.raises(StorageError, match=r"no route to host; the work is kept in .*one/runs/.*resumes"):
            one.run(2)
    assert one.run(2) == set()
    check_whole(stored(url))
    assert b'"seed": 2' in stored(url)["unit/first/manifest.json"]


def test_unfinished_upload_when_another_machine_has_finished_the_unit_then_its_work_counts(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lock, "STALE", -1.0)
    one, two = machine("one"), machine("two")
    one.run(1)
    with monkeypatch.context() as patch, pytest.raises(Dead):
        # The lock is there, the old unit is gone from the store, the new one is not there yet.
        Death(patch, 12)
        one.run(2)
    assert "unit/first/manifest.json" not in stored(url)
    two.run(2)
    before = stored(url)
    assert one.run(2) == set()
    assert stored(url) == before == local(one.copy)


def test_work_kept_from_the_store_when_another_machine_does_other_work_then_both_are_kept(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine("one"), machine("two")
    one.run(1)
    push, calls = Mirror._push, iter(range(9))

    def down_after_the_start(self: Mirror) -> None:
        if next(calls):
            raise OSError("no route to host")
        push(self)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="no route to host"):
        patch.setattr(Mirror, "_push", down_after_the_start)
        one.run(2)
    two.run(1)
    write_text(Path(url.removeprefix("file://"), "notes.txt"), "by hand")
    assert one.run(2) == set()
    assert b'"seed": 2' in stored(url)["unit/first/manifest.json"]
    assert stored(url)["notes.txt"] == b"by hand"


def test_working_copy_when_files_of_it_are_deleted_then_the_store_keeps_them_and_gives_them_back(
    machine: Callable[[str], Machine], url: str
) -> None:
    one = machine("one")
    one.run(1)
    before = stored(url)
    for name in ("unit/first/b.txt", "unit/second", "recipe.yaml", ""):
        path = one.copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert one.run(1) == set(), name
        assert stored(url) == before == local(one.copy), name


def test_unit_that_is_set_aside_when_uploaded_then_it_is_aside_in_the_store_too(
    machine: Callable[[str], Machine], url: str
) -> None:
    one = machine("one")
    one.run(1)
    folder = RunFolder(one.copy, mirror=Mirror(url))
    with folder.locked():
        folder.select("unit", ["second"])
    assert {"unused/unit/first/manifest.json", "unit/second/manifest.json"} <= stored(url).keys()
    assert stored(url) == local(one.copy)
    assert machine("two").run(1) == {"unit/first"}


def test_unfinished_work_when_uploaded_then_another_machine_goes_on_from_its_whole_parts(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "INTERVAL", 0.01)
    monkeypatch.setattr(store_lock, "STALE", -1.0)
    uploaded = threading.Event()
    push = Mirror.push

    def told(self: Mirror) -> None:
        push(self)
        uploaded.set()

    monkeypatch.setattr(Mirror, "push", told)

    def training(output: Path) -> dict[str, Any]:
        write_text(output / "parts" / "0.txt", "part")
        write_text(output / "parts" / ".1.txt.99.tmp", "half a part")
        for number, files in ((1, ("model.bin", "trainer_state.json")), (2, ("model.bin",))):
            for name in files:
                write_text(output / f"checkpoint-{number}" / name, name)
        write_text(output / "_final" / "model.bin", "half a model")
        with sqlite3.connect(output / "replies.sqlite") as file:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("CREATE TABLE replies (reply)")
            file.execute("INSERT INTO replies VALUES ('paid')")
        for _ in range(2):  # the second upload began after all was written
            uploaded.clear()
            assert uploaded.wait(60)
        file.close()
        raise Dead

    with pytest.raises(Dead):
        machine("one").run(1, training)
    names = {"parts/0.txt", "checkpoint-1/model.bin", "checkpoint-1/trainer_state.json", "replies.sqlite"}
    found: dict[str, bytes] = {}

    def goes_on(output: Path) -> dict[str, Any]:
        found.update(local(output))
        with sqlite3.connect(output / "replies.sqlite") as file:
            assert file.execute("SELECT reply FROM replies").fetchall() == [("paid",)]
        file.close()
        return {}

    machine("two").run(1, goes_on)
    assert found.keys() == names | {"pending.json"}
    assert found["parts/0.txt"] == b"part"


def test_checkpoint_when_it_is_deleted_then_what_is_left_of_it_in_the_store_never_looks_complete(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"a.bin", "trainer_state.json", "z.bin"}
    seen: list[set[str]] = []
    delete, uploads = ObjectStore.delete, list[Mirror]()
    start = Mirror._start
    monkeypatch.setattr(Mirror, "_start", lambda self: (uploads.append(self), start(self))[1])

    def watched(store: ObjectStore, some: Any) -> None:
        for name in some:
            delete(store, [name])
            seen.append({Path(found).name for found in stored(url) if found.startswith("unit/first/checkpoint-1/")})

    def training(output: Path) -> dict[str, Any]:
        for name in names:
            write_text(output / "checkpoint-1" / name, name)
        uploads[0].push()
        monkeypatch.setattr(ObjectStore, "delete", watched)
        for name in sorted(names):
            (output / "checkpoint-1" / name).unlink()
            uploads[0].push()
        return {}

    machine("one").run(1, training)
    assert set() in seen
    assert not [left for left in seen if "trainer_state.json" in left]


def test_run_folder_when_another_run_works_in_it_then_it_is_refused_with_who_and_taken_over_once_silent(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(output: Path) -> dict[str, Any]:
        with pytest.raises(ConfigError, match=rf"another run uses it .process {os.getpid()} on .*; wait"):
            machine("two").run(1)
        monkeypatch.setattr(store_lock, "STALE", -1.0)
        machine("two").run(2)
        return {}

    with pytest.raises(StorageError, match="taken over by another run"):
        machine("one").run(1, meanwhile)
    check_whole(stored(url))
    assert b'"seed": 2' in stored(url)["unit/first/manifest.json"]


def test_folder_with_other_files_when_named_as_run_folder_then_it_is_left_alone(
    machine: Callable[[str], Machine], url: str
) -> None:
    precious = Path(url.removeprefix("file://")) / "thesis.txt"
    write_text(precious, "years of work")
    with pytest.raises(ConfigError, match=r"1 objects that were not made by regretless \(thesis.txt"):
        machine("one").run(1)
    assert [path for path in precious.parent.rglob("*") if path.is_file()] == [precious]


def test_object_with_a_path_that_leads_out_when_downloaded_then_it_is_refused(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("one").run(1)
    real = ObjectStore.list
    monkeypatch.setattr(
        ObjectStore, "list", lambda store, under="": real(store, under) | ({} if under else {"../evil.txt": "tag"})
    )
    with pytest.raises(StorageError, match=r"'\.\./evil\.txt' would lie outside"):
        machine("two").run(1)


def test_readers_when_a_unit_is_unfinished_then_they_get_the_others_and_no_models(
    machine: Callable[[str], Machine], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("one").run(1)
    root = Path(url.removeprefix("file://"))
    write_json(root / "half" / "pending.json", {"key": "x"})
    write_text(root / "half" / "rows.txt", "1")
    write_text(root / "unit" / "first" / "model.safetensors", "weights")
    monkeypatch.setenv(CACHE_VARIABLE, str(root.parents[1] / "reader"))
    for expected in ({*FILES, "manifest.json"}, {"manifest.json"}):
        with reading(url) as folder:
            assert set(local(folder / "unit" / "first")) == expected
            assert not (folder / "half").exists()
        for name in FILES:
            (root / "unit" / "first" / name).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no run folder"), reading(f"{url}-other"):
        pass
