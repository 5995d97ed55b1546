"""Stage `verify`: verdicts on the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Session, Stage
from regretless.workflow.run_folder import Unit
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.labeling.verify import VerifyConfig


class Verify(Stage["VerifyConfig"]):
    """Compares responses with gold answers."""

    name = "verify"
    about = "Compare responses with gold answers: correct, wrong or unknown."
    reads = "responses with gold answers"
    makes = "verdicts: correct, wrong or unknown"
    flags = ("responses",)
    result = RESPONSES

    def units(self, config: VerifyConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses with verdicts."""
        responses = Path(run.latest(RESPONSES, self.name))
        task = {"config": config, "responses": responses, "result": f"responses{run.form}"}
        yield [run.unit(self, self.place, dump(config), task, {"responses": responses}, need=Need("verify"))]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Verify the responses."""
        from regretless.labeling import verify

        return verify.run(**unit.task, output=place)


STAGE = Verify()
