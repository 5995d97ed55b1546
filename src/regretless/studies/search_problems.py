"""Checks that the problems of a search and those of the benchmarks of its study do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow.parquet as pq

from regretless.core.errors import ConfigError
from regretless.data.columns import Text, text_key
from regretless.studies.search import trials_of
from regretless.studies.study import Cell, Study
from regretless.workflow.run_folder import BASE


def check_apart(study: Study, cells: Sequence[Cell]) -> None:
    """Raise ConfigError if problems that settings were chosen on are among those of the study's benchmarks.

    cells: runs of the study that are finished. A study in miniature has only one set of problems.
    """
    if study.smoke or study.config.search is None:
        return
    trials = trials_of(study)
    chosen_on, tested = _by_world(trials.cells), _by_world(cells)
    shared = {key for world, keys in tested.items() for key in keys & chosen_on.get(world, set())}
    if shared:
        searched = len(set().union(*chosen_on.values()))
        raise ConfigError(
            f"search: benchmarks: {len(shared)} of their {searched} problems are also in the study's benchmarks, "
            "so its results are too good; take other problems for the search"
        )


def _by_world(cells: Sequence[Cell]) -> dict[int | None, set[str]]:
    """Identities of the problems of runs, by data seed where a run generates its problems: each seed has its own."""
    problems: dict[int | None, set[str]] = {}
    for cell in cells:
        problems.setdefault(cell.data_seed if cell.recipe.world is not None else None, set()).update(_problems(cell))
    return problems


def _problems(cell: Cell) -> set[str]:
    """Identities of the problems that the base model answered in a run; none if it is not finished."""
    folder, evaluate = cell.recipe.run_dir / "evaluate", cell.recipe.evaluate
    assert evaluate is not None  # without benchmarks there is no study
    files = [folder / BASE / name / "responses.parquet" for name in evaluate.benchmarks]
    for chat in evaluate.chat.values():
        files += (folder / "samples" / BASE / chat.answers).glob("turn-1-*/responses.parquet")
    prompts = [
        prompt
        for file in files
        if file.is_file()
        for prompt in pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()
    ]
    return {text_key(_question(prompt)) for prompt in prompts}


def _question(prompt: Text) -> str:
    """A problem without what its template adds: the same one may be asked with two of them."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
