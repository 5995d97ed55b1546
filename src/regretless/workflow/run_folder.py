"""Units of work in a run folder: skipped if nothing they depend on has changed, resumed if they were interrupted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

import xxhash

from regretless.core import interrupt, progress
from regretless.core.errors import ConfigError, DataError, RegretlessError, storage_error
from regretless.core.files import LEFTOVER, fingerprint, path_fingerprint
from regretless.core.paths import NamedPath, is_model
from regretless.core.ranks import is_first_process, processes
from regretless.core.settings import Section, named_paths
from regretless.core.terminal import console, print_note
from regretless.workflow.stage_folder import (
    CACHE,
    MANIFEST,
    PENDING,
    REPLACED,
    UNUSED,
    StageFolder,
    check_ours,
    delete_results,
    free,
    mark_of,
    read_mark,
)
from regretless.workflow.unit_store import UnitStore
from regretless.workflow.workers import Need

S = TypeVar("S", bound=Section)
RUN = "{run}"
"""Placeholder for the run folder in the strings of a recipe, so that settings do not depend on its location."""
BASE = "base"
"""Label of the model before preference training."""
LOCK = ".lock"
PROGRESS = ".progress.json"
"""How far the bars of a folder's run are, while there are some (`progress.written_to`)."""
RECIPE = "recipe.yaml"
MODEL_SUFFIXES = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
"""Where a tokenizer with several chat templates has all but the first."""
NOT_THE_MODEL = {MANIFEST, PENDING, "trainer_state.json", "training_args.bin", "card.json"}
"""Files next to a model's that record when and how it was made: equal models may differ in them."""


