"""A run folder in an object store: work happens in a working copy on this machine, which is mirrored to the store.

Locks, SQLite, checkpoints and memory maps need a file system, and stores have no rename. What a reader of the store can
rely on: **an object is there whole or not at all, and a folder with a manifest has all of its files.** So the files of
a unit of work go first and its manifest last; where a unit is replaced, a mark that its next run starts over comes
first, then its manifest is deleted, then its files. A checkpoint of training is ordered the same way around its
`trainer_state.json`.

At the start, the newer side wins, unit by unit. If a unit is in the store as this copy left it, the copy is newer: work
that an interruption kept from the store is uploaded now. Otherwise another machine went on with it, or somebody changed
it, and the copy of it is made equal to the store. Both are told by what the store says of its objects (hashes, where it
has them), never by times of different machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from regretless.core.errors import ConfigError, RegretlessError, StorageError, storage_error
from regretless.core.files import LEFTOVER, fingerprint, read_json, write_json
from regretless.core.object_store import PROBE, ObjectStore, failure
from regretless.core.stage_folder import CACHE, MANIFEST, PENDING, REPLACED
from regretless.core.store_lock import LOCKS, StoreLock
from regretless.core.terminal import console, print_note

LOCK = ".lock"
"""Lock file of a run folder on this machine."""
CACHE_VARIABLE = "REGRETLESS_CACHE"
RECIPE = "recipe.yaml"
"""Its presence shows that a folder is a run's."""
CHECKPOINT = re.compile(r"checkpoint-\d+")
CHECKPOINT_END = "trainer_state.json"
"""The last file of a checkpoint."""
NOT_YET = "_final"
"""Folder in which training writes its result before it moves it."""
BESIDE_SQLITE = ("-wal", "-shm", "-journal")
SQLITE = ".sqlite"
STARTS_OVER = json.dumps({"key": "none"}).encode()
"""Mark of a unit that its next run starts over, whatever is in its folder (as `StageFolder.give_up`)."""
INTERVAL = 60.0
"""Seconds between two uploads of unfinished work."""
SHARE = 10
"""Time between two of them, as a multiple of the time that the last one took."""
ATTEMPTS = 4
NOT_FOR_READERS = re.compile(r"(^|/)(checkpoint-\d+|[^/]+\.cache)/|\.(safetensors|bin|pt|pth|distcp)$")
"""Names of files that no report reads."""


def working_copy(url: str) -> Path:
    """Folder on this machine that stands for the run folder at a URL.

    Below $REGRETLESS_CACHE, by default ~/.cache/regretless.
    """
    return _place(url) / "copy" / url.rstrip("/").rpartition("/")[2]


def _place(url: str) -> Path:
    home = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/regretless").expanduser()
    return home.resolve() / "runs" / fingerprint(url.rstrip("/"))[:16]


@dataclass
class Entry:
    """A file as it was when copy and store were equal."""

    tag: str
    """What the store says of its content."""
    status: list[int] | None
    """Size and time of the copy's file; None if the file may differ from the object."""


@dataclass
class Record:
    """What the store held when this copy last read or wrote it."""

    path: Path
    files: dict[str, Entry] = field(default_factory=dict)
    keys: dict[str, str | None] = field(default_factory=dict)
    """Keys of the units of work, by folder; None where unknown."""
    uncertain: list[str] = field(default_factory=list)
    """Objects that were about to be written or deleted."""
    lock: int = 0
    """Number of the lock under which this copy was last at work."""

    @classmethod
    def load(cls, path: Path) -> Record:
        """The record in a file; an empty one if there is none."""
        values = read_json(path) if path.is_file() else {}
        files = {name: Entry(**entry) for name, entry in values.pop("files", {}).items()}
        values.pop("url", None)
        return cls(path, files, **values)

    def save(self, url: str) -> None:
        """Write the record to its file."""
        files = {name: vars(entry) for name, entry in self.files.items()}
        rest = {"keys": self.keys, "uncertain": self.uncertain, "lock": self.lock}
        write_json(self.path, {"url": url, "files": files, **rest})


