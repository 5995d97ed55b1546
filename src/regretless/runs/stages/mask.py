"""Stage `mask`: the pairs, with masked pairs appended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import PAIRS, Run, Session, Stage, file_input
from regretless.workflow.run_folder import Unit, resolve

if TYPE_CHECKING:
    from regretless.labeling.mask import MaskConfig


class Mask(Stage["MaskConfig"]):
    """Adds masked pairs."""

    name = "mask"
    about = "Add pairs of a chosen response and its own beginning."
    reads = "pairs"
    makes = "the pairs, with masked ones added"
    flags = ("pairs",)
    result = PAIRS

    def units(self, config: MaskConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs, those that were there first."""
        source = run.latest(PAIRS, self.name)
        task = {"config": resolve(config, run.root), "pairs": Path(source)}
        yield [run.unit(self, self.place, dump(config), task, file_input("pairs", source))]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Mask the pairs."""
        from regretless.labeling import mask

        return mask.run(**unit.task, output=place)


STAGE = Mask()
