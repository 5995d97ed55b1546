"""Finished evaluations of the models of runs: what they measured, and what speaks against comparing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from regretless.core.files import fingerprint, read_json
from regretless.core.intervals import Interval, Sums
from regretless.evaluation import harness
from regretless.evaluation.chat.chat_results import CATEGORY, MAIN_METRICS, RESULT, SCALES, TURN, UNITS
from regretless.evaluation.conditions import (
    Conditions,
    differing_settings,
    listed,
    of_chat,
    of_harness,
    of_pass,
    other_problems,
)
from regretless.studies.compared_runs import Run, RunToCompare
from regretless.workflow.run_folder import BASE

PASS_AT_1 = "pass_at_1"
PERCENT = 100.0


@dataclass(frozen=True)
class Observation:
    """One metric of one model on one benchmark, on the metric's own scale (percent, or a judge's 1 to 10)."""

    run: Run
    """The run that it is from, with all labels set."""
    method: str
    """Label of the model in the run: its objective, or `base`."""
    benchmark: str
    metric: str
    unit: str
    judge: str
    """Model that judged the answers; empty for a benchmark with gold answers."""
    value: float | None
    """The one number of the run: greedy Pass@1, or the metric of a chat benchmark; None if it could not be computed."""
    interval: Interval
    """95 % interval over the problems."""
    n: int
    """Problems, or judged questions."""
    verdicts: Mapping[str, bool] = field(default_factory=dict)
    """By problem, whether the greedy answer is correct; empty for other metrics."""
    sums: Sums = field(default_factory=dict)
    """By question, for a chat metric that is a mean over questions: sum and weight of its values, to be scaled."""
    scale: float = 1.0
    sampled: Mapping[int, float] = field(default_factory=dict)
    """Decoding seed → value of the pass that was sampled with it."""

    @property
    def train_seed(self) -> int | None:
        """Seed of its training; None for the base model, which preference training did not touch."""
        return None if self.method == BASE else self.run.train_seed


class Evaluation(ABC):
    """One model's finished evaluation on one benchmark."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str, folder: str | None = None) -> None:
        self.run, self.label, self.benchmark = run, label, benchmark
        self.root = run.path / "evaluate"
        self.path = self.root / label / (folder or benchmark)

    @property
    def where(self) -> str:
        """The run and the model."""
        return f"{self.run.path} ({self.label})"

    @cached_property
    @abstractmethod
    def conditions(self) -> Conditions:
        """How it was decoded and graded, or judged, and on which problems."""

    @abstractmethod
    def observations(self) -> Iterator[Observation]:
        """What it measured."""


class GoldEvaluation(Evaluation):
    """Answers that were compared with gold answers: one greedy pass, and sampled ones."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str) -> None:
        super().__init__(run, label, benchmark)
        self.result = read_json(self.path / "result.json")
        self.passes = {seed: read_json(self.path / f"seed-{seed}" / "result.json") for seed in run.decoding_seeds}

    @cached_property
    def conditions(self) -> Conditions:
        greedy = of_pass(self.root, self.label, self.benchmark, self.where)
        settings = dict(greedy.settings)
        for seed in self.run.decoding_seeds[:1]:
            sampled = of_pass(self.root, self.label, self.benchmark, self.where, f"seed-{seed}").settings
            settings |= {f"{key} (sampled)": value for key, value in sampled.items()}
        return replace(greedy, settings=settings)

    def observations(self) -> Iterator[Observation]:
        low, high = (PERCENT * bound if bound is not None else float("nan") for bound in self.result["interval"])
        yield Observation(
            run=self.run.labels,
            method=self.label,
            benchmark=self.benchmark,
            metric=PASS_AT_1,
            unit="%",
            judge="",
            value=PERCENT * self.result["pass_at_1"],
            interval=Interval(low, high),
            n=self.result["n"],
            verdicts=self.result["verdicts"],
            sampled={seed: PERCENT * one["pass_at_1"] for seed, one in self.passes.items()},
        )


class ChatEvaluation(Evaluation):
    """Answers that a model judged."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str) -> None:
        super().__init__(run, label, benchmark)
        self.result = read_json(self.path / RESULT)

    @cached_property
    def conditions(self) -> Conditions:
        own_files = self.run.makes_its_problems
        return of_chat(self.root, self.label, self.benchmark, self.where, self.result, own_files)

    def observations(self) -> Iterator[Observation]:
        kind = self.result["benchmark"]
        for metric, found in self.result["metrics"].items():
            if metric.startswith((CATEGORY, TURN)):
                continue
            low, high = (float("nan") if found[name] is None else found[name] for name in ("low", "high"))
            values = self.result["values"] if metric == MAIN_METRICS[kind] else {}
            yield Observation(
                run=self.run.labels,
                method=self.label,
                benchmark=self.benchmark,
                metric=metric,
                unit=UNITS[kind],
                judge=self.result["judge"],
                value=found["value"],
                interval=Interval(low, high),
                n=found["n"],
                sums={key: (total, weight) for key, (total, weight) in values.items()},
                scale=SCALES[kind],
            )


