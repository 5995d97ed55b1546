"""A recipe gone through without its work: which units are finished, interrupted, or would run.

The stages themselves say which units there are (`Stage.units`), and the key of each says whether it is finished
(`RunFolder.stage_folder`). They do so in a temporary folder with links to the files of the run folder, which stays as
it is.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from regretless.core.errors import RegretlessError, storage_error
from regretless.runs.pipeline import do_stage, prepare
from regretless.runs.recipe import Recipe
from regretless.runs.stages import Run
from regretless.workflow.run_folder import Outcome, RunFolder, Unit, existing_paths
from regretless.workflow.stage_folder import CACHE, MANIFEST


class State(StrEnum):
    """What a run would do with a unit of work."""

    DONE = "done"
    INTERRUPTED = "interrupted"
    RUN = "would run"
    UNKNOWN = "unknown"
    """Finished if the stages before it, which would run, have the same result as before."""


@dataclass
class PlannedUnit:
    """One unit of work of a run, in the folder `name`."""

    unit: Unit
    state: State
    folder: Path
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of the finished unit, or of the one that the plan made."""
    seconds: float | None = None
    """How long it took: the finished unit, or the one that the plan made."""
    waits_for: tuple[str, ...] = ()
    """Units that would run before it and that it depends on."""
    made: bool = False
    """True if the plan made it, so that its result is known although a run would make it again."""
    stands_for_others: bool = False
    """True if it stands for units of its stage that could not be listed."""
    problem: str | None = None
    """Why a run would stop here, as far as this can be known."""

    @property
    def name(self) -> str:
        """Its folder in the run folder."""
        return self.unit.name

    @property
    def kind(self) -> str:
        """The kind of its work (`Need.kind`); empty if it needs nothing."""
        return "" if self.unit.need is None else self.unit.need.kind

    @property
    def stage(self) -> str:
        """The folder of the stage that it belongs to."""
        return self.name.partition("/")[0]

    @property
    def is_known(self) -> bool:
        """True if its result is at hand."""
        return self.state is State.DONE or self.made

    @property
    def outcome(self) -> Outcome:
        """Its outcome, as far as it is known."""
        return Outcome(self.folder, dict(self.summary), self.seconds or 0.0, ran=False)


@dataclass
class PlannedFolder(RunFolder):
    """A run folder whose units are recorded instead of done.

    Except for those that need nothing (`Unit.need`): they are made, and known is what comes out of them.
    """

    units: dict[str, PlannedUnit] = field(default_factory=dict)

    def do_together(
        self, units: Sequence[Unit], work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]]
    ) -> list[Outcome]:
        """Record units and what a run would do with them."""
        return [self._record(unit, work) for unit in units]

    def _record(self, unit: Unit, work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]]) -> Outcome:
        needed = self.needed(unit)
        named = {**existing_paths(unit.settings, self.path), **needed}
        before = tuple(dict.fromkeys(one.name for path in named.values() if (one := self._maker(path)) is not None))
        planned = PlannedUnit(unit, State.RUN, self.path / unit.name, waits_for=before)
        self.units[unit.name] = planned
        if missing := [path for path in needed.values() if not path.exists()]:
            absent = [str(path) for path in missing if self._maker(path) is None]
            planned.problem = f"{', '.join(absent)} not found" if absent else None
            return planned.outcome
        folder = self.stage_folder(unit)
        # A manifest is another one after every run of its unit.
        renewed = any(path.name == MANIFEST and self._maker(path) is not None for path in unit.inputs.values())
        if folder.is_done() and not renewed:
            manifest = folder.manifest()
            planned.state = State.UNKNOWN if before else State.DONE
            planned.summary, planned.seconds = manifest["summary"], manifest["seconds"]
        elif not before:
            planned.state = State.INTERRUPTED if folder.is_interrupted() else State.RUN
            if unit.need is None:
                self._make(planned, work)
        return planned.outcome

    def _make(
        self,
        planned: PlannedUnit,
        work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]],
    ) -> None:
        try:
            (outcome,) = super().do_together([planned.unit], work)
        except RegretlessError as error:
            planned.problem = str(error)
            return
        planned.made, planned.summary, planned.seconds = True, outcome.summary, outcome.seconds

    def _maker(self, path: Path) -> PlannedUnit | None:
        """The recorded unit that would make a file anew, or None."""
        for unit in self.units.values():
            if not unit.is_known and path.is_relative_to(unit.folder):
                return unit
        return None

    def has(self, path: Path) -> bool:
        """True if a file exists, or would by the time that a run arrives here."""
        return path.is_file() or self._maker(path) is not None

    def manifests(self) -> list[Path]:
        """Manifests of all units that are or would be finished."""
        to_come = [unit.folder / MANIFEST for unit in self.units.values() if not unit.is_known]
        return list(dict.fromkeys([*super().manifests(), *to_come]))

    def awaits(self, name: str) -> bool:
        """True if a recorded unit below the folder `name` is not finished."""
        here = self.path / name
        return any(not unit.is_known and unit.folder.is_relative_to(here) for unit in self.units.values())


def dry_run(recipe: Recipe) -> PlannedFolder:
    """Every unit of a recipe, in order. `recipe.run_dir` is a folder that may be written to (`linked_copy`)."""
    folder = PlannedFolder(recipe.run_dir)
    prepare(recipe, folder)
    run = Run.of(recipe, folder)
    for stage in run.stages():
        try:
            do_stage(run, stage.name)
        except (RegretlessError, OSError) as error:
            known = error if isinstance(error, RegretlessError) else storage_error(error) or error
            name, place = f"{stage.place}/…", folder.path / stage.place
            unit = Unit(name, {}, stage=stage.name)
            folder.units[name] = PlannedUnit(unit, State.RUN, place, stands_for_others=True, problem=str(known))
    return folder


@contextlib.contextmanager
def linked_copy(run: Path) -> Iterator[Path]:
    """A temporary folder with the folders of `run`, and links to its files; caches beside the units are left out.

    Links may be replaced and removed, and no file of the run folder changes.
    """
    with tempfile.TemporaryDirectory(prefix="regretless-plan-") as temporary:
        place = Path(temporary).resolve() / "run"
        place.mkdir()
        for folder, folders, files in os.walk(run):
            here = place / Path(folder).relative_to(run)
            folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(CACHE)]
            links = [name for name in folders if (Path(folder) / name).is_symlink()]
            for name in folders:
                if name not in links:
                    (here / name).mkdir()
            for name in [*files, *links]:
                if not name.startswith("."):
                    (here / name).symlink_to((Path(folder) / name).resolve())
        yield place
