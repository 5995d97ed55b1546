"""Work of a stage at the same time, in processes of their own (the recipe's `parallel`).

Models are divided by `SideBySide`: each part of a stage has its own folders, seeds and number of threads, so that its
files are those of a run without other processes. Whatever is left of a stage, such as tables over its parts, is then
done by the run's own process. The responses of one model are divided by `LocalWorkers`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from rich.text import Text

from regretless.core.errors import RegretlessError
from regretless.core.progress import SharedBars, bar
from regretless.core.ranks import processes
from regretless.core.terminal import console
from regretless.modeling.load import quiet_libraries
from regretless.runs.recipe import Recipe
from regretless.runs.work import PARTS, Job, do_stage
from regretless.training.processes import visible_gpus
from regretless.workflow import workers
from regretless.workflow.children import BarMoved, Children, Ended, Line
from regretless.workflow.run_folder import Outcome, RunFolder, Unit
from regretless.workflow.workers import Advance, InThisProcess, Need, Worker, limit_cpus

DIVIDED = "sample"
"""The stage whose responses are divided, and the kind of work that does it, in `evaluate` too."""


def places(recipe: Recipe) -> int:
    """How many parts of a stage run at the same time in this run."""
    if processes() > 1 or (recipe.parallel == "auto" and list(_obstacles(recipe))):
        return 1
    return max(1, cores() // (recipe.threads or 1)) if recipe.parallel == "auto" else recipe.parallel


def parallel_problems(recipe: Recipe) -> list[str]:
    """Why the parts of this recipe's stages cannot run side by side, although it asks for that."""
    if recipe.parallel in ("auto", 1):
        return []
    return [f"parallel={recipe.parallel}: {reason}; expected 1 or auto" for reason in _obstacles(recipe)]


def _obstacles(recipe: Recipe) -> Iterator[str]:
    if recipe.threads is None:
        yield "each part would compute with a thread for every core; set `threads`, which then holds for each part"
    if recipe.cluster is not None:
        yield "the cluster does the work of several at the same time (`cluster`)"
    if gpus := visible_gpus():
        yield f"parts would share the memory of {gpus} GPU(s); one part at a time uses them all (`train.processes`)"
    trained = [] if recipe.train is None else [(recipe.train, name) for name in recipe.train.objectives]
    trained += [(config, config.objectives[0]) for config in recipe.pretrain.values()]
    if not gpus and any(config.process_count(name) > 1 for config, name in trained):
        yield "each training uses several processes already (`processes`)"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share(count: int) -> int:
    """CPU cores for each of so many processes."""
    return max(1, cores() // count)


class SideBySide:
    """Does parts of a run's stages in other processes. At the end of the block, those at work are ended."""

    def __init__(self, recipe: Recipe, folder: RunFolder, count: int) -> None:
        """count: parts at the same time; with 1 nothing is done here. The folder is locked by this process."""
        self.recipe, self.folder, self.count = recipe, folder, count
        self._children = Children([__name__])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._children.__exit__(*error)

    def prepare(self, stages: Sequence[str]) -> None:
        """Let other processes' imports begin if one of these stages has work for them."""
        if any(len(self._left(name)) > 1 or self._is_divided(name) for name in stages):
            self._children.import_ahead()

    def do(self, stage: str) -> None:
        """Do the unfinished parts of a stage, if there are several.

        If one fails, no other is begun, and those at work are finished. Raises what the first of them raised.
        """
        left = self._left(stage)
        if len(left) < 2:
            return
        errors: dict[str, Exception] = {}
        waiting = list(left)
        with SharedBars() as bars:
            while self._children or (waiting and not errors):
                while waiting and not errors and len(self._children) < self.count:
                    part = waiting.pop(0)
                    share = _share(self.count)
                    self._children.start(part, do_part, self.recipe, self.folder.path, stage, part, share)
                for event in self._children.events():
                    name = f"{stage}/{event.child}"
                    if isinstance(event, BarMoved):
                        bars.show(name, event.bar)
                    elif isinstance(event, Line):
                        # Units are named by their folders.
                        bars.say(event.text if event.text.startswith(f"{stage}/") else f"{name}: {event.text}")
                    else:
                        bars.forget(name)
                        self._end(name, event, errors)
                        if event.child in errors and self._children:
                            bars.say(f"{name} failed: {errors[event.child]}; what runs beside it is finished first")
        for part in left:
            if part in errors:
                raise errors[part]

    def _end(self, name: str, event: Ended, errors: dict[str, Exception]) -> None:
        if event.error is not None:
            errors[event.child] = event.error
        elif event.exit_code is not None:
            errors[event.child] = RegretlessError(f"{name}: its process ended {_how(event.exit_code)}")
        else:
            self.folder.outcomes |= event.value

    def _left(self, stage: str) -> list[str]:
        """Parts of a stage that are not finished; none if it has no parts, or they run one by one."""
        if self.count < 2 or stage not in PARTS:
            return []
        return [part for part in PARTS[stage].names(self.recipe) if not self._is_done(stage, part)]

    def _is_done(self, stage: str, part: str) -> bool:
        return self._finds_done(lambda job: PARTS[stage].do(part, job))

    def _is_divided(self, stage: str) -> bool:
        return self.count > 1 and stage == DIVIDED and not self._finds_done(lambda job: do_stage(stage, job))

    def _finds_done(self, work: Callable[[Job], None]) -> bool:
        try:
            work(Job(self.recipe, _Look(self.folder.path)))
        except (_UnfinishedError, RegretlessError, OSError):
            return False  # an error of the work itself is reported by who does it
        return True


def dividing(recipe: Recipe, count: int) -> contextlib.AbstractContextManager[None]:
    """Within the block, divide the responses of a model among `count` processes; with 1, do nothing."""
    return workers.done_by(LocalWorkers(count, recipe.threads or 1)) if count > 1 else contextlib.nullcontext()


class LocalWorkers:
    """Samples in several processes of this machine, each with a copy of the model; all other units in this process.

    The files of a unit do not depend on who does it.
    """

    def __init__(self, count: int, threads: int) -> None:
        """threads: those that each process computes with."""
        self.count, self.threads = count, threads

    def workers(self, need: Need) -> int:
        """Number of workers for such work."""
        return self.count if need.kind == DIVIDED else 1

    def run(self, need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], advance: Advance) -> None:
        """Do all units; each worker does every n-th. What others have finished is kept when one fails.

        Raises what the first worker that fails raises, and RegretlessError if its process was ended.
        """
        count = min(self.workers(need), len(units))
        if count < 2:
            InThisProcess().run(need, make, units, advance)
            return
        done: Counter[str] = Counter()
        with Children([__name__]) as children:
            for number in range(count):
                own = units[number::count]
                children.start(f"{number}", do_units, need, make, own, self.threads, _share(count))
            while children:
                for event in children.events():
                    if isinstance(event, BarMoved):
                        if event.bar.description == need.kind:
                            advance(event.bar.done - done[event.child])
                            done[event.child] = event.bar.done
                    elif isinstance(event, Line):
                        console.print(Text.from_ansi(event.text), soft_wrap=True)
                    elif event.error is not None:
                        raise event.error
                    elif event.exit_code is not None:
                        raise RegretlessError(f"{need.kind}: one of its processes ended {_how(event.exit_code)}")


