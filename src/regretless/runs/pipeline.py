"""Runs the stages of a recipe in its run folder, in order: what is done is skipped, what was killed goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
import yaml

from regretless.core.errors import ConfigError, lookup, reject
from regretless.core.files import read_json, write_text
from regretless.core.run_folder import BASE, RunFolder, is_first_process, processes
from regretless.core.stages import STAGES
from regretless.core.terminal import terminal
from regretless.evaluation import results as evaluation
from regretless.runs import work
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe


def run_recipe(recipe: Recipe, only: Collection[str] = ()) -> RunFolder:
    """Run the stages of a recipe (or `only` some) in its run folder; returns the folder with what became of each.

    Raises ConfigError for everything that can be known to go wrong, before the first stage; when another process works
    in the folder; and what the stages raise.
    """
    for name in only:
        if getattr(recipe, lookup("stage", STAGES, name).name) in (None, {}):
            raise ConfigError(f"{name}: this recipe has no such section")
    if processes() > 1 and set(only) != {"train"}:
        raise ConfigError(
            "several processes were launched, and only training can use them: run the other stages in one process, "
            "and this one as `torchrun --nproc-per-node N -m regretless train --config RECIPE "
            "per_device_train_batch_size=B`, where B is the pairs of a step divided by N"
        )
    # In one process: several share a folder, and train at once.
    if processes() == 1:
        reject("recipe", recipe_problems(recipe, only or None))
    folder = RunFolder(recipe.run_dir)
    with _threads(recipe.threads), folder.locked():
        if is_first_process():
            values = recipe.model_dump(mode="json", exclude_unset=True, exclude={"output_dir"})
            write_text(folder.path / "recipe.yaml", yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        if not only:
            _set_aside(recipe, folder)
        for name in STAGES:
            section = getattr(recipe, name)
            if section not in (None, {}) and (not only or name in only):
                getattr(work, name)(section, work.Job(recipe, folder))
    return folder


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """A block that computes with so many threads; None leaves their number as it is."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def between(recipe: Recipe, first: str | None, last: str | None) -> list[str]:
    """The recipe's stages from `first` to `last`, both included. Raises ConfigError for a name that is none of them."""
    given = [name for name in STAGES if getattr(recipe, name) not in (None, {})]
    ends = {"--from": first, "--until": last}
    reject(
        "recipe",
        [
            f"{flag} {name}: expected one of {', '.join(given)}"
            for flag, name in ends.items()
            if name and name not in given
        ],
    )
    start = given.index(first) if first else 0
    end = given.index(last) + 1 if last else len(given)
    if start >= end:
        raise ConfigError(f"--from {first} comes after --until {last}: the order is {', '.join(given)}")
    return given[start:end]


def _set_aside(recipe: Recipe, folder: RunFolder) -> None:
    """Put away what an earlier recipe left in the folder and this one does not ask for: reports read what is there."""
    given = {stage.place for name, stage in STAGES.items() if getattr(recipe, name) not in (None, {})}
    folder.select("", given, among={stage.place for stage in STAGES.values()})
    folder.select("pretrain", recipe.pretrain)
    objectives = recipe.train.objectives if recipe.train else []
    folder.select("train", objectives)
    if recipe.evaluate is not None:
        folder.select("evaluate", [BASE, *objectives, "samples"])
        for label in [BASE, *objectives]:
            folder.select(f"evaluate/{label}", [*recipe.evaluate.benchmarks, *recipe.evaluate.chat])
            for benchmark in recipe.evaluate.benchmarks:
                place = f"evaluate/{label}/{benchmark}"
                seeds = [path.name for path in (folder.path / place).glob("seed-*")]
                folder.select(place, [f"seed-{seed}" for seed in recipe.evaluate.seeds], among=seeds)


def show(folder: RunFolder) -> None:
    """Print the table of results and where the report lies, as far as the run has them."""
    results, report = folder.path / "evaluate" / "results.json", folder.path / "report" / "report.html"
    screen = terminal()
    if results.is_file():
        screen.print(evaluation.results_table(read_json(results)))
    if report.is_file():
        screen.print(f"report: {report}", soft_wrap=True, highlight=False)
