"""Stage `pairs`: preference pairs that exist already, in this package's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regretless.core.settings import dump
from regretless.runs.stages.benchmark_prompts import compared, with_benchmarks
from regretless.runs.stages.stage import PAIRS, Run, Session, Stage
from regretless.workflow.run_folder import Unit

if TYPE_CHECKING:
    from regretless.data.columns import Pair as PairRow
    from regretless.runs.recipe import PairsSource, Recipe


class Pairs(Stage["PairsSource"]):
    """Reads existing pairs."""

    name = "pairs"
    writes = ("pairs.parquet", "refused.jsonl")
    folder = "pair"
    result = PAIRS

    def units(self, config: PairsSource, run: Run) -> Iterator[Sequence[Unit]]:
        """One unit: the pairs."""
        settings, task, inputs = compared(run, wanted=run.recipe.decontaminate)
        yield [run.unit(self, self.place, {**dump(config), **settings}, {"config": config, **task}, inputs=inputs)]

    def do(self, unit: Unit, place: Path, session: Session) -> dict[str, Any]:
        """Read the pairs, and write those that can be used."""
        from regretless.data.preferences import read_pairs, split_kinds
        from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
        from regretless.data.rows import pair_row, write_records

        config: PairsSource = unit.task["config"]
        benchmarks = with_benchmarks(unit).task.get("benchmarks")
        read = read_pairs(
            config.dataset,
            split=config.split,
            subset=config.subset,
            prompt_key=config.prompt_key,
            chosen_key=config.chosen_key,
            rejected_key=config.rejected_key,
        )
        usable, refused = split_kinds(*read)
        refused += [
            Refusal.at(pair.origin, reason, pair_row(pair)) for pair in usable if (reason := _too_close(pair, config))
        ]
        usable = [pair for pair in usable if not _too_close(pair, config)]
        if benchmarks is not None:
            usable, repeated = benchmarks.without(usable)
            refused += repeated
        refused.sort(key=lambda refusal: refusal.line)
        usable = [replace(pair, source_row=_without_folder(pair.origin)) for pair in usable]
        report_refusals(refused, place / "refused.jsonl")
        check_some_left(usable, refused, config.dataset)
        write_records(place / PAIRS, usable[: config.limit])
        return {"pairs": len(usable[: config.limit]), "refused": len(refused)}

    def miniature(self, section: Any, recipe: Recipe) -> None:
        """None: pairs are made of sampled responses."""


def _too_close(pair: PairRow, config: PairsSource) -> str | None:
    """Why the scores of a pair's sides do not set them apart, or None."""
    scores = [side.score for side in pair.sides.values() if side.score is not None]
    if config.smallest_margin is None or len(scores) < 2 or scores[0] - scores[1] >= config.smallest_margin:
        return None
    return f"chosen_score minus rejected_score: less than smallest_margin {config.smallest_margin:g}"


def _without_folder(origin: str | None) -> str | None:
    """A row by its file's name, `mine.jsonl:47`: where the file lies does not change a result."""
    name, _, line = (origin or "").rpartition(":")
    return f"{Path(name).name}:{line}" if Path(name).is_file() else origin


STAGE = Pairs()
