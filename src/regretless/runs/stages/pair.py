"""Stage `pair`: preference pairs of the responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import PAIRS, RESPONSES, Run, Session, Stage
from regretless.workflow.run_folder import Unit, resolve

if TYPE_CHECKING:
    from regretless.labeling.pair import PairConfig


class Pair(Stage["PairConfig"]):
    """Makes pairs."""

    name = "pair"
    about = "Make preference pairs of verified or scored responses."
    reads = "verdicts or scores"
    makes = "preference pairs"
    flags = ("responses",)
    result = PAIRS

    def units(self, config: PairConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs."""
        responses = Path(run.latest(RESPONSES, self.name))
        task = {"config": resolve(config, run.root), "responses": responses}
        yield [run.unit(self, self.place, dump(config), task, {"responses": responses})]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Make the pairs."""
        from regretless.labeling import pair

        return pair.run(**unit.task, output=place)


STAGE = Pair()
