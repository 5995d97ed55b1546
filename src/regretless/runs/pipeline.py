"""Runs the stages of a recipe in order, in its run folder: finished stages are skipped, interrupted ones resume."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from regretless.core.errors import ConfigError, RegretlessError, StorageError, lookup, problems_of, reject
from regretless.core.files import read_json, write_text
from regretless.core.ranks import is_first_process, processes
from regretless.core.terminal import print_note, terminal
from regretless.core.yaml_settings import dump_text
from regretless.evaluation.results import results_table
from regretless.runs import stage_record
from regretless.runs.preflight import recipe_problems
from regretless.runs.recipe import Recipe
from regretless.runs.side_by_side import SideBySide, dividing, places
from regretless.runs.stages import STAGES, Run, Session, do_units, stages_of
from regretless.workflow.cluster import ClusterConfig, check_ray, connected
from regretless.workflow.run_folder import RECIPE, RunFolder


def run_recipe(recipe: Recipe, only: Collection[str] = ()) -> RunFolder:
    """Run the stages of a recipe (or only those in `only`) in its run folder; returns the folder with the outcomes.

    Raises ConfigError for every problem that can be detected before the first stage, and if another process uses the
    folder; also what the stages raise.
    """
    for name in only:
        if lookup("stage", STAGES, name).name not in stages_of(recipe):
            raise ConfigError(f"{name}: this recipe has no such section, or `rounds` does its work")
    if processes() > 1 and set(only) != {"train"}:
        raise ConfigError(
            "several processes were launched, and only training can use them: start the recipe in one process, which "
            "starts those of training itself (train.processes), or launch training alone: "
            "`torchrun --nproc-per-node N -m regretless train --config RECIPE`"
        )
    # With several processes this is skipped: they share a folder and start training together.
    if processes() == 1:
        reject("recipe", recipe_problems(recipe, only or None))
    folder = RunFolder(recipe.run_dir)
    with threads(recipe.threads), folder.locked():
        do_stages(recipe, folder, only, parallel=places(recipe))
    return folder


def do_stages(recipe: Recipe, folder: RunFolder, only: Collection[str] = (), *, parallel: int = 1) -> None:
    """Do the stages of a recipe (or only those in `only`) in a folder that this process has locked.

    parallel: processes that do parts of a stage at the same time. Raises what the stages raise.
    """
    with (
        connected(_cluster(recipe), folder.path),
        dividing(recipe, parallel),
        SideBySide(recipe, folder, parallel) as others,
    ):
        prepare(recipe, folder, only)
        names = [name for name in stages_of(recipe) if not only or name in only]
        others.prepare(names)
        for name in names:
            with Session() as session:
                do_stage(Run.of(recipe, folder, cluster=recipe.cluster, session=session), name, others)
            note_done(recipe, folder, name)


def do_stage(run: Run, name: str, others: SideBySide | None = None) -> None:
    """Do the units of one stage, group by group, and what concerns all of them. Raises what the stage raises.

    others: who does groups with names, once everything before the first of them is done. A stage whose groups are
    independent does all of them before it raises the first error.
    """
    failed: Mapping[str, Exception] = {}
    errors: dict[str, Exception] = {}
    done: list[str] = []
    unsaid: list[str] = []
    for units in run.units([name]):
        if others is not None and units[0].group:
            failed = others.do(name)
            errors.update(failed)
            others = None
        if units[0].group in failed:
            continue
        for text in unsaid:
            print_note(f"{text}\n  goes on with {units[0].name}")
        unsaid.clear()
        try:
            do_units(run.folder, units, run.session)
            done.append(units[0].group)
        except RegretlessError as error:
            # What a full disk did to one, it does to all.
            if not STAGES[name].independent or isinstance(error, StorageError):
                raise
            unsaid.append(f"{units[0].name} failed: {error}")
            errors[units[0].group] = error
    if errors and done:
        print_note(f"{name}: {', '.join(errors)} failed, and stopped nothing else: {', '.join(done)} finished")
    for first in errors.values():
        raise first


def _cluster(recipe: Recipe) -> ClusterConfig | None:
    """The cluster of the run: the recipe's, or one on this machine if it has several GPUs."""
    count = torch.cuda.device_count()
    if recipe.cluster is not None or count < 2 or processes() > 1:
        return recipe.cluster
    if problem := problems_of(check_ray):
        print_note(f"one of {count} GPUs is used, except for training: {problem[0]}")
        return None
    return ClusterConfig()


def prepare(recipe: Recipe, folder: RunFolder, only: Collection[str] = ()) -> None:
    """Write the recipe into its run folder; if all of its stages run, move an earlier recipe's results aside."""
    if is_first_process():
        values = recipe.model_dump(mode="json", exclude_unset=True, exclude={"output_dir", "cluster", "parallel"})
        stage_record.check_ours(folder.path)
        text = dump_text(values)
        stage_record.begin(folder.path, text, stages_of(recipe))
        write_text(folder.path / RECIPE, text)
    if not only:
        _set_aside(recipe, folder)


def note_done(recipe: Recipe, folder: RunFolder, stage: str) -> None:
    """Note in a run folder that a stage is done with the settings of this recipe."""
    if is_first_process():
        units = [one for name, one in folder.outcomes.items() if name.partition("/")[0] == STAGES[stage].place]
        stage_record.end(folder.path, stage, stages_of(recipe), ran=any(unit.ran for unit in units))


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
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
    """The recipe's stages from `first` to `last`, inclusive. Raises ConfigError for a name that is not one of them."""
    present = stages_of(recipe)
    ends = {"--from": first, "--until": last}
    reject(
        "recipe",
        [
            f"{flag} {name}: expected one of {', '.join(present)}"
            for flag, name in ends.items()
            if name and name not in present
        ],
    )
    start = present.index(first) if first else 0
    end = present.index(last) + 1 if last else len(present)
    if start >= end:
        raise ConfigError(f"--from {first} comes after --until {last}: the order is {', '.join(present)}")
    return present[start:end]


def _set_aside(recipe: Recipe, folder: RunFolder) -> None:
    """Move results of an earlier recipe that this one does not ask for aside, because reports read the whole folder."""
    for parent, wanted, among in Run.of(recipe, folder).asked_for():
        folder.select(parent, wanted, among)


def results_of(folder: RunFolder) -> tuple[Any, Path | None]:
    """Results and report of the stages that this run has done or confirmed; None without.

    What a partial run leaves as it is may be of other settings.
    """
    stages = {name.partition("/")[0] for name in folder.outcomes}
    results, report = folder.path / "evaluate" / "results.json", folder.path / "report" / "report.html"
    return (
        read_json(results) if "evaluate" in stages and results.is_file() else None,
        report if "report" in stages and report.is_file() else None,
    )


def show(folder: RunFolder) -> None:
    """Print the table of results and the path of the report, if this run has them."""
    results, report = results_of(folder)
    screen = terminal()
    if results is not None:
        screen.print(results_table(results))
    if report is not None:
        screen.print(f"report: {report}", soft_wrap=True, highlight=False)
