"""The plan of a recipe: a row for each stage, with what is done, what would run, counts, cost and time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regretless.core.run_folder import RUN
from regretless.core.stages import STAGES
from regretless.core.terminal import console
from regretless.planning.counts import Counting
from regretless.planning.dry_run import PlannedFolder, State, dry_run, linked_copy
from regretless.planning.estimate import COUNTS, Assumed, Estimate
from regretless.planning.lengths import ResponseLengths
from regretless.planning.measure import Calibration
from regretless.planning.trainings import Trainings
from regretless.runs.pipeline import stages_of, threads
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe
from regretless.runs.side_by_side import places
from regretless.runs.work import PARTS, part_of

ALL_COUNTS = (*COUNTS, "files", "bytes")
SHOWN_PROBLEM = 200
"""Most characters of a problem in the plan."""


@dataclass
class Row:
    """One stage of a plan."""

    stage: str
    estimates: list[Estimate]
    places: int = 1
    """Parts of the stage that a run does at the same time."""

    @property
    def state(self) -> State:
        """The state of the whole stage: interrupted if some of it is done."""
        states = {one.unit.state for one in self.estimates}
        if len(states) == 1:
            return states.pop()
        if states == {State.DONE, State.UNKNOWN}:
            return State.UNKNOWN
        return State.INTERRUPTED if states & {State.DONE, State.INTERRUPTED} else State.RUN

    @property
    def state_text(self) -> str:
        """The state in words, with the units or parts that are done."""
        if self.state is not State.INTERRUPTED:
            return self.state.value
        if len(self.estimates) == 1:
            parts = self.estimates[0].parts
            return "interrupted" if parts is None else f"interrupted, {parts[0]:,} of {parts[1]:,} parts"
        done = sum(one.unit.state is State.DONE for one in self.estimates)
        begun = sum(one.unit.state is State.INTERRUPTED for one in self.estimates)
        return f"{done} of {len(self.estimates)} done" + (f", {begun} interrupted" if begun else "")

    def total(self, name: str, *, of_judges: bool = False) -> tuple[float, bool] | None:
        """Sum of a count over the units, and whether it rests on assumptions; None if no unit has it."""
        having = [one for one in self.estimates if name in one.counts and one.is_judge == of_judges]
        if not having:
            return None
        return sum(one.counts[name] for one in having), any(name in one.guessed for one in having)

    @property
    def taken(self) -> float | None:
        """Seconds that the finished units took; None if none is finished."""
        found = [one.unit.seconds for one in self.estimates if one.unit.state is State.DONE]
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if known else None

    @property
    def seconds(self) -> float | None:
        """Seconds of work for what is left to do; None if this is unknown for any of its units."""
        found = [_left(one) for one in self.estimates]
        return None if None in found else sum(seconds for seconds in found if seconds is not None)

    @property
    def elapsed(self) -> float:
        """Seconds until all of it is done, as far as they are known: `seconds`, or less with parts side by side."""
        parts: dict[str, float] = {}
        for one in self.estimates:
            part = part_of(self.stage, one.unit.name) if self.places > 1 else ""
            parts[part] = parts.get(part, 0.0) + (_left(one) or 0.0)
        ends = [0.0] * self.places
        for seconds in parts.values():
            ends[ends.index(min(ends))] += seconds
        return max(ends)

    @property
    def problems(self) -> list[str]:
        """Why a run would stop in this stage."""
        return list(dict.fromkeys(one.unit.problem for one in self.estimates if one.unit.problem))


@dataclass
class Plan:
    """What a run of a recipe would do."""

    recipe: str
    run_dir: str
    rows: list[Row]
    assumptions: list[str]
    problems: list[str]
    gpus: int
    measured: bool
    device: str
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Seconds for everything that is left; None if any stage's time is unknown."""
        return None if None in [row.seconds for row in self.rows] else self.known_seconds

    @property
    def known_seconds(self) -> float:
        """Seconds for everything that is left and whose time is known."""
        return sum(row.elapsed for row in self.rows)

    @property
    def dollars(self) -> float | None:
        """Cost of what judges are yet to be asked; None if no judge is left to ask, or a price is not set."""
        judged = [one for row in self.rows for one in row.estimates if one.is_judge and one.left]
        costs = [one.counts.get("dollars") for one in judged]
        return None if not costs or None in costs else sum(cost for cost in costs if cost is not None)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "recipe": self.recipe,
            "run_dir": self.run_dir,
            "device": self.device,
            "gpus": self.gpus,
            "measured": self.measured,
            "seconds": self.seconds,
            "dollars": self.dollars,
            "stages": [_stage_json(row) for row in self.rows],
            "assumptions": self.assumptions,
            "problems": self.problems,
            "notes": self.notes,
        }


