"""Real kills, spread over all stages of a run; after each the same command goes on, and the end is compared.

    .venv/bin/python tests/kill_sweep.py --kills 100        (or: make kill-sweep N=100)

A recipe that holds every stage in miniature (`kill_sweep.yaml`) runs undisturbed. Then, trial after trial, it runs in
the same place and is killed one to several times; the command that was killed is given again until it ends. Half of the
kills go to the stages by turns, half by the time that they took; each comes at a random moment of a stage's work. Eight
in ten are SIGKILL, one is SIGTERM, one SIGINT. In the end everything in the run folder is compared (`run_contents.py`
says what is left out). A table by stage is printed; any difference, or a command that does not go on, is an error.

So does one of rounds (`kill_sweep_rounds.yaml`), which gets half of the kills: all of them in its rounds.

Every run is a process of its own that executes the command line; it is forked from one that has imported the package,
so that time goes into the work that is to be killed. The judge is a server of this script's process, and answers on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from regretless.world import local_judge
from regretless.world.chat_files import write_chat_benchmarks
from regretless.world.problems import Generator
from run_contents import contents, differences

RECIPE = Path(__file__).with_name("kill_sweep.yaml")
ROUNDS = Path(__file__).with_name("kill_sweep_rounds.yaml")
SIGNALS = [signal.SIGKILL] * 8 + [signal.SIGTERM, signal.SIGINT]
KILLS_IN_A_TRIAL = (6, 1, 3, 8)
"""By turns: runs that are killed again while they go on, and one that is killed once."""
BETWEEN = "between stages"


@dataclass(frozen=True)
class Unit:
    """A unit of work of the undisturbed run."""

    name: str
    seconds: float

    @property
    def stage(self) -> str:
        """What the table calls it."""
        return stage_of(self.name)


def stage_of(unit: str) -> str:
    """Stage of a unit's folder; an evaluation's sampling and its judging are stages of their own, as are a round's."""
    first, *rest = unit.split("/")
    if first == "rounds" and len(rest) > 1:
        number, *inner = rest
        # Behind the first round, a method's stages are in a folder of its own.
        return f"round {number}: {inner[min(len(inner), 2) - 1 if number != '1' else 0]}"
    if first == "evaluate" and rest:
        return "evaluate: sampling" if rest[0] == "samples" else "evaluate: judging"
    return first


@dataclass(frozen=True)
class Kill:
    """A kill that was carried out: the stage at work, and the signal."""

    stage: str
    number: signal.Signals


@dataclass
class Trial:
    """A run that was killed, and what it ended as."""

    kills: list[Kill] = field(default_factory=list)
    without_effect: list[signal.Signals] = field(default_factory=list)
    """Signals that a process got and did not end by; it may have been ending by itself just then."""
    code: int | None = None
    differences: list[str] = field(default_factory=list)

    @property
    def resumed(self) -> bool:
        """Whether the command, given again, ended well."""
        return self.code == 0


