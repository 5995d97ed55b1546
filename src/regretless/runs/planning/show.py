"""A plan on the terminal: a table with a row for each stage, then what was assumed and what would stop a run."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding

from regretless.core.terminal import FoldingTable
from regretless.runs.planning.counts import COUNTS
from regretless.runs.planning.plan import Plan, Row

WORDS = {"tokens_in": "tokens in", "tokens_out": "tokens out", "continued": "tokens of continuations"}
ABOUT = "~"
"""Before a number that rests on an assumption."""


def show_plan(plan: Plan, screen: Console) -> None:
    """Print a plan."""
    title = f"Plan of {plan.recipe} ({plan.run_dir})"
    table = FoldingTable("stage", "state", "counts", title=title, title_justify="left")
    table.add_column("took", justify="right")
    for row in plan.rows:
        table.add_row(row.stage, row.state_text, counts_text(row), seconds_text(row.taken))
    screen.print(table)
    if plan.dollars is not None:
        screen.print(f"cost of what judges are left to be asked: {ABOUT}${plan.dollars:,.2f}")
    groups = {"Assumed": plan.assumptions, "A run would stop": _stops(plan)}
    for title, lines in groups.items():
        if lines:
            screen.print(f"{title}:")
            for line in lines:
                screen.print(Padding(f"- {line}", (0, 0, 0, 2)))


def counts_text(row: Row) -> str:
    """Counts of a stage in words; `~` marks those that rest on assumptions."""
    parts = [_number(row, name, judge=False) for name in COUNTS if name != "dollars"]
    asked = [_number(row, name, judge=True) for name in COUNTS]
    text = ", ".join(part for part in parts if part)
    judged = ", ".join(part for part in asked if part)
    return "; ".join(part for part in (text, f"judge: {judged}" if judged else "") if part)


def _number(row: Row, name: str, *, judge: bool) -> str:
    total = row.total(name, of_judges=judge)
    if total is None:
        return ""
    mark = ABOUT if total[1] else ""
    if name == "dollars":
        return f"{mark}${total[0]:,.2f}"
    return f"{mark}{amount_text(total[0])} {WORDS.get(name, name)}"


def amount_text(value: float) -> str:
    """A count with at most four digits and a unit, or whole below ten thousand."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.0f}"


def seconds_text(seconds: float | None) -> str:
    """A time in seconds, minutes or hours; empty for None."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _stops(plan: Plan) -> list[str]:
    return list(
        dict.fromkeys([*plan.problems, *(f"{row.stage}: {text}" for row in plan.rows for text in row.problems)])
    )
