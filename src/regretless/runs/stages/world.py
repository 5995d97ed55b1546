"""Stage `world`: problems, demonstrations and tokenizer of the embedded world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import Run, Session, Stage
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.world.world import WorldConfig


class World(Stage["WorldConfig"]):
    """Makes the embedded world."""

    name = "world"
    about = "Make the embedded world: problems, held-out test, demonstrations, tokenizer."
    makes = "the quickstart's problems, demonstrations and tokenizer"

    def units(self, config: WorldConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the world."""
        yield [run.unit(self, self.place, dump(config), {"config": config})]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Write the world."""
        from regretless.world import world

        return world.run(**unit.task, output=place)


STAGE = World()
