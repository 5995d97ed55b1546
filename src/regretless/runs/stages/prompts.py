"""Stage `prompts`: prompts of several sources in one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.files import write_jsonl
from regretless.core.settings import dump
from regretless.runs.stages.stage import Run, Session, Stage
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.data.prompts import PromptSource
    from regretless.runs.recipe import Recipe


class Prompts(Stage["Mapping[str, PromptSource]"]):
    """Combines sources of prompts."""

    name = "prompts"
    writes = ("prompts.jsonl", "refused.jsonl")
    counted = (("prompts", "prompts"),)

    def units(self, config: Mapping[str, PromptSource], run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the file of prompts."""
        settings = {name: dump(source) for name, source in config.items()}
        yield [run.unit(self, self.place, settings, config)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Read every source, and write prompts.jsonl."""
        from regretless.data.prompts import prompt_columns, read_prompts
        from regretless.data.rejected_rows import check_some_left, report_refusals

        rows, refused = [], []
        for name, source in unit.task.items():
            source_rows, unusable = read_prompts(source, f"prompts.{name}.", None)
            refused += unusable
            rows += [{**prompt_columns(row), "prompt_id": f"{name}-{row.prompt_id}"} for row in source_rows]
        report_refusals(refused, place / "refused.jsonl")
        check_some_left(rows, refused, "prompts")
        write_jsonl(place / "prompts.jsonl", rows)
        return {"prompts": len(rows), "refused": len(refused)}

    def miniature(self, section: Any, recipe: Recipe) -> None:
        """None: the world has prompts."""


STAGE = Prompts()
