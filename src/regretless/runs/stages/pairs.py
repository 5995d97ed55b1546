"""Stage `pairs`: preference pairs that exist already, in this package's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.stage import PAIRS, Run, Session, Stage
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.runs.recipe import PairsSource, Recipe


class Pairs(Stage["PairsSource"]):
    """Reads existing pairs."""

    name = "pairs"
    writes = ("pairs.parquet", "refused.jsonl")
    folder = "pair"
    result = PAIRS

    def units(self, config: PairsSource, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs."""
        yield [run.unit(self, self.place, dump(config), {"config": config})]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Read the pairs, and write those that can be used."""
        from regretless.data.preferences import read_pairs, split_kinds
        from regretless.data.rejected_rows import check_some_left, report_refusals
        from regretless.data.rows import write_records

        config: PairsSource = unit.task["config"]
        read = read_pairs(
            config.dataset,
            split=config.split,
            subset=config.subset,
            prompt_key=config.prompt_key,
            chosen_key=config.chosen_key,
            rejected_key=config.rejected_key,
        )
        usable, refused = split_kinds(*read)
        report_refusals(refused, place / "refused.jsonl")
        check_some_left(usable, refused, config.dataset)
        write_records(place / PAIRS, usable[: config.limit])
        return {"pairs": len(usable[: config.limit]), "refused": len(refused)}

    def miniature(self, section: Any, recipe: Recipe) -> None:
        """None: pairs are made of sampled responses."""


STAGE = Pairs()