class HarnessEvaluation(Evaluation):
    """A task of lm-evaluation-harness."""

    def __init__(self, run: RunToCompare, label: str, task: str, scores: Mapping[str, Mapping[str, float]]) -> None:
        super().__init__(run, label, task, harness.FOLDER)
        self.scores = {key: values for key, values in scores.items() if harness.task_of(key) == task}

    @cached_property
    def conditions(self) -> Conditions:
        # A problem's name contains the hash of its content.
        problems = dict.fromkeys((problem for values in self.scores.values() for problem in values), "")
        return of_harness(self.root, self.label, harness.FOLDER, self.where, problems)

    @cached_property
    def left_out(self) -> set[str]:
        """Metrics of which more is not better, or not known to be: their scores of single problems are not 0 or 1."""
        lower = harness.lower_is_better(self.path / harness.RAW)
        return {
            harness.metric_of(key)
            for key, scores in self.scores.items()
            if key.rpartition("|")[0] in lower or not harness.are_shares(scores.values())
        }

    def observations(self) -> Iterator[Observation]:
        for key, scores in self.scores.items():
            if harness.metric_of(key) in self.left_out:
                continue
            (row,) = harness.rows_of({self.label: {key: scores}})
            low, high = (float("nan") if row[name] is None else PERCENT * row[name] for name in ("low", "high"))
            yield Observation(
                run=self.run.labels,
                method=self.label,
                benchmark=self.benchmark,
                metric=row["metric"],
                unit="%",
                judge="",
                value=PERCENT * row["value"],
                interval=Interval(low, high),
                n=row["n"],
                verdicts={problem: bool(score) for problem, score in scores.items()},
            )


def evaluations_of(run: RunToCompare) -> Iterator[Evaluation]:
    """Everything that a run evaluated."""
    for label, benchmark in run.evaluated():
        if benchmark in run.benchmarks:
            yield GoldEvaluation(run, label, benchmark)
        elif benchmark in run.chat:
            yield ChatEvaluation(run, label, benchmark)
        else:
            scores = read_json(run.path / "evaluate" / label / benchmark / harness.SCORES)
            for task in dict.fromkeys(map(harness.task_of, scores)):
                yield HarnessEvaluation(run, label, task, scores)


def observations_of(evaluated: Sequence[Evaluation]) -> Iterator[Observation]:
    """What evaluations measured; a metric of the harness that one of them leaves out is left out of all."""
    for one in evaluated:
        skipped = _left_out(one.benchmark, evaluated) if isinstance(one, HarnessEvaluation) else ()
        yield from (found for found in one.observations() if found.metric not in skipped)


def _left_out(task: str, evaluated: Sequence[Evaluation]) -> set[str]:
    parts = [one.left_out for one in evaluated if isinstance(one, HarnessEvaluation) and one.benchmark == task]
    return set[str]().union(*parts)


def conflicts(evaluated: Sequence[Evaluation]) -> tuple[list[str], list[str]]:
    """Reasons why numbers cannot stand in one column, and notes about those that can."""
    problems, notes = [], []
    # A task of the harness may have the name of a benchmark.
    for kind, benchmark in dict.fromkeys((type(one), one.benchmark) for one in evaluated):
        group = [one for one in evaluated if (type(one), one.benchmark) == (kind, benchmark)]
        problems += [
            f"{benchmark}: answered or graded differently: {text}; evaluate them again alike"
            for text in differing_settings([one.conditions for one in group])
        ]
        seeds = {one.run.labels.data_seed for one in group}
        if all(one.run.makes_its_problems for one in group) and len(seeds) > 1:
            # Every data seed has a world of its own; within one, all answer the same problems.
            own = [[one for one in group if one.run.labels.data_seed == seed] for seed in seeds]
            found = [text for part in own for text in _different_problems(benchmark, part)]
            sizes = {len(one.conditions.problems): one.where for one in group}
            if len(sizes) > 1:
                found.append(f"{benchmark}: {listed({f'{size} problems': [sizes[size]] for size in sizes})}")
            if not found and len({fingerprint(one.conditions.problems) for one in group}) > 1:
                notes.append(f"{benchmark}: its problems are made with the data seed, so each has its own.")
        else:
            found = _different_problems(benchmark, group)
        problems += found
        chosen = {str(one.run.path): tuple(one.run.decoding_seeds) for one in group if isinstance(one, GoldEvaluation)}
        if len(set(chosen.values())) > 1:
            notes.append(f"{benchmark}: the runs have different decoding seeds (evaluate.seeds): {_by_run(chosen)}.")
        if left_out := _left_out(benchmark, group):
            notes.append(
                f"{benchmark}: not in the tables: {', '.join(sorted(left_out))}; a column needs scores of 0 or 1 for "
                "all problems and models, of which 1 is the better."
            )
    return problems, list(dict.fromkeys(notes))


def _different_problems(benchmark: str, group: Sequence[Evaluation]) -> list[str]:
    found = other_problems([one.conditions for one in group])
    return [f"{benchmark}: {found}; evaluate them on the same problems"] if found else []


def _by_run(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{', '.join(map(str, value)) or 'none'} in {run}" for run, value in values.items())