def substitute(value: Any, run: Path) -> Any:
    """The value with `{run}` in all its strings replaced by the run folder."""
    if isinstance(value, str):
        text = value.replace(RUN, str(run))
        return NamedPath(text) if isinstance(value, NamedPath) else text
    if isinstance(value, Path):
        return Path(str(value).replace(RUN, str(run)))
    if isinstance(value, Mapping):
        return {key: substitute(item, run) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(substitute(item, run) for item in value)
    return value


def resolve(section: S, run: Path) -> S:
    """The section with `{run}` in all its strings replaced by the run folder."""
    return section.parse(substitute(section.model_dump(exclude_unset=True), run), where=type(section).__name__)


def existing_paths(settings: Any, run: Path) -> dict[str, Path]:
    """Existing files and folders that settings name, by the text that names them."""
    return {text: path for text, path in _paths(settings, run).items() if path.exists()}


def _paths(settings: Any, run: Path) -> dict[str, Path]:
    return {str(text): Path(substitute(str(text), run)) for _, text in named_paths(settings)}


_known: dict[tuple[Any, ...], str] = {}


def content(path: Path) -> str:
    """Hash of a file, of a model's files in a folder, or of everything in any other folder.

    Raises DataError if the path does not exist.
    """
    if is_model(path):
        files = sorted(file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES and file.is_file())
        kept = [*(file for file in files if file.name not in NOT_THE_MODEL), *path.glob(MORE_TEMPLATES)]
        return fingerprint({str(file.relative_to(path)): _file_content(file) for file in kept})
    return _file_content(path) if path.is_file() else path_fingerprint(path)


def _file_content(path: Path) -> str:
    # Models are inputs of many units, so each is read once while it is unchanged.
    status = path.stat()
    key = (path.resolve(), status.st_size, status.st_mtime_ns)
    if key not in _known:
        _known[key] = _table_content(path) if path.suffix == ".parquet" else path_fingerprint(path)
    return _known[key]


def _table_content(path: Path) -> str:
    """Hash of a table's rows; metadata of its writer, such as when its inputs were made, does not count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as handle:
            file = pq.ParquetFile(handle)
            digest = xxhash.xxh3_128(str(file.schema_arrow.remove_metadata()).encode())
            for batch in file.iter_batches():
                digest.update(batch.serialize())
    except (pa.ArrowException, OSError):
        return path_fingerprint(path)  # its reader reports the problem
    return str(digest.hexdigest())


OWNER = re.compile(r"process (\d+) on (.*), since")
"""What a lock file says of the process that holds it."""
ENDING = "processes of an earlier run are about to end; waiting for them"
OF_THE_RUN, OF_ITS_PROCESSES = (1, 0), (1, 1)
"""Length and start of the parts of a lock file: what the run holds, and what processes that it has started share."""


_held: dict[tuple[int, int, int], Path] = {}
"""Files and folders that are locked, by process and identity.

A process may lock them twice. It never opens a lock file that it holds: closing it would end the lock.
"""


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), status.st_dev, status.st_ino


def _holds(path: Path) -> bool:
    """True if this process has locked what is at this path now, and not another file of that name."""
    try:
        return _identity(path.lstat()) in _held
    except OSError:
        return False


@contextlib.contextmanager
def lock(file: Path, what: Path) -> Iterator[None]:
    """Hold a lock on `file` for the block. Raises ConfigError if another process uses `what`.

    The folder of the file is locked, too: somebody may remove the file. NFS locks no folders; there, a run whose file
    was removed ends when it sees another in its place (`_check_alone`).
    """
    if _holds(file):
        yield
        return
    with contextlib.ExitStack() as held:
        handle = held.enter_context(_open_lock(file))
        # The lock belongs to the process, not to an open file: workers that outlive a killed run must not hold it.
        _take(handle, fcntl.LOCK_EX, what)
        handle.seek(0)
        owner = handle.read()
        if owner and OWNER.match(owner) is None:
            raise ConfigError(f"{file}: expected a lock file, found something else; remove it")
        _await_processes(handle, what)
        held.enter_context(_locked_folder(file.parent, what, was_left=bool(owner)))
        held.enter_context(_noted(file, os.fstat(handle.fileno())))
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%H:%M:%S')}")
        handle.flush()
        with interrupt.saying(f"interrupted: finished work stays in {what}; the same command resumes from there"):
            yield


def _take(handle: TextIO, kind: int, what: Path) -> None:
    """Lock what a run holds of a lock file. Raises ConfigError if another process has done so."""
    try:
        fcntl.lockf(handle, kind | fcntl.LOCK_NB, *OF_THE_RUN)
    except (BlockingIOError, PermissionError) as error:
        handle.seek(0)
        owner = handle.read().strip() or "unknown process"
        with contextlib.suppress(OSError):
            fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB, *OF_THE_RUN)
            owner = "a command whose output is in it"
        raise ConfigError(
            f"{what}: another run uses it ({owner}); wait for it, or choose another output folder"
        ) from error


@contextlib.contextmanager
def _without_run(folder: Path) -> Iterator[None]:
    """For the block, no run or study begins in a folder; others may be at work in folders inside it.

    Raises ConfigError if a run is at work in it.
    """
    with contextlib.ExitStack() as held:
        file = folder / LOCK
        with contextlib.suppress(OSError):  # no lock file, or one that is not to be read
            if file.is_file() and not _holds(file):
                handle = held.enter_context(file.open(encoding="utf-8", errors="replace"))
                if OWNER.match(handle.read()):
                    _take(handle, fcntl.LOCK_SH, folder)
                    held.enter_context(_noted(file, os.fstat(handle.fileno())))
        yield


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """For the block, no run begins in any of the folders that one is in. Raises ConfigError if a run is in one."""
    with contextlib.ExitStack() as held:
        for outer in folder.resolve().parents:
            held.enter_context(_without_run(outer))
        yield


@contextlib.contextmanager
def _noted(path: Path, status: os.stat_result) -> Iterator[None]:
    """Note for the block that this process has locked the file or folder."""
    identity = _identity(status)
    _held[identity] = path
    try:
        yield
    finally:
        del _held[identity]


@contextlib.contextmanager
def _locked_folder(folder: Path, what: Path, *, was_left: bool) -> Iterator[None]:
    """Lock a folder itself for the block. was_left: its lock file is of a run whose processes may be about to end."""
    if _holds(folder):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system that locks no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if not was_left:
                    raise ConfigError(
                        f"{what}: another run uses it, whose lock file was removed; wait for it, or choose another "
                        "output folder"
                    ) from error
                console.print(f"{what}: {ENDING}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        with _noted(folder, os.fstat(descriptor)):
            yield
    finally:
        # Not left to the closing: a process that was forked meanwhile has the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _check_alone() -> None:
    """Raise ConfigError if somebody has removed a lock file of this process, and another run has begun behind it."""
    for (process, *_), file in list(_held.items()):
        if process != os.getpid() or _holds(file) or not file.is_file():
            continue
        owner = OWNER.match(file.read_text(encoding="utf-8", errors="replace"))
        if owner and owner.groups() != (str(process), platform.node()):
            raise ConfigError(f"{file}: was removed, and another run has begun ({owner[0]}); end one")


def _await_processes(handle: TextIO, what: Path) -> None:
    """Wait until the processes of a run that was killed have noticed it, and ended."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, *OF_ITS_PROCESSES)
    except (BlockingIOError, PermissionError):
        console.print(f"{what}: {ENDING}")
        fcntl.lockf(handle, fcntl.LOCK_EX, *OF_ITS_PROCESSES)
    fcntl.lockf(handle, fcntl.LOCK_UN, *OF_ITS_PROCESSES)


@contextlib.contextmanager
def lock_beside(output: Path) -> Iterator[None]:
    """Hold a lock on an output folder, in the folder of its cache: both are gone at the end, unless that has files.

    For a folder that is emptied, and so cannot contain the lock itself. Raises ConfigError if another process uses
    `output`.
    """
    file = output.with_name(output.name + CACHE) / LOCK
    while True:
        with contextlib.ExitStack() as held:
            held.enter_context(_inside(output))
            file.parent.mkdir(parents=True, exist_ok=True)
            # Another process, at its end, may remove the folder before the file is opened here, or the file behind it:
            # a lock on that one excludes nobody.
            with contextlib.suppress(FileNotFoundError):
                held.enter_context(lock(file, output))
            if not _holds(file):
                continue
            try:
                yield
            finally:
                if _holds(file):
                    file.unlink()
                with contextlib.suppress(OSError):  # it has files
                    file.parent.rmdir()
            return


def _open_lock(file: Path) -> TextIO:
    """The lock file, never through a symbolic link: its creator would choose the file that is written to."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        kind = "symbolic link" if error.errno == errno.ELOOP else "folder or socket"
        raise ConfigError(f"{file}: expected a lock file, found a {kind}; remove it") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{file}: expected a lock file, found a pipe or device; remove it")
    return os.fdopen(descriptor, "a+", encoding="utf-8", errors="replace")


@dataclass
class Outcome:
    """The outcome of a unit of work."""

    folder: Path
    summary: dict[str, Any]
    seconds: float
    ran: bool


@dataclass(frozen=True)
class Unit:
    """A unit of work: the name of its folder, and what its result depends on."""

    name: str
    settings: Mapping[str, Any]
    """JSON values, with `{run}` for the run folder; files that they name count by their content, like `inputs`."""
    inputs: Mapping[str, Path] = field(default_factory=dict)
    label: str = ""
    """Its name in messages; by default that of its folder."""
    keeps: tuple[str, ...] = ()
    """Results that a run with other settings sets aside instead of deleting them (`StageFolder.begin`)."""
    stage: str = ""
    """The stage whose work it is."""
    writes: tuple[str, ...] = ("*",)
    """Patterns of the names that the stage writes into its folder (`StageFolder.writes`)."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What the work is given, besides the folder: plain data, so that another process can do it."""
    need: Need | None = None
    """What doing it takes; None if that is neither a model, nor a server, nor much time."""
    group: str = ""
    """A name that units share which depend on each other. Those of other names can be done at the same time."""
    models_stay: bool = False
    """True if the models that it loads stay loaded for the units after it."""

    def __str__(self) -> str:
        return self.label or self.name


@dataclass
class RunFolder:
    """A folder of units. Use it inside `locked()`: two concurrent runs would damage each other's work."""

    path: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    store: UnitStore | None = None
    """Finished units of this and other run folders, to take and to add to."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for the block. Raises ConfigError if another process uses it."""
        self.path.mkdir(parents=True, exist_ok=True)
        if not is_first_process():
            yield
            return
        with _inside(self.path), lock(self.path / LOCK, self.path), progress.written_to(self.path / PROGRESS):
            self._clear()
            yield

    def _clear(self) -> None:
        """Delete what interrupted processes were about to move or to delete, but not in other runs' folders below.

        Raises ConfigError if a run, or a command, is at work in a folder below.
        """
        for folder, names, files in os.walk(self.path):
            if Path(folder) != self.path and LOCK in files:
                with _without_run(Path(folder)):
                    names.clear()
                continue
            for name in filter(LEFTOVER.fullmatch, [*names, *files]):
                path = Path(folder, name)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            names[:] = [name for name in names if not LEFTOVER.fullmatch(name)]

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """For the block, work in the folder as a process of the run that has locked it: the next run waits for it."""
        with _open_lock(self.path / LOCK) as handle:
            fcntl.lockf(handle, fcntl.LOCK_SH, *OF_ITS_PROCESSES)
            yield

    def do_together(
        self, units: Sequence[Unit], work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]]
    ) -> list[Outcome]:
        """Run `work` once on all units that are not finished, as {name: folder}; it returns their summaries.

        A unit is finished if its folder has a result of the same settings and inputs. A manifest's seconds are an equal
        share of the work's. Raises what `work` raises, and DataError if an input is missing.
        """
        folders = {unit.name: self.stage_folder(unit) for unit in units}
        with self._taken(folders.values()):
            todo = {unit.name: unit for unit in units if not folders[unit.name].is_done()}
            self._do_all(todo, folders, work)
        for unit in units:
            if unit.name not in todo:
                if (known := self.outcomes.get(unit.name)) is not None and known.ran:
                    continue  # another process of this run has done it, and said so
                self.outcomes[unit.name] = _known_outcome(folders[unit.name])
            _say(unit, self.outcomes[unit.name])
        return [self.outcomes[unit.name] for unit in units]

    def _do_all(
        self,
        todo: Mapping[str, Unit],
        folders: Mapping[str, StageFolder],
        work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]],
    ) -> None:
        for name, unit in todo.items():
            self._prepare(folders[name], unit)
        started = time.monotonic()
        try:
            with _paused([folders[name] for name in todo]):
                summaries = work({name: folders[name].path for name in todo}) if todo else []
        except RegretlessError as error:
            raise type(error)(f"{', '.join(map(str, todo.values()))}: {error}") from error
        except Exception as error:
            # Libraries do not always say which file they could not write. The error itself goes on: one raised in its
            # place would keep the work's files open, and so a full disk busy.
            if getattr(error, "filename", None) is None and storage_error(error) is not None:
                with contextlib.suppress(AttributeError):
                    error.filename = self.path  # type: ignore[attr-defined]
            raise
        _check_alone()
        seconds = (time.monotonic() - started) / max(1, len(todo))
        for unit, summary in zip(todo.values(), summaries, strict=True):
            if is_first_process():
                folders[unit.name].finish(str(unit), dict(unit.settings), summary, seconds)
                if self.store is not None:
                    self.store.put(folders[unit.name])
            self.outcomes[unit.name] = Outcome(folders[unit.name].path, summary, seconds, ran=True)

    @contextlib.contextmanager
    def _taken(self, folders: Iterable[StageFolder]) -> Iterator[None]:
        """A block before which units are taken from the store; nobody else does those that are left.

        What is finished here and not in the store is put there: a kill came between the two.
        """
        store = self.store
        if store is None:
            yield
            return
        open_ones = [folder for folder in folders if not (folder.is_done() and store.has(folder))]
        with store.held(folder.key for folder in open_ones):
            for folder in open_ones:
                if folder.is_done():  # perhaps by another process, just now
                    store.put(folder)
                else:
                    store.take(folder)
            yield

    def stage_folder(self, unit: Unit) -> StageFolder:
        """The folder of a unit, with the key of this request. Raises DataError if an input is missing.

        A finished result of this key that other work was about to replace is put back there.
        """
        folder = self._keyed(unit)
        if processes() == 1:  # several would look at the folder while it is being moved
            folder.put_back()
        return folder

    def needed(self, unit: Unit) -> dict[str, Path]:
        """What other stages make and a unit needs: its inputs, and what its settings name in the run folder."""
        # Other names may be those of something on the hub.
        named = {text: path for text, path in _paths(unit.settings, self.path).items() if RUN in text}
        return {**named, **unit.inputs}

    def _keyed(self, unit: Unit) -> StageFolder:
        needed = self.needed(unit)
        paths = {**existing_paths(unit.settings, self.path), **needed}
        if missing := [path for path in needed.values() if not path.exists()]:
            makers = [path.parent / MANIFEST for path in missing if read_mark(path.parent / MANIFEST) is not None]
            advice = f"delete {makers[0]}, and the same command makes it again" if makers else "its stage has not run"
            raise DataError(f"{unit}: {', '.join(map(str, missing))} not found; {advice}")
        hashes = {key: content(path) for key, path in sorted(paths.items())}
        key = StageFolder.key_of(str(unit), unit.settings, hashes)
        return StageFolder(self.path / unit.name, key, self.path / UNUSED / unit.name, unit.writes)

    def has_done(self, unit: Unit) -> bool:
        """True if the unit is finished with these settings and inputs, which are there."""
        try:
            return read_mark(self.path / unit.name / MANIFEST) is not None and self._keyed(unit).is_done()
        except (RegretlessError, OSError):
            return False

    def has(self, path: Path) -> bool:
        """True if a file exists by now. (In a plan: if it will exist by the time that a run arrives here.)"""
        return path.is_file()

    def manifests(self) -> list[Path]:
        """Manifests of all finished units."""
        return manifests(self.path)

    def awaits(self, name: str) -> bool:
        """True if results below the folder `name` are still missing: never in a run, which makes them first."""
        return False

    def _prepare(self, folder: StageFolder, unit: Unit) -> None:
        if not is_first_process():
            _await(folder)
            return
        stage = folder.manifest().get("stage")
        if stage is not None and stage.partition("/")[0] != str(unit).partition("/")[0]:
            raise ConfigError(f"{folder.path}: holds the result of {stage}; choose another output folder")
        folder.begin(unit.keeps)

    def mark_unfinished(self, name: str) -> None:
        """Make the folder of a unit one that its next run starts over, whatever is written there in the meantime.

        Raises ConfigError for a folder with somebody else's files.
        """
        check_ours(self.path / name)
        StageFolder(self.path / name, "none").give_up()

    def select(self, parent: str, wanted: Collection[str], among: Collection[str] | None = None) -> None:
        """Leave only the wanted units below `parent`, so that an earlier recipe's results are not mistaken for this
        one's.

        Others (of `among`, if set) are moved to the folder `unused`; wanted ones are moved back from there.
        """
        home, aside = self.path / parent, self.path / UNUSED / parent
        for name in wanted:
            if is_part_of_a_run(aside / name) and not (home / name).exists():
                home.mkdir(parents=True, exist_ok=True)
                (aside / name).rename(home / name)
                _say_moved(aside / name, home / name, "asked for again")
        for path in self.unwanted(parent, wanted, among):
            aside.mkdir(parents=True, exist_ok=True)
            _set_aside(path, aside / path.name)

    def unwanted(self, parent: str, wanted: Collection[str], among: Collection[str] | None = None) -> list[Path]:
        """Folders of units below `parent` that `select` moves aside; never somebody else's."""
        home = self.path / parent
        others = [path for path in home.iterdir() if path.name not in wanted] if home.is_dir() else []
        return [
            path
            for path in others
            if path.suffix != CACHE and (among is None or path.name in among) and is_part_of_a_run(path)
        ]


