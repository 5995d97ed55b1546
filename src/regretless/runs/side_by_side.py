"""Work of a stage at the same time, in processes of their own (the recipe's `parallel`).

Models are divided by `SideBySide`: each group of a stage's units has its own folders, seeds and number of threads, so
that its files are those of a run without other processes. Whatever is left of a stage, such as tables over its units,
is then done by the run's own process. The responses of one model are divided by `LocalWorkers`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from rich.text import Text

from regretless.core.errors import RegretlessError, StorageError
from regretless.core.progress import Advance, BarState, SharedBars, bar
from regretless.core.ranks import processes
from regretless.core.terminal import console
from regretless.modeling.load import quiet_libraries
from regretless.runs.recipe import Recipe
from regretless.runs.stages import STAGES, Listing, Session, do_units
from regretless.training.processes import visible_gpus
from regretless.workflow import workers
from regretless.workflow.children import BarMoved, Children, Ended, Line
from regretless.workflow.run_folder import Outcome, RunFolder, Unit
from regretless.workflow.workers import InThisProcess, Need, Worker, limit_cpus

DIVIDED = Need("sample")
"""The kind of work whose responses are divided, whichever stage it is of."""


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
    """Does groups of a stage's units in other processes. At the end of the block, those at work are ended."""

    def __init__(self, recipe: Recipe, folder: RunFolder, count: int) -> None:
        """count: groups at the same time; with 1 nothing is done here. The folder is locked by this process."""
        self.recipe, self.folder, self.count = recipe, folder, count
        self._children = Children([__name__])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._children.__exit__(*error)

    def prepare(self, stages: Sequence[str]) -> None:
        """Let other processes' imports begin if one of these stages has work for them."""
        if self.count < 2:
            return
        for name in stages:
            left = self._left(name)
            divided = [unit for units in left.pop("", ()) for unit in units if unit.need == DIVIDED]
            if len(left) > 1 or divided:
                self._children.import_ahead()

    def do(self, stage: str) -> Mapping[str, Exception]:
        """Do the unfinished groups of a stage that have names, if there are several.

        If one fails, no other is begun, and those at work are finished; raises what the first of them raised. Those of
        an independent stage are all begun; returns the errors of those that failed.
        """
        goes_on = STAGES[stage].independent
        left = self._left(stage) if self.count > 1 else {}
        left.pop("", None)
        if len(left) < 2:
            return {}
        errors: dict[str, Exception] = {}
        waiting = list(left)
        settled = (self.recipe.threads or 1, _share(self.count))
        with SharedBars() as bars:
            while self._children or (waiting and (goes_on or not errors)):
                while waiting and (goes_on or not errors) and len(self._children) < self.count:
                    group = waiting.pop(0)
                    self._children.start(group, do_groups, self.folder.path, left[group], *settled)
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
        in_order = {group: errors[group] for group in left if group in errors}
        for error in in_order.values():
            if not goes_on or not isinstance(error, RegretlessError) or isinstance(error, StorageError):
                raise error
        return in_order

    def _end(self, name: str, event: Ended, errors: dict[str, Exception]) -> None:
        if event.error is not None:
            errors[event.child] = event.error
        elif event.exit_code is not None:
            errors[event.child] = RegretlessError(f"{name}: its process ended {_how(event.exit_code)}")
        else:
            self.folder.outcomes |= event.value

    def _left(self, stage: str) -> dict[str, list[Sequence[Unit]]]:
        """The units of a stage in the groups that are not finished, by their names."""
        listing = Listing(self.recipe, self.folder.path, stage)
        groups: dict[str, list[Sequence[Unit]]] = {}
        for units in listing.groups:
            groups.setdefault(units[0].group, []).append(units)
        return {name: left for name, left in groups.items() if not all(map(listing.has_done, chain(*left)))}


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
        return self.count if need.kind == DIVIDED.kind else 1

    def run(self, need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], advance: Advance) -> None:
        """Do all units; each worker does every n-th. What others have finished is kept when one fails.

        Raises what the first worker that fails raises, and RegretlessError if its process was ended.
        """
        count = min(self.workers(need), len(units))
        if count < 2:
            InThisProcess().run(need, make, units, advance)
            return
        seen: dict[str, BarState] = {}
        with Children([__name__]) as children:
            for number in range(count):
                own = units[number::count]
                children.start(f"{number}", do_share, need, make, own, self.threads, _share(count))
            while children:
                for event in children.events():
                    if isinstance(event, BarMoved):
                        if event.bar.description == need.kind:
                            before = seen.get(event.child, replace(event.bar, done=0, tokens=0))
                            advance(event.bar.done - before.done, event.bar.tokens - before.tokens)
                            seen[event.child] = event.bar
                    elif isinstance(event, Line):
                        console.print(Text.from_ansi(event.text), soft_wrap=True)
                    elif event.error is not None:
                        raise event.error
                    elif event.exit_code is not None:
                        raise RegretlessError(f"{need.kind}: one of its processes ended {_how(event.exit_code)}")


def do_share(need: Need, make: Callable[[], Worker[Any]], units: Sequence[Any], threads: int, share: int) -> None:
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


def do_groups(run: Path, groups: Sequence[Sequence[Unit]], threads: int, share: int) -> Mapping[str, Outcome]:
    """Do units, group by group, in this process, made for it; returns the outcomes of those that ran.

    share: CPU cores that its own processes may keep busy. Raises what the stage raises.
    """
    _settle(threads, share)
    folder = RunFolder(run)
    with folder.joined(), Session() as session:
        for units in groups:
            do_units(folder, units, session)
    return {name: outcome for name, outcome in folder.outcomes.items() if outcome.ran}