def make_plan(
    recipe: Recipe,
    *,
    measure: bool = False,
    gpus: int | None = None,
    assumed: Assumed | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan of a recipe; its run folder stays as it is.

    measure: run a few batches of each stage in a temporary folder, for predictions of time. gpus: devices to predict
    for; by default those that are visible. say: called with what is being measured.
    """
    assumed = assumed or Assumed()
    visible = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    devices = visible if gpus is None else gpus
    with _quiet(), linked_copy(recipe.run_dir) as place, threads(recipe.threads):
        problems = recipe_problems(recipe)
        here = recipe.model_copy(update={"output_dir": str(place)})
        folder = dry_run(here)
        trainings = Trainings(here)
        lengths = ResponseLengths(here, folder, trainings, given=assumed.response_tokens)
        counting = Counting(here, folder, trainings, lengths, assumed, recipe.run_dir)
        counting.count_all()
        notes: list[str] = []
        if measure:
            # With GPUs, they divide the work, and `parallel` does not.
            calibration = Calibration(counting, max(1, devices), 1 if devices else places(recipe), say)
            calibration.run()
            notes = list(calibration.notes)
        plan = Plan(
            recipe=recipe.name,
            run_dir=str(recipe.run_dir),
            rows=_rows(here, folder, counting),
            assumptions=[_in_run(text, place) for text in counting.notes],
            problems=[_in_run(text, place) for text in problems],
            gpus=devices,
            measured=measure,
            device=_device(),
            notes=[_in_run(text, place) for text in notes],
        )
        for row in plan.rows:
            for one in row.estimates:
                one.unit.problem = one.unit.problem and _in_run(one.unit.problem, place)
    return plan


def _rows(recipe: Recipe, folder: PlannedFolder, counting: Counting) -> list[Row]:
    rows = []
    for name in stages_of(recipe):
        place = STAGES[name].place
        estimates = [counting.estimates[unit.name] for unit in folder.units.values() if unit.stage == place]
        rows.append(Row(name, estimates, places(recipe) if name in PARTS else 1))
    return rows


def _left(one: Estimate) -> float | None:
    """Seconds of work of a unit; None if unknown."""
    return 0.0 if one.unit.state is State.DONE else one.seconds


def _in_run(text: str, place: Path) -> str:
    """A text about the plan's own folder as one about the run folder, in one line."""
    lines = text.replace(str(place), RUN).splitlines() or [""]
    return lines[0] if len(lines[0]) <= SHOWN_PROBLEM else f"{lines[0][:SHOWN_PROBLEM]} …"


def _device() -> str:
    if not torch.accelerator.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    kind = torch.accelerator.current_accelerator()
    return torch.cuda.get_device_name() if kind is not None and kind.type == "cuda" else str(kind)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block without messages, progress bars and results: its stages' numbers are not those of a run."""
    before, console.quiet = console.quiet, True
    try:
        # Each table of results is printed by a console of its own.
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        console.quiet = before


def _stage_json(row: Row) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "state": row.state.value,
        "counts": _counts_json([row], of_judges=False),
        "judge": _counts_json([row], of_judges=True),
        "seconds": row.seconds,
        "taken": row.taken,
        "problems": row.problems,
        "units": [
            {
                "name": one.unit.name,
                "state": one.unit.state.value,
                "waits_for": list(one.unit.waits_for),
                "parts": None if one.parts is None else list(one.parts),
                "counts": one.counts,
                "estimated": sorted(one.guessed),
                "seconds": _left(one),
                "taken": one.unit.seconds if one.unit.state is State.DONE else None,
                "problem": one.unit.problem,
            }
            for one in row.estimates
        ],
    }


def _counts_json(rows: Sequence[Row], *, of_judges: bool) -> dict[str, Any]:
    found = {name: row.total(name, of_judges=of_judges) for row in rows for name in ALL_COUNTS}
    return {name: {"value": total[0], "estimated": total[1]} for name, total in found.items() if total is not None}