class Mirror:
    """The run folder at a URL and its working copy."""

    def __init__(self, url: str) -> None:
        self.url, self.copy = url.rstrip("/"), working_copy(url)
        self.still = threading.RLock()
        """Held by whoever moves or empties folders of the copy, and during an upload."""
        self._record = Record(_place(url) / "store.json")
        self._warned = False

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Hold the store's lock for the block, bring the copy up to date, and upload its changes until the end.

        Raises ConfigError if the store cannot be used, another run uses the folder, or it holds somebody else's files;
        StorageError if the store fails later.
        """
        self._store = ObjectStore(self.url)
        self._store.check()
        self._lock = StoreLock(self._store)
        console.print(f"{self.url}: working copy in {self.copy}", soft_wrap=True)
        with contextlib.ExitStack() as stack:
            with self._reported():
                self._refuse_foreign()
                stack.enter_context(self._lock.held())
                self._start()
            self.push()
            try:
                with self._uploading():
                    yield
            except StorageError:
                raise  # an upload that failed, or a full disk: another attempt would not help
            except BaseException:
                with contextlib.suppress(RegretlessError):
                    self.push()
                raise
            self.push()

    def push(self) -> None:
        """Make the store equal to the copy, in an order that leaves no unit half replaced at any moment.

        Raises StorageError if the store fails repeatedly, or if another run has taken the folder over.
        """
        attempts = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=2, max=30),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        with self.still, self._reported():
            attempts(self._push)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except RegretlessError:
            raise
        except Exception as error:  # every store's client has errors of its own
            is_here = isinstance(error, OSError) and str(error.filename).startswith(str(self.copy))
            known = storage_error(error) if is_here else None
            raise known or failure(self.url, error, self.copy) from error

    # --- at the start ------------------------------------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        found = [name for name in self._store.list() if not name.startswith(PROBE)]
        ours = RECIPE in found or any(name.startswith(f"{LOCKS}/") for name in found)
        if found and not ours:
            raise ConfigError(
                f"{self.url}: holds {len(found)} objects that were not made by regretless ({min(found)}, …); choose "
                "another output folder"
            )

    def _start(self) -> None:
        self.copy.mkdir(parents=True, exist_ok=True)
        self._record = record = Record.load(self._record.path)
        found = self._list()
        # What this copy was writing when it was cut off is its own only if nobody has written since.
        own = set(record.uncertain) if self._lock.number == record.lock + 1 else set()
        left = {name: entry.tag for name, entry in record.files.items()}
        names = found.keys() | left.keys() | set(record.uncertain)
        differs = {name for name in names - own if found.get(name) != left.get(name)}
        self._settle(found)
        here = scan(self.copy, everything=True)
        units = _units(found) | _units(left) | _units(here)
        replaced = {_unit_of(name, units) or name for name in differs}
        theirs = {name for name in names | here.keys() if (_unit_of(name, units) or name) in replaced}
        self._take(theirs, found, here)
        self._restore(found, {name for name in left.keys() - theirs - own if name not in here})
        record.lock = self._lock.number
        record.save(self.url)

    def _list(self) -> dict[str, str]:
        """Objects of the run and their tags, without the locks."""
        found = self._store.list()
        for name in found:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise StorageError(f"{self.url}: the object {name!r} would lie outside of the run folder; delete it")
        return {name: tag for name, tag in found.items() if not name.startswith((f"{LOCKS}/", PROBE))}

    def _settle(self, found: Mapping[str, str]) -> None:
        """Find out what an interrupted upload has left, so that the next one does the rest."""
        for name in self._record.uncertain:
            if name in found:
                self._record.files[name] = Entry(found[name], None)
            else:
                self._record.files.pop(name, None)
            if _last(name) in (MANIFEST, PENDING):
                self._record.keys[_folder(name)] = None
        self._record.uncertain = []

    def _take(self, names: Collection[str], found: Mapping[str, str], here: Mapping[str, list[int]]) -> None:
        """Make the copy's files of these names equal to the store."""
        # A manifest counts more than the mark of unfinished work that an upload was about to delete beside it.
        beside = {name for name in names if _last(name) == PENDING and _sibling(name, MANIFEST) in found}
        units = _units(found) | _units(here)
        for name in names:
            is_gone = (name not in found and _unit_of(name, units) is not None) or name in beside
            if name in here and is_gone:
                (self.copy / name).unlink()
        _remove_empty(self.copy)
        files = self._record.files
        wanted = {name for name in names if name in found and name not in beside}
        same = {name for name in wanted & here.keys() & files.keys() if files[name] == Entry(found[name], here[name])}
        self._download(wanted - same)
        for name in names:
            if name in wanted:
                files[name] = Entry(found[name], _status(self.copy / name))
            elif name in found:
                files[name] = Entry(found[name], None)
            else:
                files.pop(name, None)
        for unit in _units(names):
            self._record.keys[unit] = _key(self.copy / unit)

    def _restore(self, found: Mapping[str, str], missing: Collection[str]) -> None:
        """Download files that somebody deleted from the copy; what the run itself deleted is left deleted.

        A unit that goes on with other work keeps its mark, and an unfinished one deletes files of its own accord.
        """
        files, here = self._record.files, scan(self.copy)
        units = _units(files) | _units(here)
        lost = []
        for name in missing:
            unit = _unit_of(name, units)
            end, mark = f"{unit}/{MANIFEST}", f"{unit}/{PENDING}"
            is_marked = end in here or mark in here
            is_same = end in here and end in files and files[end].status == here[end]
            if name == mark and end in here:
                continue
            if name in found and (unit is None or not is_marked or is_same):
                lost.append(name)
        self._download(lost)
        for name in lost:
            files[name] = Entry(found[name], _status(self.copy / name))

    def _download(self, names: Iterable[str]) -> None:
        some = sorted(names)
        if some:
            console.print(f"{self.url}: downloading {len(some)} files", soft_wrap=True)
        self._store.in_parallel(lambda name: self._store.get(name, self.copy / name), some)

    # --- uploading ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _uploading(self) -> Iterator[None]:
        """A block during which unfinished work is uploaded every minute, but for at most a tenth of the time."""
        stop = threading.Event()

        def work() -> None:
            pause = INTERVAL
            while not stop.wait(pause):
                started = time.monotonic()
                try:
                    self.push()
                except RegretlessError as error:
                    if not self._warned:
                        print_note(f"the run goes on: {error}")
                    self._warned = True
                pause = max(INTERVAL, SHARE * (time.monotonic() - started))

        thread = threading.Thread(target=work, daemon=True, name="upload")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _push(self) -> None:
        record = self._record
        self._lock.check()
        if record.uncertain:
            self._settle(self._list())
        here = scan(self.copy)
        before, units = _units(record.files), _units(here)
        started_over = {unit for unit in before | units if self._starts_over(unit, here, before)}
        changed = {
            name
            for name, status in here.items()
            if name not in record.files
            or record.files[name].status != status
            or _unit_of(name, before | units) in started_over
        }
        gone = record.files.keys() - here.keys()
        # A checkpoint that is just being deleted: its last file goes with the first one.
        ends = {f"{_folder(name)}/{CHECKPOINT_END}" for name in gone}
        gone |= {name for name in ends & record.files.keys() if _ends_checkpoint(name)}
        changed -= gone
        if not changed and not gone:
            return
        keys = {unit: _key(self.copy / unit) for unit in units}
        marks = {f"{unit}/{PENDING}" for unit in started_over | {_folder(name) for name in changed if _is_end(name)}}
        record.uncertain = sorted(changed | gone | marks)
        record.save(self.url)
        for unit in sorted(started_over):
            self._start_over(unit, before | units, is_gone=unit not in units)
        uploaded = self._upload(changed, gone & record.files.keys(), keys)
        found = self._list()
        for name in uploaded:
            record.files[name] = Entry(found[name], here[name])
        for name in [*gone, *marks]:
            if name not in uploaded:
                record.files.pop(name, None)
        record.keys, record.uncertain = dict(keys), []
        record.save(self.url)

    def _starts_over(self, unit: str, here: Mapping[str, list[int]], before: Collection[str]) -> bool:
        """Whether the store's files of a unit are of other work than the copy's, or no longer wanted."""
        record, end, pending = self._record, f"{unit}/{MANIFEST}", f"{unit}/{PENDING}"
        if unit not in before:
            return any(name.startswith(f"{unit}/") for name in record.files)
        if end not in here and pending not in here:
            return True
        if end in record.files and record.files[end].status != here.get(end):
            return True
        return record.keys.get(unit) != _key(self.copy / unit)

    def _start_over(self, unit: str, units: Collection[str], *, is_gone: bool) -> None:
        """Delete a unit from the store; at no moment does what is left of it look finished, or fit to go on with."""
        pending = f"{unit}/{PENDING}"
        own = [name for name in self._record.files if _unit_of(name, units) == unit and name != pending]
        self._store.write(pending, STARTS_OVER)
        self._store.delete(name for name in own if _last(name) == MANIFEST)
        self._delete(name for name in own if _last(name) != MANIFEST)
        if is_gone:
            self._store.delete([pending])
        for name in [*own, pending]:
            self._record.files.pop(name, None)

    def _upload(self, changed: Collection[str], gone: Collection[str], keys: Mapping[str, str | None]) -> set[str]:
        """Upload changed files and delete those that are gone; returns what was uploaded."""
        ends = sorted(name for name in changed if _is_end(name))
        marks = {name for name in changed if _last(name) == PENDING}
        self._put(marks)
        for end in ends:
            # Finished before anything of it was uploaded: what an interruption leaves is unfinished work.
            if (mark := _sibling(end, PENDING)) not in self._record.files:
                self._store.write(mark, json.dumps({"key": keys[_folder(end)]}).encode())
        plain = [name for name in changed if name not in marks and name not in ends]
        last = [name for name in plain if _ends_checkpoint(name)]
        uploaded = self._put([name for name in plain if name not in last]) | self._put(last) | marks
        self._delete(name for name in gone if _last(name) not in (MANIFEST, PENDING))
        if ends:
            self._lock.check()
        for end in ends:
            self._store.put(self.copy / end, end)
            self._store.delete([_sibling(end, PENDING)])
        self._store.delete(name for name in gone if _last(name) == PENDING)
        return uploaded | set(ends)

    def _delete(self, names: Iterable[str]) -> None:
        """Delete objects; a checkpoint's last file goes first, so that what is left of it does not look complete."""
        some = sorted(names)
        self._store.delete(name for name in some if _ends_checkpoint(name))
        self._store.in_parallel(
            lambda name: self._store.delete([name]), [name for name in some if not _ends_checkpoint(name)]
        )

    def _put(self, names: Iterable[str]) -> set[str]:
        """Upload files; returns those that still existed."""

        def one(name: str) -> bool:
            source = self.copy / name
            try:
                if source.suffix == SQLITE:
                    self._put_database(source, name)
                else:
                    self._store.put(source, name)
            except (FileNotFoundError, sqlite3.OperationalError):
                if source.exists():
                    raise
                return False  # finished work has just deleted it
            return True

        some = sorted(names)
        return {name for name, was_there in zip(some, self._store.in_parallel(one, some), strict=True) if was_there}

    def _put_database(self, source: Path, name: str) -> None:
        """Upload a database as it is between two transactions, while another thread may write to it."""
        existing = f"file:{quote(str(source))}?mode=rw"
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / source.name
            with (
                contextlib.closing(sqlite3.connect(existing, uri=True)) as one,
                contextlib.closing(sqlite3.connect(target)) as two,
            ):
                one.backup(two)
            self._store.put(target, name)