def _set_aside(path: Path, target: Path) -> None:
    """Move what a recipe does not ask for to `target`; what is there of the same units is deleted, and no other."""
    reason = "not part of this recipe"
    if target.is_dir() and path.is_dir() and mark_of(path) is None:  # folders of units, which may be others
        for inner in sorted(path.iterdir()):
            _set_aside(inner, target / inner.name)
        path.rmdir()
        return
    if target.exists():
        delete_results(target)
        reason += ", and in the place of an earlier one"
    target = free(target)
    path.rename(target)
    _say_moved(path, target, reason)


def _say_moved(source: Path, target: Path, reason: str) -> None:
    print_note(f"moved {source} to {target}: {reason}")


def manifests(run: Path) -> list[Path]:
    """Manifests of all finished units in a run folder, without those of results that are being replaced."""
    found = [path for path in run.rglob(MANIFEST) if path.parent.name != REPLACED or path.parent.parent.suffix != CACHE]
    return [path for path in found if read_mark(path) is not None]


def is_part_of_a_run(folder: Path) -> bool:
    """True for the folder of a unit, and for one with such folders in it."""
    marks = (path for name in (MANIFEST, PENDING) for path in folder.rglob(name))
    return not folder.is_symlink() and any(read_mark(path) is not None for path in marks)


