"""Stage `sample`: responses of the behavior models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import RESPONSES, Run, Session, Stage
from regretless.workflow.run_folder import Unit, resolve
from regretless.workflow.workers import Need

if TYPE_CHECKING:
    from regretless.sampling.sample import SampleConfig


class Sample(Stage["SampleConfig"]):
    """Answers prompts."""

    name = "sample"
    about = "Answer prompts with a behavior model, with the log-probability of every token."
    reads = "prompts, a behavior model"
    makes = "responses with token log-probabilities"
    flags = ("prompts", "model")
    result = RESPONSES

    def units(self, config: SampleConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the responses of all models."""
        from regretless.sampling.sample import KEEPS

        task = {"config": resolve(config, run.root)}
        yield [run.unit(self, self.place, dump(config), task, need=Need("sample"), keeps=KEEPS)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Sample the responses."""
        from regretless.sampling import sample

        return sample.run(**unit.task, output=place)


STAGE = Sample()