def do_units(need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], threads: int, share: int) -> None:
    """Do units in this process, made for them. share: CPU cores that its own processes may keep busy."""
    _settle(threads, share)
    with bar(need.kind, total=None) as advance:
        InThisProcess().run(need, make, units, advance)


def _settle(threads: int, share: int) -> None:
    """Make this new process compute as its run says."""
    quiet_libraries()
    limit_cpus(share)
    torch.set_num_threads(threads)


def _how(code: int) -> str:
    if code >= 0:
        return f"with {code}, without a reason; the same command resumes"
    name = signal.Signals(-code).name
    memory = ", which is often the operating system's answer to a lack of memory" if name == "SIGKILL" else ""
    return f"by {name}{memory}; the same command resumes, and parallel=1 computes in one process"


def do_part(recipe: Recipe, run: Path, stage: str, part: str, share: int) -> Mapping[str, Outcome]:
    """Do one part of a stage in this process, made for it; returns the outcomes of its units that ran.

    share: CPU cores that its own processes may keep busy. Raises what the stage raises.
    """
    _settle(recipe.threads or 1, share)
    folder = RunFolder(run)
    with folder.joined():
        PARTS[stage].do(part, Job(recipe, folder))
    return {name: outcome for name, outcome in folder.outcomes.items() if outcome.ran}


class _UnfinishedError(Exception):
    """A unit of work is not finished."""


class _Look(RunFolder):
    """A run folder that does nothing: it raises _UnfinishedError at the first unit that is not finished."""

    def do_together(
        self, units: Sequence[Unit], work: Callable[[Mapping[str, Path]], Sequence[dict[str, Any]]]
    ) -> list[Outcome]:
        folders = [self.stage_folder(unit) for unit in units]
        if not all(folder.is_done() for folder in folders):
            raise _UnfinishedError
        return [Outcome(folder.path, folder.manifest()["summary"], 0.0, ran=False) for folder in folders]
