"""The plan of a recipe: a row for each stage, with what is done, what would run, counts, and the cost of judges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regretless.core.terminal import console
from regretless.runs.planning.counts import COUNTS, Assumed, Counting, Estimate
from regretless.runs.planning.dry_run import State, dry_run, linked_copy
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES, stages_of
from regretless.workflow.run_folder import RUN

SHOWN_PROBLEM = 200
"""Most characters of a problem in the plan."""


@dataclass
class Row:
    """One stage of a plan."""

    stage: str
    estimates: list[Estimate]

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

    @property
    def dollars(self) -> float | None:
        """Cost of what judges are yet to be asked; None if no judge is left to ask, or a price is not set."""
        judged = [
            one for row in self.rows for one in row.estimates if one.is_judge and one.unit.state is not State.DONE
        ]
        costs = [one.counts.get("dollars") for one in judged]
        return None if not costs or None in costs else sum(cost for cost in costs if cost is not None)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "recipe": self.recipe,
            "run_dir": self.run_dir,
            "dollars": self.dollars,
            "stages": [_stage_json(row) for row in self.rows],
            "assumptions": self.assumptions,
            "problems": self.problems,
        }


def make_plan(recipe: Recipe, assumed: Assumed | None = None) -> Plan:
    """The plan of a recipe; its run folder stays as it is."""
    with _quiet(), linked_copy(recipe.run_dir) as place:
        problems = recipe_problems(recipe)
        here = recipe.model_copy(update={"output_dir": str(place)})
        folder = dry_run(here)
        counting = Counting(here, folder, assumed or Assumed(), recipe.run_dir)
        counting.count_all()
        for unit in folder.units.values():
            unit.problem = unit.problem and _in_run(unit.problem, place)
        rows = [
            Row(name, [one for one in counting.estimates.values() if one.unit.stage in STAGES[name].top_folders()])
            for name in stages_of(recipe)
        ]
        return Plan(
            recipe=recipe.name,
            run_dir=str(recipe.run_dir),
            rows=rows,
            assumptions=[_in_run(text, place) for text in counting.notes],
            problems=[_in_run(text, place) for text in problems],
        )


def _in_run(text: str, place: Path) -> str:
    """A text about the plan's own folder as one about the run folder, in one line."""
    lines = text.replace(str(place), RUN).splitlines() or [""]
    return lines[0] if len(lines[0]) <= SHOWN_PROBLEM else f"{lines[0][:SHOWN_PROBLEM]} …"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A block without messages and progress bars: its stages are not those of a run."""
    before, console.quiet = console.quiet, True
    try:
        yield
    finally:
        console.quiet = before


def _stage_json(row: Row) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "state": row.state.value,
        "counts": _counts_json(row, of_judges=False),
        "judge": _counts_json(row, of_judges=True),
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
                "taken": one.unit.seconds if one.unit.state is State.DONE else None,
                "problem": one.unit.problem,
            }
            for one in row.estimates
        ],
    }


def _counts_json(row: Row, *, of_judges: bool) -> dict[str, Any]:
    found = {name: row.total(name, of_judges=of_judges) for name in COUNTS}
    return {name: {"value": total[0], "estimated": total[1]} for name, total in found.items() if total is not None}
