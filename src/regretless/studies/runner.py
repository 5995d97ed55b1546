"""Runs the jobs of a study, several at a time: data of each run, its methods one by one, and the run put together.

Every method is a job, so that one that fails stops no other. Runs share what they have done through a store of units
(`workflow.unit_store`): pairs are made once for all training seeds, the base model is evaluated once, and a study that
was interrupted or extended does only what is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from regretless.core import progress
from regretless.core.errors import RegretlessError
from regretless.core.files import fingerprint
from regretless.core.terminal import console
from regretless.runs.pipeline import note_done, prepare
from regretless.runs.recipe import Recipe
from regretless.runs.stage_record import DESCRIBING
from regretless.runs.stages import STAGES, stages_of
from regretless.runs.stages.stage import RESPONSES, Run
from regretless.studies.job import LOG, Job, run_job
from regretless.studies.study import Cell, Study
from regretless.training.processes import visible_gpus
from regretless.workflow.children import Children, Ended
from regretless.workflow.run_folder import LOCK, PROGRESS, RunFolder, lock

_MAKES_RESPONSES = [stage.result == RESPONSES for stage in STAGES.values()].index(True)
SOURCES = ("seed", *list(STAGES)[: _MAKES_RESPONSES + 1])
"""Settings of a recipe that decide where its data come from."""


@dataclass(frozen=True)
class Failure:
    """A job that failed, or that was not started because another one failed."""

    job: Job
    reason: str


def run_study(study: Study, *, processes: int | None = None) -> list[Failure]:
    """Run all jobs of a study; returns those that failed.

    processes: jobs at the same time; by default one for each GPU, or one. Finished work is skipped.
    Raises ConfigError if another process uses the study, or one of its runs.
    """
    study.folder.mkdir(parents=True, exist_ok=True)
    with _locked(study, [cell.recipe for cell in study.cells]):
        return Scheduler(study, processes or max(1, visible_gpus())).run()


def run_jobs(study: Study, jobs: Sequence[Job], *, processes: int | None = None) -> list[Failure]:
    """Run further jobs about a study's runs; returns those that failed.

    Raises ConfigError if another process uses the study, or a run folder of a job.
    """
    with _locked(study, [job.recipe for job in jobs]):
        return Scheduler(study, processes or max(1, visible_gpus())).run_all(list(jobs))


@contextlib.contextmanager
def _locked(study: Study, recipes: Sequence[Recipe]) -> Iterator[None]:
    """Within the block, no other process uses the study or the run folders of these recipes."""
    with contextlib.ExitStack() as stack:
        # First: the run folders are in it.
        stack.enter_context(lock(study.folder / LOCK, study.folder))
        stack.enter_context(progress.written_to(study.folder / PROGRESS))
        for recipe in recipes:
            stack.enter_context(RunFolder(recipe.run_dir).locked())
        yield


def failed_methods(failures: Sequence[Failure]) -> set[tuple[str, str]]:
    """Name of the run and method of every training, with its evaluation, that failed."""
    return {(run, method) for run, _, method in (failure.job.name.rpartition(": ") for failure in failures)}


def finished(study: Study, failures: Sequence[Failure]) -> list[Cell]:
    """The runs of a study that were put together, if only of some of their methods."""
    failed = {failure.job.name for failure in failures}

    def has_failed(cell: Cell) -> bool:
        methods = [f"{cell.name}: {method}" in failed for method in cell.methods]
        return bool(failed & {f"{cell.name}: data", f"{cell.name}: report"}) or (bool(methods) and all(methods))

    return [cell for cell in study.cells if not has_failed(cell)]


class Scheduler:
    """Starts jobs as soon as those that they need have succeeded and a place is free."""

    def __init__(self, study: Study, processes: int) -> None:
        self.study, self.processes = study, processes
        self.gpus = visible_gpus()
        self.reasons: dict[str, str | None] = {}
        """Why a job failed, or None for one that succeeded."""
        self._running: dict[str, tuple[Job, int]] = {}
        """Jobs at work, by name, and the place of each among those at the same time."""

    def run(self) -> list[Failure]:
        """Run everything: data, then methods, then the runs as a whole."""
        cells = self.study.cells
        failures = self.run_all(self._data_jobs())
        failures += self.run_all([self._method_job(cell, method) for cell in cells for method in cell.methods])
        return failures + self.run_all([job for cell in cells if (job := self._whole_job(cell)) is not None])

    def run_all(self, jobs: list[Job]) -> list[Failure]:
        """Run jobs, each behind those of them that it needs; devices are divided among as many as can run at once."""
        failures, waiting = [], list(jobs)
        names = {job.name for job in jobs}
        free = list(range(min(self.processes, sum(not names & {*job.needs, *job.after} for job in jobs))))
        self._places = len(free)
        with Children(["regretless.studies.job"]) as children:
            while waiting or self._running:
                for job in list(waiting):
                    failed = [name for name in job.needs if self.reasons.get(name) is not None]
                    if failed:
                        failures.append(Failure(job, f"{failed[0]} failed"))
                        self.reasons[job.name] = failures[-1].reason
                    elif free and all(name in self.reasons for name in [*job.needs, *job.after]):
                        self._start(children, job, free.pop(0))
                    else:
                        continue
                    waiting.remove(job)
                for event in children.events() if self._running else ():
                    if isinstance(event, Ended):
                        job, place = self._end(event)
                        free.append(place)
                        if (reason := self.reasons[job.name]) is not None:
                            failures.append(Failure(job, reason))
        return failures

    def _start(self, children: Children, job: Job, place: int) -> None:
        share = self.gpus // self._places
        if self._places > 1 and share:
            job = replace(job, gpus=range(place * share, (place + 1) * share))
        job.folder.mkdir(parents=True, exist_ok=True)
        children.start(job.name, run_job, job, max(1, torch.get_num_threads() // self._places), log=job.folder / LOG)
        self._running[job.name] = (job, place)
        console.print(f"{job.name}: started, log: {job.folder / LOG}", soft_wrap=True)

    def _end(self, event: Ended) -> tuple[Job, int]:
        job, place = self._running.pop(event.child)
        self.reasons[job.name] = reason = _reason(job, event)
        text = "done" if reason is None else f"failed: {reason}"
        console.print(f"{job.name}: {text}", style=None if reason is None else "red", soft_wrap=True)
        return job, place

    # --- the jobs ----------------------------------------------------------------------------------------------------

    def _data_jobs(self) -> list[Job]:
        """Everything before training, and the evaluation of the base model.

        Runs with the same data come one behind the other, so that the first one makes them, whatever is killed.
        """
        jobs: list[Job] = []
        last: dict[str, str] = {}
        for cell in self.study.cells:
            recipe = cell.recipe.model_copy(update=dict.fromkeys(["train", *_of_rounds(cell.recipe), *DESCRIBING]))
            stages = stages_of(recipe)
            if stages:
                source = fingerprint({name: recipe.model_dump(mode="json")[name] for name in SOURCES})
                after = [last[source]] if source in last else []
                jobs.append(replace(self._job(cell, "data", recipe, stages), after=after))
                last[source] = jobs[-1].name
        return jobs

    def _method_job(self, cell: Cell, method: str) -> Job:
        recipe = _of_methods(cell.recipe, [method])
        stages = [name for name in stages_of(recipe) if name not in DESCRIBING]
        needs = [name for name in (f"{cell.name}: data",) if name in self.reasons]
        return replace(self._job(cell, method, recipe, stages), needs=needs)

    def _whole_job(self, cell: Cell) -> Job | None:
        """The run with the methods that succeeded; None if its data or all methods failed, or nothing is left to do."""
        done = [method for method in cell.methods if self.reasons.get(f"{cell.name}: {method}") is None]
        if self.reasons.get(f"{cell.name}: data") is not None or (cell.methods and not done):
            return None
        recipe = _of_methods(cell.recipe, done) if done else cell.recipe
        if not set(DESCRIBING) & set(stages_of(recipe)):
            folder = RunFolder(recipe.run_dir)
            prepare(recipe, folder)
            run = Run.of(recipe, folder)
            for stage in run.stages():
                # Of all methods: each job has written what concerns its own.
                stage.after(getattr(recipe, stage.name), run)
                note_done(recipe, folder, stage.name)
            return None
        return self._job(cell, "report", recipe, None)

    def _job(self, cell: Cell, kind: str, recipe: Recipe, stages: list[str] | None) -> Job:
        return Job(
            name=f"{cell.name}: {kind}",
            recipe=recipe,
            stages=stages,
            folder=self.study.folder / "logs" / cell.name / kind,
            store=self.study.store,
            smoke=self.study.smoke,
        )


def _of_rounds(recipe: Recipe) -> Sequence[str]:
    """Sections whose work rounds do, of each method by itself: data for all methods have none of it."""
    return () if recipe.rounds is None else ("rounds", *STAGES["rounds"].repeats)


def _of_methods(recipe: Recipe, methods: list[str]) -> Recipe:
    """The recipe with only these objectives."""
    assert recipe.train is not None
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"objective": methods})})


def _reason(job: Job, event: Ended) -> str | None:
    if event.exit_code is not None:
        return f"its process ended with {event.exit_code}; its messages are in {job.folder / LOG}"
    if (error := event.error) is None:
        return None
    text = str(error) if isinstance(error, RegretlessError) else f"{type(error).__name__}: {error}"
    return f"{text} ({job.folder / LOG})"