@contextlib.contextmanager
def reading(url: str) -> Iterator[Path]:
    """A folder with the finished units of a run folder in a store, for readers; models are left out.

    Raises ConfigError if the store cannot be used or the URL holds no run.
    """
    store, folder = ObjectStore(url), _place(url) / "read" / url.rstrip("/").rpartition("/")[2]
    record = Record.load(_place(url) / "read.json")
    try:
        for _ in range(ATTEMPTS):
            found = _finished(store.list())
            known = {name: entry.tag for name, entry in record.files.items() if (folder / name).is_file()}
            missing = [name for name, tag in found.items() if known.get(name) != tag]
            for name in record.files.keys() - found.keys():
                (folder / name).unlink(missing_ok=True)
            store.in_parallel(lambda name: store.get(name, folder / name), missing)
            record.files = {name: Entry(tag, None) for name, tag in found.items()}
            record.save(url)
            if _finished(store.list()) == found:  # otherwise a unit may have been replaced meanwhile
                break
    except RegretlessError:
        raise
    except Exception as error:
        raise failure(url, error, folder) from error
    if RECIPE not in found:
        raise ConfigError(f"{url}: no run folder; expected {RECIPE} in it")
    yield folder


def _finished(found: Mapping[str, str]) -> dict[str, str]:
    unfinished = {_folder(name) for name in found if _last(name) == PENDING and _sibling(name, MANIFEST) not in found}
    return {
        name: tag
        for name, tag in found.items()
        if not name.startswith(f"{LOCKS}/")
        and not NOT_FOR_READERS.search(name)
        and not any(name.startswith(f"{unit}/") for unit in unfinished)
        and _last(name) != PENDING
    }


