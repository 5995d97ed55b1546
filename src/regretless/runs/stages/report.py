"""Stage `report`: the HTML page of the run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import STAGES, Run, Session, Stage
from regretless.runs.stages.tiny import NOTE
from regretless.workflow.run_folder import RECIPE, Unit
from regretless.workflow.stage_folder import MANIFEST
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.reporting.report import ReportConfig
    from regretless.runs.recipe import Recipe


class Report(Stage["ReportConfig"]):
    """Writes the page."""

    name = "report"
    writes = ("report.html",)
    about = "One HTML page about a run, with a regret explorer."
    reads = "a run folder"
    makes = "one HTML page, the [regret explorer](report.md) in it"
    flags = ("run_dir",)
    is_read = makes_numbers = False

    def units(self, config: ReportConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the page about whatever the run has."""
        from regretless.runs import stage_record

        # A manifest changes exactly when its stage ran again.
        others = ("evaluate/results.json", RECIPE, stage_record.FILE)
        files = [*run.manifests(), *(run.path(name) for name in others)]
        inputs = {path.relative_to(run.path()).as_posix(): path for path in files if run.has(path)}
        inputs.pop(f"{self.place}/{MANIFEST}", None)
        task = {"config": config, "run_dir": run.path(), "left_out": dropped(run)}
        yield [run.unit(self, self.place, dump(config), task, inputs=inputs, need=Need("report"))]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Write the page."""
        return report_on(**unit.task, output=place)

    def after(self, config: ReportConfig, run: Run) -> None:
        """Name the page in the models' cards."""
        from regretless.runs.cards import refresh_cards

        page = run.path(self.place, "report.html")
        refresh_cards(run, lambda method, facts: {"report": os.path.relpath(page, run.path("train", method))})

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """A page that says what it is."""
        return None if section is None else {**section, "title": NOTE}


def report_on(config: ReportConfig, run_dir: Path, output: Path, left_out: Sequence[Path]) -> dict[str, Any]:
    """Write the page about a run folder, with the stages in their order, and which are of other settings.

    left_out: folders that are not on the page (`dropped`).
    """
    from regretless.reporting import report
    from regretless.runs.stage_record import of_other_settings

    places = [stage.place for stage in STAGES.values()]
    return report.run(config, run_dir, output, places, of_other_settings(run_dir), left_out)


def dropped(run: Run) -> list[Path]:
    """Folders of models, benchmarks and passes that the recipe does not have: a partial run leaves them in place.

    Not those of a stage that it does not have as a whole: a command may have added it on purpose.
    """
    below = (run.folder.unwanted(parent, wanted, among) for parent, wanted, among in run.asked_for() if parent)
    return list(itertools.chain(*below))


STAGE = Report()
