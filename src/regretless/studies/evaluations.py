"""Finished evaluations of the models of runs: what they measured, and reasons against comparing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from regretless.core.files import fingerprint, read_json
from regretless.core.intervals import PERCENT, Interval, Sums
from regretless.evaluation import harness
from regretless.evaluation.chat.chat_results import CATEGORY, CHAT_KINDS, RESULT, TURN
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

PASS_AT_1_KEY = "pass_at_1"


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
    value: float | None
    """The one number of the run: greedy Pass@1, or the metric of a chat benchmark; None if it could not be computed."""
    interval: Interval
    """95 % interval over the problems."""
    n: int
    """Problems, or judged questions."""
    judge: str = ""
    """Model that judged the answers; empty for a benchmark with gold answers."""
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

    empty = 0
    """Answers without a text, of all passes."""

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

    def observation(self, bounds: Iterable[float | None], factor: float = 1.0, **fields: Any) -> Observation:
        """One metric of it, with the bounds of its interval, in the metric's unit when multiplied by `factor`."""
        interval = Interval(*(float("nan") if bound is None else factor * bound for bound in bounds))
        return Observation(self.run.labels, self.label, self.benchmark, interval=interval, **fields)


class GoldEvaluation(Evaluation):
    """Answers that were compared with gold answers: one greedy pass, and sampled ones."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str) -> None:
        super().__init__(run, label, benchmark)
        self.result = read_json(self.path / "result.json")
        self.passes = {seed: read_json(self.path / f"seed-{seed}" / "result.json") for seed in run.decoding_seeds}
        self.empty = sum(result.get("empty", 0) for result in (self.result, *self.passes.values()))

    @cached_property
    def conditions(self) -> Conditions:
        greedy = of_pass(self.root, self.label, self.benchmark, self.where)
        settings = dict(greedy.settings)
        for seed in self.run.decoding_seeds[:1]:
            sampled = of_pass(self.root, self.label, self.benchmark, self.where, f"seed-{seed}").settings
            settings |= {f"{key} (sampled)": value for key, value in sampled.items()}
        return replace(greedy, settings=settings)

    def observations(self) -> Iterator[Observation]:
        yield self.observation(
            self.result["interval"],
            PERCENT,
            metric=PASS_AT_1_KEY,
            unit="%",
            value=PERCENT * self.result["pass_at_1"],
            n=self.result["n"],
            verdicts=self.result["verdicts"],
            sampled={seed: PERCENT * result["pass_at_1"] for seed, result in self.passes.items()},
        )


class ChatEvaluation(Evaluation):
    """Answers that a model judged."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str) -> None:
        super().__init__(run, label, benchmark)
        self.result = read_json(self.path / RESULT)
        self.empty = self.result.get("empty", 0)

    @cached_property
    def conditions(self) -> Conditions:
        own_files = self.run.makes_its_problems
        return of_chat(self.root, self.label, self.benchmark, self.where, self.result, own_files)

    def observations(self) -> Iterator[Observation]:
        kind = CHAT_KINDS[self.result["benchmark"]]
        for metric, result in self.result["metrics"].items():
            if metric.startswith((CATEGORY, TURN)):
                continue
            values = self.result["values"] if metric == kind.main_metric else {}
            yield self.observation(
                (result["low"], result["high"]),
                metric=metric,
                unit=kind.unit,
                judge=self.result["judge"],
                value=result["value"],
                n=result["n"],
                sums={key: (total, weight) for key, (total, weight) in values.items()},
                scale=kind.scale,
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
            yield self.observation(
                (row["low"], row["high"]),
                PERCENT,
                metric=row["metric"],
                unit="%",
                value=PERCENT * row["value"],
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
    for evaluation in evaluated:
        skipped = _left_out(evaluation.benchmark, evaluated) if isinstance(evaluation, HarnessEvaluation) else ()
        yield from (observation for observation in evaluation.observations() if observation.metric not in skipped)


def _left_out(task: str, evaluated: Sequence[Evaluation]) -> set[str]:
    parts = [
        evaluation.left_out
        for evaluation in evaluated
        if isinstance(evaluation, HarnessEvaluation) and evaluation.benchmark == task
    ]
    return set[str]().union(*parts)


def conflicts(evaluated: Sequence[Evaluation]) -> tuple[list[str], list[str]]:
    """Reasons why numbers cannot stand in one column, and notes about those that can."""
    problems, notes = [], []
    # A task of the harness may have the name of a benchmark.
    for kind, benchmark in dict.fromkeys((type(evaluation), evaluation.benchmark) for evaluation in evaluated):
        group = [
            evaluation for evaluation in evaluated if (type(evaluation), evaluation.benchmark) == (kind, benchmark)
        ]
        problems += [
            f"{benchmark}: answered or graded differently: {text}; evaluate them again alike"
            for text in differing_settings([evaluation.conditions for evaluation in group])
        ]
        # All must have answered the same problems, or those of the same data seed.
        seeds = {evaluation.run.labels.data_seed for evaluation in group}
        if all(evaluation.run.makes_its_problems for evaluation in group) and len(seeds) > 1:
            # Every data seed has a world of its own; within one, all answer the same problems.
            by_seed = [
                [evaluation for evaluation in group if evaluation.run.labels.data_seed == seed] for seed in seeds
            ]
            different = [text for part in by_seed for text in _different_problems(benchmark, part)]
            sizes = {len(evaluation.conditions.problems): evaluation.where for evaluation in group}
            if len(sizes) > 1:
                different.append(f"{benchmark}: {listed({f'{size} problems': [sizes[size]] for size in sizes})}")
            if not different and len({fingerprint(evaluation.conditions.problems) for evaluation in group}) > 1:
                notes.append(f"{benchmark}: its problems are made with the data seed, so each has its own.")
        else:
            different = _different_problems(benchmark, group)
        problems += different
        chosen = {
            str(evaluation.run.path): tuple(evaluation.run.decoding_seeds)
            for evaluation in group
            if isinstance(evaluation, GoldEvaluation)
        }
        if len(set(chosen.values())) > 1:
            notes.append(f"{benchmark}: the runs have different decoding seeds (evaluate.seeds): {_by_run(chosen)}.")
        # Metrics of the harness that have no column.
        if left_out := _left_out(benchmark, group):
            notes.append(
                f"{benchmark}: not in the tables: {', '.join(sorted(left_out))}; a column needs scores of 0 or 1 for "
                "all problems and models, of which 1 is the better."
            )
    return problems, list(dict.fromkeys(notes))


def _different_problems(benchmark: str, group: Sequence[Evaluation]) -> list[str]:
    difference = other_problems([evaluation.conditions for evaluation in group])
    return [f"{benchmark}: {difference}; evaluate them on the same problems"] if difference else []


def _by_run(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{', '.join(map(str, value)) or 'none'} in {run}" for run, value in values.items())
