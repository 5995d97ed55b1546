"""Finished evaluations of the models of runs: what they measured, and what speaks against comparing them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from regretless.core.files import fingerprint, path_fingerprint, read_json
from regretless.core.intervals import Interval, Sums
from regretless.core.run_folder import BASE
from regretless.core.stage_folder import MANIFEST
from regretless.evaluation import harness
from regretless.evaluation.chat.chat_results import CATEGORY, MAIN_METRICS, RESULT, SCALES, TURN, UNITS
from regretless.studies.compared_runs import Run, RunToCompare, keys_of, text_of

PASS_AT_1 = "pass_at_1"
PERCENT = 100.0
NOT_GRADING = {"workers"}
"""Settings of verification that change its speed only."""
NOT_DECODING = {"batch_size", "server", "vllm", "seed"}
"""Settings of sampling that change where answers are made, and the seed: greedy decoding has none, and that of a
sampled pass is in its name."""
NOT_JUDGING = {"server", "replies", "when_spent", "bootstrap", "seed", "benchmark", "judge", "questions", "limit"}
"""Settings of a chat benchmark that change no judgment, that name its column, or whose content is compared."""
NOT_ASKING = {"model", "tasks", "device"}
"""Settings of the harness that change no problem and no score; `tasks` are columns."""
ANSWERING = ("benchmark", "questions", "limit", "template", "max_new_tokens", "seed")
"""Settings whose hash names the folder of a chat benchmark's answers (`ChatBenchmarkConfig.answering`)."""


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
        self.path = run.path / "evaluate" / label / (folder or benchmark)
        self.samples = run.path / "evaluate" / "samples" / label

    @property
    def where(self) -> str:
        """The run and the model."""
        return f"{self.run.shown} ({self.label})"

    @cached_property
    @abstractmethod
    def settings(self) -> dict[str, str]:
        """How it was decoded and graded, or judged, by keys of the recipe."""

    @cached_property
    @abstractmethod
    def problems(self) -> dict[str, str]:
        """Problem → hash of its content (empty where that is not known)."""

    @abstractmethod
    def observations(self) -> Iterator[Observation]:
        """What it measured."""

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        """The settings that it ran with."""
        settings: Mapping[str, Any] = read_json(self.path / MANIFEST)["settings"]
        return settings

    def _decoding(self, folder: Path) -> dict[str, str]:
        if not (folder / MANIFEST).is_file():
            return {}
        sampling = read_json(folder / MANIFEST)["settings"]["sampling"]
        return {f"evaluate.{key}": text_of(value) for key, value in sampling.items() if key not in NOT_DECODING}


class GoldEvaluation(Evaluation):
    """Answers that were compared with gold answers: one greedy pass, and sampled ones."""

    def __init__(self, run: RunToCompare, label: str, benchmark: str) -> None:
        super().__init__(run, label, benchmark)
        self.result = read_json(self.path / "result.json")
        self.passes = {seed: read_json(self.path / f"seed-{seed}" / "result.json") for seed in run.decoding_seeds}

    @cached_property
    def settings(self) -> dict[str, str]:
        found = {f"verify.{key}": text_of(value) for key, value in self.manifest.items() if key not in NOT_GRADING}
        found |= self._decoding(self.samples / self.benchmark / "greedy")
        for seed in self.run.decoding_seeds[:1]:
            sampled = self._decoding(self.samples / self.benchmark / f"seed-{seed}")
            found |= {f"{key} (sampled)": value for key, value in sampled.items()}
        return found

    @cached_property
    def problems(self) -> dict[str, str]:
        file = self.path / "responses.parquet"
        if not file.is_file():
            return dict.fromkeys(self.result["verdicts"], "")
        rows = pq.read_table(file, columns=["prompt_id", "prompt", "answer"]).to_pylist()
        return {row["prompt_id"]: fingerprint([row["prompt"], row["answer"]]) for row in rows}

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
    def settings(self) -> dict[str, str]:
        judging = {
            f"evaluate.chat.{self.benchmark}.{key}": self._file_or_text(key, value)
            for key, value in self.manifest.items()
            if key not in NOT_JUDGING
        }
        return judging | (self._decoding(self.first_turns[0]) if self.first_turns else {})

    def _file_or_text(self, key: str, value: Any) -> str:
        """The value; for a file that is still there, its content, wherever it is."""
        if key not in ("judge_prompt", "references", "baseline", "gamed_baselines") or not isinstance(value, str):
            return text_of(value)
        path = Path(value).expanduser()
        if self.run.makes_its_problems and key != "judge_prompt":
            return "a file"  # made with the run's seed, like its problems
        return path_fingerprint(path) if path.is_file() else value

    @cached_property
    def first_turns(self) -> list[Path]:
        """Folders of the answers to the first prompts, one for each temperature."""
        kind = f"{self.manifest['benchmark']}-{fingerprint({name: self.manifest.get(name) for name in ANSWERING})[:8]}"
        return sorted(manifest.parent for manifest in self.samples.glob(f"{kind}/turn-1-*/{MANIFEST}"))

    @cached_property
    def problems(self) -> dict[str, str]:
        asked = [str(read_json(turn / MANIFEST)["settings"]["prompts"]) for turn in self.first_turns]
        return {"questions": fingerprint([self.result["questions"], *asked])}

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
    def settings(self) -> dict[str, str]:
        own = {key: text_of(value) for key, value in self.manifest.items() if key not in NOT_ASKING}
        return {f"evaluate.harness_settings.{key}": value for key, value in own.items()}

    @cached_property
    def problems(self) -> dict[str, str]:
        # A problem's name contains the hash of its content.
        return dict.fromkeys((problem for values in self.scores.values() for problem in values), "")

    @cached_property
    def left_out(self) -> list[str]:
        """Metrics whose scores of single problems are not 0 or 1: whether more of them is better is not known."""
        return [key for key, scores in self.scores.items() if not harness.are_shares(scores.values())]

    def observations(self) -> Iterator[Observation]:
        for key, scores in self.scores.items():
            if key in self.left_out:
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


