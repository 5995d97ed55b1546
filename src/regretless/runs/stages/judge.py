"""Stage `judge`: scores of the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Session, Stage
from regretless.workflow.run_folder import Unit, resolve
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.labeling.judge import JudgeConfig


class Judge(Stage["JudgeConfig"]):
    """Scores responses."""

    name = "judge"
    about = "Score responses with a language model on an OpenAI-compatible server."
    reads = "responses, a language model on a server"
    makes = "scores"
    flags = ("responses",)
    result = RESPONSES

    def units(self, config: JudgeConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses with scores."""
        responses, here = Path(run.latest(RESPONSES, self.name)), resolve(config, run.root)
        inputs = {"responses": responses, **here.files()}
        task = {"config": here, "responses": responses}
        yield [run.unit(self, self.place, dump(config), task, inputs, need=Need("judge"))]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Ask the judge about every response."""
        from regretless.labeling import judge

        return judge.run(**unit.task, output=place)


STAGE = Judge()
