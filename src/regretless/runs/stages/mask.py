"""Stage `mask`: the pairs, with masked pairs appended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import PAIRS, Run, Stage, file_input
from regretless.runs.stages.tiny import TOKENIZER
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.labeling.mask import MaskConfig
    from regretless.runs.preflight import Machine
    from regretless.runs.recipe import Recipe


class Mask(Stage["MaskConfig"]):
    """Adds masked pairs."""

    name = "mask"
    writes = ("pairs.parquet", "refused.jsonl")
    work = "regretless.labeling.mask"
    about = "Add pairs of a chosen response and its own beginning."
    reads = "pairs"
    makes = "the pairs, with masked ones added"
    flags = ("pairs",)
    uses = ("pairs",)
    result = PAIRS

    def units(self, config: MaskConfig, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs, those that were there first."""
        source = run.latest(PAIRS, self.name)
        task = {"config": config, "pairs": Path(source)}
        yield [run.unit(self, self.place, dump(config), task, inputs=file_input("pairs", source))]

    def problems(self, config: MaskConfig, machine: Machine) -> None:
        """Problems of the tokenizer."""
        machine.path_or_hub(f"{self.name}.tokenizer", config.tokenizer, "model")

    def miniature(self, section: Any, recipe: Recipe) -> Any:
        """Cuts of short responses."""
        if section is None:
            return None
        few = min(section.get("per_response", 1), 2)
        return {**section, "lengths": (2, 3), "count": "all", "per_response": few, "tokenizer": TOKENIZER}


STAGE = Mask()