@contextlib.contextmanager
def _paused(folders: Sequence[StageFolder]) -> Iterator[None]:
    """A block of work that may end before the units of these folders are finished."""
    try:
        yield
    except BaseException:
        for folder in folders if is_first_process() else ():
            with contextlib.suppress(OSError):  # a full disk, which the work has met before
                folder.pause()
        raise


def _known_outcome(folder: StageFolder) -> Outcome:
    manifest = folder.manifest()
    return Outcome(folder.path, manifest["summary"], manifest["seconds"], ran=False)


def _say(unit: Unit, outcome: Outcome) -> None:
    if is_first_process():
        text = f"{outcome.seconds:.1f} s; {summary_line(outcome.summary)}" if outcome.ran else "unchanged, skipped"
        console.print(f"{unit}: {text}", soft_wrap=True)


def _await(folder: StageFolder) -> None:
    """Wait until rank 0 has prepared the folder; through files, because training sets up its own channels."""
    while not folder.is_interrupted():
        time.sleep(0.1)


HEADLINES = ("eval_rewards/accuracies", "eval_rewards/margins")
DETAILS = ("eval_entropy", "eval_mean_token_accuracy")
"""Numbers of a summary that its line has although, or lacks because, they are some of many: what preferences gained."""


def summary_line(summary: Mapping[str, Any]) -> str:
    """The plain numbers and short texts of a summary, in one line; families of numbers (`a/b`) are left out."""
    shown = {
        key: value
        for key, value in summary.items()
        if isinstance(value, int | float | str) and (key in HEADLINES or ("/" not in key and key not in DETAILS))
    }
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )
