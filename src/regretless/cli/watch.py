"""A live view of a run: its trainings from the logs that they write, other stages from what their bars say."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from regretless.core.errors import DataError, RegretlessError
from regretless.core.files import read_json
from regretless.core.paths import refuse_urls
from regretless.core.progress import BETWEEN_LINES
from regretless.core.terminal import FoldingTable, terminal
from regretless.core.yaml_settings import read_yaml
from regretless.training.log import LOG_FILE, TrainingLog, is_alive_there, read
from regretless.training.methods import DEFAULT_METHOD, methods_of
from regretless.workflow.run_folder import LOCK, OWNER, PROGRESS
from regretless.workflow.stage_folder import MANIFEST, PENDING

SPARKS = "▁▂▃▄▅▆▇█"
AT_WORK = ("running", "saving")
COURSE = 32
"""Characters in the sparkline of a measure."""


class LoggedMeasure(NamedTuple):
    """One row of the view: a name in the log, and how it is displayed."""

    key: str
    name: str
    form: str


MEASURES = (
    LoggedMeasure("loss", "loss", "{:.4f}"),
    LoggedMeasure("rewards/margins", "reward margin, nats", "{:+.3f}"),
    LoggedMeasure("rewards/accuracies", "reward accuracy", "{:.1%}"),
    LoggedMeasure("rewards/saturated", "saturated pairs", "{:.1%}"),
    LoggedMeasure("logratios/chosen", "log-ratio of the chosen, nats", "{:+.3f}"),
    LoggedMeasure("logratios/rejected", "log-ratio of the rejected, nats", "{:+.3f}"),
    LoggedMeasure("grad_norm", "gradient norm", "{:.3g}"),
    LoggedMeasure("tokens_per_second", "tokens a second", "{:,.0f}"),
)


@dataclass(frozen=True)
class Trainings:
    """The trainings of a folder at one moment, keyed by their path in it."""

    logs: Mapping[str, TrainingLog]
    to_come: Sequence[str]
    """Trainings that the folder's recipe asks for and that have not ended."""
    run_is_alive: bool
    """True if the process that runs the recipe is alive."""
    saving: Sequence[str] = ()
    """Trainings whose steps are done, and whose process has not written the model yet."""
    bars: Sequence[str] = ()
    """How far the run's other stages are: a line about each bar."""

    def state(self, name: str) -> str:
        """What a training does, in a word."""
        return "saving" if name in self.saving else self.logs[name].state

    @property
    def current(self) -> str | None:
        """The running training, else the one that started last."""
        order = sorted(self.logs, key=lambda name: (self.logs[name].state == "running", self.logs[name].start["time"]))
        return order[-1] if order else None

    @property
    def shown(self) -> list[str]:
        """The running trainings, of which a recipe may have several at the same time; else the current one."""
        running = [name for name in self.logs if self.state(name) in AT_WORK]
        return running or [name for name in [self.current] if name is not None]

    @property
    def is_over(self) -> bool:
        """True if the run has ended, and each of its trainings with its model."""
        at_work = self.run_is_alive or self.saving or any(log.state == "running" for log in self.logs.values())
        return not self.to_come and not at_work


def watch_training(folder: Path, *, once: bool, every: float = 1.0, console: Console | None = None) -> None:
    """Show what is at work in a run folder (or in training's own output folder) until it ends; `once`: one frame.

    An output that is no terminal gets a line for each line of a training's log, and every minute one about each other
    bar. every: seconds between two updates. Raises DataError if the folder has neither a training nor a run at work,
    RegretlessError if it was interrupted.
    """
    refuse_urls({"RUN_DIR": folder})
    console = console or terminal()
    trainings = look(folder)
    if trainings.current is None and not trainings.run_is_alive:
        raise DataError(
            f"{folder}: no training here, and no run at work; expected {LOG_FILE} in it, or in train/<name> or "
            "pretrain/<name> below it, as `regretless run`, `regretless train` and PreferenceTrainer write it once "
            "training begins"
        )
    if once:
        console.print(frame(folder, trainings))
        return
    said: Counter[str] = Counter()
    told = -BETWEEN_LINES
    live = Live(console=console, auto_refresh=False)
    with live if console.is_terminal else contextlib.nullcontext():
        while True:
            if console.is_terminal:
                live.update(frame(folder, trainings), refresh=True)
            for name in () if console.is_terminal else trainings.logs:
                lines = _lines(trainings, name)
                for text in lines[said[name] :]:
                    console.print(text, soft_wrap=True, highlight=False)
                said[name] = len(lines)
            if not console.is_terminal and trainings.bars and time.monotonic() - told >= BETWEEN_LINES:
                told = time.monotonic()
                for text in trainings.bars:
                    console.print(text, soft_wrap=True, highlight=False)
            _check(folder, trainings)
            if trainings.is_over:
                return
            time.sleep(every)
            trainings = look(folder)


def _lines(trainings: Trainings, name: str) -> list[str]:
    """The log of a training in words, and how it ended."""
    log, state = trainings.logs[name], trainings.state(name)
    texts = []
    for line in log.lines:
        values = [f"{text} {form.format(line[key])}" for key, text, form in MEASURES if _is_number(line.get(key))]
        texts.append(f"{name}: step {line['step']} of {log.steps}; {'; '.join(values)}")
    return texts if state in AT_WORK else [*texts, f"{name}: {state} at step {log.step} of {log.steps}"]


def look(folder: Path) -> Trainings:
    """The trainings of a folder at this moment."""
    files = [
        folder / LOG_FILE,
        # Those of the folder's own recipe, of runs in it that a stage is made of, and of the runs of a study. The last
        # models of rounds are in `train` once more.
        *(
            file
            for above in ("", "*/", "*/*/", "*/*/*/")
            for stage in ("pretrain", "train")
            for file in sorted(folder.glob(f"{above}{stage}/*/{LOG_FILE}"))
            if above or stage == "pretrain" or not (folder / "rounds").is_dir()
        ),
    ]
    logs = {file.parent.relative_to(folder).as_posix(): log for file in files if (log := read(file)) is not None}
    ended = {name for name, log in logs.items() if log.state == "ended"}
    to_come = [name for name in _asked_for(folder) if name not in ended and not (folder / name / MANIFEST).is_file()]
    # A stage marks its folder as unfinished until the model is there; PreferenceTrainer by itself has no such mark.
    saving = [
        name
        for name in ended
        if (folder / name / PENDING).is_file() and is_alive_there(logs[name].start["host"], logs[name].start["process"])
    ]
    is_alive, bars = _run_is_alive(folder), []
    if is_alive:
        with contextlib.suppress(FileNotFoundError):  # between two bars
            bars = json.loads((folder / PROGRESS).read_bytes())
    return Trainings(logs, to_come, is_alive, sorted(saving), bars)


def _asked_for(folder: Path) -> Iterator[str]:
    """Folders of the trainings that the run's recipe names, in its order."""
    file = folder / "recipe.yaml"
    recipe = read_yaml(file) if file.is_file() else {}
    yield from (f"pretrain/{name}" for name in recipe.get("pretrain") or ())
    if isinstance(train := recipe.get("train"), Mapping):
        methods, rounds = methods_of(train.get("objective", DEFAULT_METHOD)), recipe.get("rounds")
        if not isinstance(rounds, Mapping):
            yield from (f"train/{name}" for name in methods)
            return
        for name in methods:
            result = folder / "train" / name / MANIFEST
            # Bounds may have ended the rounds early.
            last = read_json(result)["settings"] if result.is_file() else {}
            count = last["number"] if last.get("count") == rounds["count"] else rounds["count"]
            yield f"rounds/1/train/{name}"
            yield from (f"rounds/{number}/{name}/train/{name}" for number in range(2, count + 1))


def _run_is_alive(folder: Path) -> bool:
    file = folder / LOCK
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    owner = OWNER.match(text)
    return owner is not None and is_alive_there(owner[2], int(owner[1]))


def _check(folder: Path, trainings: Trainings) -> None:
    """Raise RegretlessError if training stopped before its end and nothing is running."""
    if trainings.run_is_alive:
        return
    name = trainings.current
    if name is None:
        if trainings.to_come:
            raise RegretlessError(_interrupted(folder, trainings))
        return
    log = trainings.logs[name]
    path, reached = folder / name, f"step {log.step} of {log.steps}"
    if log.end is not None and "failed" in log.end:
        raise RegretlessError(f"{path}: training failed after {reached}: {log.end['failed']}")
    if log.state == "lost":
        raise RegretlessError(
            f"{path}: training was interrupted after {reached}: its process {log.start['process']} is gone; the "
            "command that started it resumes from its last checkpoint"
        )
    if log.state == "ended" and trainings.to_come:
        raise RegretlessError(_interrupted(folder, trainings))


def _interrupted(folder: Path, trainings: Trainings) -> str:
    return f"{folder}: the run was interrupted before {', '.join(trainings.to_come)}; the same command resumes it"


def frame(folder: Path, trainings: Trainings) -> RenderableType:
    """One picture of the trainings: progress and measures of those at work, and the ones to come."""
    shown = trainings.shown
    waiting = [name for name in trainings.to_come if name not in shown]
    parts: list[RenderableType] = [] if shown else [Text(str(folder), style="bold")]
    for name in shown:
        log = trainings.logs[name]
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(log.steps, log.step, width=40), _clock(log))
        title = ((folder / name).as_posix(), "bold"), f"  {log.start['objective']}  {trainings.state(name)}"
        parts += [Text.assemble(*title), bar, _measures(log)]
    parts += [Text(line) for line in trainings.bars]
    return Group(*parts, *([Text(f"to come: {', '.join(waiting)}", style="dim")] if waiting else []))


def _clock(log: TrainingLog) -> Text:
    left = log.seconds_left() if log.state == "running" else None
    text = f"step {log.step} of {log.steps}"
    if left is not None:
        text += f", {timedelta(seconds=round(left))} left"
    return Text(text)


def _measures(log: TrainingLog) -> Table:
    table = FoldingTable("measure", "first", "last", "course", box=None, pad_edge=False)
    for column in table.columns[1:3]:
        column.justify = "right"
    for key, name, form in MEASURES:
        values = [float(line[key]) for line in log.lines if _is_number(line.get(key))]
        if values:
            table.add_row(name, form.format(values[0]), form.format(values[-1]), sparks(values))
    return table


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def sparks(values: Sequence[float], width: int = COURSE) -> str:
    """The last `width` values as bars between their minimum and maximum; values that are not finite are gaps."""
    recent = values[-width:]
    finite = [value for value in recent if abs(value) < float("inf")]
    if not finite:
        return " " * len(recent)
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] if abs(value) < float("inf") else " " for value in recent)