def scan(folder: Path, *, everything: bool = False) -> dict[str, list[int]]:
    """Size and time of every file to mirror, by its path in `folder`.

    Left out, but for `everything`: what is being written under a temporary name or about to be deleted, and checkpoints
    without their last file. Never included: the lock of this machine.
    """
    found: dict[str, list[int]] = {}
    for path, folders, names in os.walk(folder):
        here = Path(path)
        if not everything:
            folders[:] = [name for name in folders if not _is_unfinished(here / name)]
        for name in names:
            file = here / name
            is_part = LEFTOVER.match(name) or any(name.endswith(SQLITE + end) for end in BESIDE_SQLITE)
            if is_part or (here == folder and name == LOCK):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                found[file.relative_to(folder).as_posix()] = _status(file)
    return found


def _status(file: Path) -> list[int]:
    status = file.stat()
    if file.suffix != SQLITE:
        return [status.st_size, status.st_mtime_ns]
    # A transaction may be in the file beside it.
    log = file.with_name(f"{file.name}-wal")
    extra = [log.stat().st_size, log.stat().st_mtime_ns] if log.is_file() and log.stat().st_size else []
    return [status.st_size, status.st_mtime_ns, *extra]


def _is_unfinished(folder: Path) -> bool:
    is_cut = CHECKPOINT.fullmatch(folder.name) and not (folder / CHECKPOINT_END).is_file()
    is_replaced = folder.name == REPLACED and folder.parent.suffix == CACHE
    return bool(is_cut) or is_replaced or folder.name == NOT_YET or LEFTOVER.match(folder.name) is not None


def _key(unit: Path) -> str | None:
    for name in (MANIFEST, PENDING):
        if (unit / name).is_file():
            return str(read_json(unit / name).get("key"))
    return None


def _units(names: Iterable[str]) -> set[str]:
    """Folders of units of work."""
    return {_folder(name) for name in names if _last(name) in (MANIFEST, PENDING)}


def _unit_of(name: str, units: Collection[str]) -> str | None:
    """The innermost unit that a file belongs to."""
    while name:
        name = _folder(name)
        if name in units:
            return name
    return None


def _is_end(name: str) -> bool:
    return _last(name) == MANIFEST


def _ends_checkpoint(name: str) -> bool:
    return _last(name) == CHECKPOINT_END and CHECKPOINT.fullmatch(_last(_folder(name))) is not None


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt makes sense."""
    return isinstance(error, Exception) and not isinstance(error, RegretlessError)


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _sibling(name: str, last: str) -> str:
    return f"{_folder(name)}/{last}"


def _remove_empty(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        if Path(path) != folder and not any(Path(path).iterdir()):
            Path(path).rmdir()