class Sweep:
    """Runs of one recipe in one place: `folder / "run"`."""

    def __init__(self, recipe: Path, folder: Path, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` is called in every process ahead of the command: it can plant a fault."""
        self.recipe, self.folder, self.prepare = folder / recipe.name, folder, prepare
        folder.mkdir(parents=True, exist_ok=True)
        for file in (RECIPE, recipe):  # the one of rounds extends the other
            (folder / file.name).write_text(file.read_text("utf-8").replace("{chat}", str(folder / "chat")), "utf-8")
        self.run, self.log = folder / "run", folder / "output.log"
        rng = random.Random(7)
        problems = Generator((1, 1), 1)
        write_chat_benchmarks(folder / "chat", [problems.draw(rng) for _ in range(32)], rng)
        # Forked from a process that has imported everything.
        self._context = multiprocessing.get_context("forkserver")
        last = "regretless.workflow.fork_origin"
        self._context.set_forkserver_preload(["regretless.runs.pipeline", "regretless.cli.verbs", __name__, last])

    def undisturbed(self) -> tuple[list[Unit], dict[str, Any]]:
        """The units of a run that nothing kills, in their order, and its contents."""
        shutil.rmtree(self.run, ignore_errors=True)
        if (code := self._to_the_end()) != 0:
            raise SystemExit(f"the undisturbed run ended with {code}:\n{self._tail()}")
        return units(self.run), contents(self.run)

    def trial(self, plan: Sequence[tuple[Unit, float, signal.Signals]], expected: dict[str, Any]) -> Trial:
        """One run, killed as planned: in a unit, after a share of the time that it took undisturbed."""
        shutil.rmtree(self.run, ignore_errors=True)
        trial = Trial()
        for unit, share, number in plan:
            process = self._start()
            was_sent = self._kill(process, unit, share, number)
            if was_sent and process.exitcode != 0:
                trial.kills.append(Kill(self._at_work(), number))
            elif process.exitcode != 0:
                trial.code = process.exitcode
                break
            elif was_sent:
                trial.without_effect.append(number)
        else:
            trial.code = self._to_the_end()
        trial.differences = differences(expected, contents(self.run)) if trial.resumed else [self._tail()]
        return trial

    def _start(self) -> Any:
        process = self._context.Process(target=command, args=(self.recipe, self.run, self.log, self.prepare))
        process.start()
        return process

    def _to_the_end(self) -> int | None:
        process = self._start()
        process.join()
        return process.exitcode

    def _kill(self, process: Any, unit: Unit, share: float, number: signal.Signals) -> bool:
        """Send the signal and wait for the process to end; whether there was still one to send it to."""
        folder = self.run / unit.name
        while process.is_alive() and not (self._owner() == process.pid and (folder / "pending.json").is_file()):
            if self._owner() == process.pid and (folder / "manifest.json").is_file():
                break  # done in an earlier process: any moment of what comes next
            time.sleep(0.001)
        process.join(share * unit.seconds)
        if not process.is_alive():
            return False
        os.kill(process.pid, number)
        process.join()
        return True

    def _owner(self) -> int | None:
        """The process at work in the run folder."""
        try:
            found = re.match(r"process (\d+) ", (self.run / ".lock").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return int(found[1]) if found else None

    def _at_work(self) -> str:
        """Stage that a process was at when it was killed."""
        begun = [path.parent for path in self.run.rglob("pending.json")]
        names = [path.relative_to(self.run).as_posix() for path in begun if not (path / "manifest.json").is_file()]
        return stage_of(names[0]) if names else BETWEEN

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def command(recipe: Path, run: Path, log: Path, prepare: Callable[[], None] | None) -> None:
    """What each process does: `regretless run RECIPE --output-dir RUN`, its output in a file."""
    with log.open("a", encoding="utf-8") as handle:
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    # As from a terminal: what a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare is not None:
        prepare()
    from regretless.cli.app import main

    main(["run", str(recipe), "--output-dir", str(run)])


def units(run: Path) -> list[Unit]:
    """The finished units of a run folder, in the order of their work."""
    manifests = sorted(run.rglob("manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    return [
        Unit(path.parent.relative_to(run).as_posix(), float(json.loads(path.read_bytes())["seconds"]))
        for path in manifests
    ]


def plans(found: Sequence[Unit], kills: int, rng: random.Random) -> Iterator[list[tuple[Unit, float, signal.Signals]]]:
    """For each trial where to kill, in the order of the work; without end, for a kill may come too late."""
    by_stage: dict[str, list[Unit]] = defaultdict(list)
    found = [unit for unit in found if unit.name.startswith("rounds/")] or found
    for unit in found:
        by_stage[unit.stage].append(unit)
    place = {unit: number for number, unit in enumerate(found)}
    stages, number = rng.sample(list(by_stage), len(by_stage)), 0  # so that few kills reach late stages, too
    for size in itertools.cycle(KILLS_IN_A_TRIAL):
        plan = []
        for _ in range(min(size, kills)):
            choice = by_stage[stages[number // 2 % len(stages)]] if number % 2 else found
            unit = rng.choices(choice, [max(unit.seconds, 0.001) for unit in choice])[0]
            plan.append((unit, rng.random(), SIGNALS[number % len(SIGNALS)]))
            number += 1
        yield sorted(plan, key=lambda item: (place[item[0]], item[1]))


def table(found: Sequence[Unit], trials: Sequence[Trial]) -> Table:
    """By stage: the work, the kills, and how many of them were in runs that went on and ended equal."""
    shown = Table(title="kills by stage")
    for name in ("stage", "work, s", "kills", "SIGKILL", "SIGTERM", "SIGINT", "resumed", "equal", "different"):
        shown.add_column(name, justify="left" if name == "stage" else "right")
    work: Counter[str] = Counter()
    for unit in found:
        work[unit.stage] += unit.seconds  # type: ignore[assignment]
    rows = [*work, BETWEEN]
    for stage in [*rows, None]:
        hits = [(kill, trial) for trial in trials for kill in trial.kills if stage in (None, kill.stage)]
        numbers = Counter(kill.number for kill, _ in hits)
        resumed = sum(trial.resumed for _, trial in hits)
        equal = sum(trial.resumed and not trial.differences for _, trial in hits)
        seconds = sum(work.values()) if stage is None else work[stage]
        shown.add_row(
            stage or "all",
            f"{seconds:.1f}",
            *map(str, (len(hits), *(numbers[number] for number in dict.fromkeys(SIGNALS)))),
            *map(str, (resumed, equal, resumed - equal)),
        )
    return shown


def sweep(recipe: Path, folder: Path, kills: int, seed: int, prepare: Callable[[], None] | None = None) -> bool:
    """Carry out at least `kills` kills and print what came of them; whether all runs went on and ended equal."""
    console, rng, trials = Console(width=100), random.Random(seed), list[Trial]()
    with local_judge.serving():
        work = Sweep(recipe, folder, prepare)
        found, expected = work.undisturbed()
        seconds = sum(unit.seconds for unit in found)
        console.print(f"undisturbed: {len(found)} units of work, {seconds:.1f} s, {len(expected)} files", style="bold")
        for plan in plans(found, kills, rng):
            trial = work.trial(plan, expected)
            trials.append(trial)
            said = [f"{kill.number.name} in {kill.stage}" for kill in trial.kills]
            said += [f"{number.name} without effect" for number in trial.without_effect]
            told = ", ".join(said) or "no kill in time"
            outcome = "equal" if trial.resumed and not trial.differences else "DIFFERENT" if trial.resumed else "FAILED"
            console.print(f"trial {len(trials)}: {told}: {outcome}", markup=False, highlight=False, soft_wrap=True)
            if trial.differences:
                console.print("\n".join(trial.differences), markup=False, highlight=False, soft_wrap=True)
                with contextlib.suppress(FileNotFoundError):
                    work.run.rename(folder / f"trial-{len(trials)}")
            if sum(len(trial.kills) for trial in trials) >= kills:
                break
        # Where runs differ that nothing kills, no kill is to blame.
        if any(trial.differences for trial in trials) and (changed := differences(expected, work.undisturbed()[1])):
            console.print("\n".join(["two undisturbed runs differ:", *changed]), markup=False, soft_wrap=True)
    console.print(table(found, trials))
    failed = sum(bool(trial.differences) for trial in trials)
    total = sum(len(trial.kills) for trial in trials)
    console.print(f"{total} kills in {len(trials)} trials; {failed} trials did not end as the undisturbed run")
    if without := sum(len(trial.without_effect) for trial in trials):
        console.print(f"{without} signals more without effect: their process ended well all the same")
    return not failed


def main() -> None:
    """Parse the command line; the exit code says whether all was equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, help="the only one to run; by default both")
    parser.add_argument("--folder", type=Path, help="where to work, and what is kept of runs that differ")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        recipes = [RECIPE, ROUNDS] if arguments.recipe is None else [arguments.recipe.resolve()]
        kills = math.ceil(arguments.kills / len(recipes))
        were_equal = [sweep(each, folder.resolve() / each.stem, kills, arguments.seed) for each in recipes]
        sys.exit(not all(were_equal))


if __name__ == "__main__":
    main()