def conflicts(evaluated: Sequence[Evaluation]) -> tuple[list[str], list[str]]:
    """Reasons why numbers cannot stand in one column, and notes about those that can."""
    problems, notes = [], []
    # A task of the harness may have the name of a benchmark.
    for kind, benchmark in dict.fromkeys((type(one), one.benchmark) for one in evaluated):
        group = [one for one in evaluated if (type(one), one.benchmark) == (kind, benchmark)]
        problems += _settings_that_differ(benchmark, group)
        seeds = {one.run.labels.data_seed for one in group}
        if all(one.run.makes_its_problems for one in group) and len(seeds) > 1:
            # Every data seed has a world of its own; within one, all answer the same problems.
            own = [[one for one in group if one.run.labels.data_seed == seed] for seed in seeds]
            found = [text for part in own for text in _other_problems(benchmark, part)]
            sizes = {len(one.problems): one.where for one in group}
            if len(sizes) > 1:
                found.append(f"{benchmark}: {_listed({f'{size} problems': [sizes[size]] for size in sizes})}")
            if not found and len({fingerprint(one.problems) for one in group}) > 1:
                notes.append(f"{benchmark}: its problems are made with the data seed, so each has its own.")
        else:
            found = _other_problems(benchmark, group)
        problems += found
        chosen = {one.run.shown: tuple(one.run.decoding_seeds) for one in group if isinstance(one, GoldEvaluation)}
        if len(set(chosen.values())) > 1:
            notes.append(f"{benchmark}: the runs have different decoding seeds (evaluate.seeds): {_by_run(chosen)}.")
        left_out = {
            key.partition("|")[2] for one in group if isinstance(one, HarnessEvaluation) for key in one.left_out
        }
        if left_out:
            notes.append(
                f"{benchmark}: not in the tables: {', '.join(sorted(left_out))}, which is no share of problems."
            )
    return problems, list(dict.fromkeys(notes))


def _settings_that_differ(benchmark: str, group: Sequence[Evaluation]) -> list[str]:
    problems = []
    for key in keys_of(one.settings for one in group):
        values: dict[str, list[str]] = {}
        for one in group:
            if key in one.settings:
                values.setdefault(one.settings[key], []).append(one.where)
        if len(values) > 1:
            problems.append(
                f"{benchmark}: answered or graded differently: {key} is {_listed(values)}; evaluate them again alike"
            )
    return problems


def _other_problems(benchmark: str, group: Sequence[Evaluation]) -> list[str]:
    first = group[0]
    for one in group[1:]:
        if one.problems == first.problems:
            continue
        alone = [len(a.problems.keys() - b.problems.keys()) for a, b in ((first, one), (one, first))]
        common = one.problems.keys() & first.problems.keys()
        changed = [
            key for key in common if "" not in (pair := {one.problems[key], first.problems[key]}) and len(pair) > 1
        ]
        if any(alone) or changed:
            return [
                f"{benchmark}: {first.where} and {one.where} answered different problems: {alone[0]} only in the "
                f"first, {alone[1]} only in the second, {len(changed)} with other text or gold answer; evaluate them "
                "on the same problems"
            ]
    return []


def _listed(values: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{value} in {runs[0]}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")
        for value, runs in values.items()
    )


def _by_run(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{', '.join(map(str, value)) or 'none'} in {run}" for run, value in values.items())
