"""Verified or judged responses of models to benchmarks, as results with their uncertainty.

Answering and verifying are the stages `sample` and `verify`, judging is in `chat/`; `runs/evaluate.py` runs them for
every model and benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import pyarrow.parquet as pq
from pydantic import AfterValidator, Field, model_validator
from rich.table import Table

from regretless.core.errors import DataError
from regretless.core.estimates import known, over_seeds, paired_difference, wilson
from regretless.core.files import read_json
from regretless.core.run_folder import BASE
from regretless.core.settings import FolderName, Section
from regretless.core.yaml_settings import merge
from regretless.data.prompts import PromptSource
from regretless.data.records import Verdict
from regretless.evaluation.benchmarks import BENCHMARKS
from regretless.evaluation.chat import chat_results
from regretless.evaluation.chat.chat_results import ChatBenchmark
from regretless.servers.server_settings import ServerConfig

PASS_AT_1 = "Pass@1 (%)"


class BenchmarkSource(Section):
    """One benchmark: a known one by name, problems of the user's own, or a known one with settings of its own."""

    benchmark: Annotated[str, AfterValidator(BENCHMARKS.check)] | None = None
    """Known benchmark, whose settings are taken where none are given here."""
    dataset: str | None = None
    """Hub id, folder of a data set, or a .jsonl, .json or .parquet file."""
    split: str | None = None
    """Split of a hub data set or folder."""
    subset: str | None = None
    """Configuration of a hub data set."""
    prompt_column: str | None = None
    """Column with the problem."""
    answer_column: str | None = None
    """Column with the gold answer or a worked solution."""
    limit: int | None = Field(default=None, ge=1)
    """At most this many problems, from the start."""
    template: str | None = None
    """How a problem becomes a prompt: math, assistant, user or plain."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.benchmark is None and self.dataset is None:
            raise ValueError("expected a benchmark's name or a dataset")
        return self

    @property
    def source(self) -> PromptSource:
        """The prompts and gold answers."""
        known = BENCHMARKS[self.benchmark] if self.benchmark else {"answer_column": "answer"}
        given = self.model_dump(exclude_none=True, exclude={"benchmark"})
        if self.dataset is not None:
            # A local copy has its own split and configuration, if any.
            known = {name: value for name, value in known.items() if name not in ("split", "subset")}
        return PromptSource(**(dict(known) | given))


class EvaluateConfig(Section):
    """Greedy Pass@1 of the base and the trained models, sampling over seeds where asked for, and chat benchmarks."""

    benchmarks: dict[FolderName, BenchmarkSource] = Field(default={})
    """Benchmarks with gold answers, by label."""
    chat: dict[FolderName, ChatBenchmark] = Field(default={})
    """Benchmarks of which a judge reads the answers, by label."""
    server: ServerConfig | None = None
    """Where the judges of the chat benchmarks run, and the budget; what a benchmark says in its own `server` goes over
    it. Budgets hold for one model on one benchmark, unless their files of kept replies are one."""
    seed: int = Field(default=0, ge=0)
    """Of chat benchmarks that have none of their own."""
    verifier: str | None = None
    """Name in the table of verifiers, as in `verify`; that of `verify` unless given."""
    grade_cut: bool | None = None
    """Whether a response that is cut at `max_new_tokens` can be correct, as in `verify`; as there unless given."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Longest response to a benchmark with gold answers; one that is cut there is counted, and not correct unless
    `grade_cut` says so."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Of all answers to benchmarks with gold answers; 1 is none, the RePO authors' scripts have 1.05."""
    batch_size: int = Field(default=64, ge=1)
    """Responses written at the same time."""
    seeds: list[int] = Field(default_factory=list)
    """Seeds of sampling runs beside the greedy one; the paper's are 41 to 45."""
    temperature: float = Field(default=0.7, gt=0)
    """Of the sampling runs."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Of the sampling runs."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        """Give server and seed to the chat benchmarks that say nothing else."""
        if not isinstance(values, Mapping) or not isinstance(values.get("chat"), Mapping):
            return values
        shared = {name: values[name] for name in ("server", "seed") if values.get(name) is not None}
        return {
            **values,
            "chat": {
                label: merge(shared, entry) if isinstance(entry, Mapping) else entry
                for label, entry in values["chat"].items()
            },
        }

    @model_validator(mode="after")
    def _benchmarks_with_names(self) -> Self:
        if not self.benchmarks and not self.chat:
            raise ValueError("expected at least one benchmark in `benchmarks` or `chat`")
        if twice := sorted(self.benchmarks.keys() & self.chat.keys()):
            raise ValueError(f"chat: {', '.join(twice)}: `benchmarks` has the same label; choose another")
        return self


def summarize(responses: Path) -> dict[str, Any]:
    """Pass@1 of one pass over a benchmark: verified responses, one a problem.

    A response without a verdict (cut, or the checker could not tell) is not correct, and counted by its reason.
    Raises DataError when there are no responses, or several to one problem.
    """
    columns = ["prompt_id", "verdict", "verdict_reason", "finish_reason"]
    rows = pq.read_table(responses, columns=columns).to_pylist()
    if not rows or len({row["prompt_id"] for row in rows}) != len(rows):
        raise DataError(f"{responses}: expected one response a problem, got {len(rows)} rows; sample with n=1")
    reasons: dict[str, int] = {}
    for row in rows:
        if row["verdict"] not in (Verdict.CORRECT, Verdict.WRONG):
            reason = (row["verdict_reason"] or "not verified").partition(":")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
    correct = {row["prompt_id"]: row["verdict"] == Verdict.CORRECT for row in rows}
    interval = wilson(sum(correct.values()), len(rows))
    return {
        "n": len(rows),
        "correct": sum(correct.values()),
        "pass_at_1": sum(correct.values()) / len(rows),
        "interval": list(interval),
        "cut": sum(row["finish_reason"] == "length" for row in rows),
        "unknown": reasons,
        "verdicts": correct,
    }


def collect(evaluate_dir: Path) -> dict[str, Any]:
    """All results below `<evaluate_dir>/<model>/<benchmark>/`: `rows` of greedy runs, `seeds` of sampling runs, `chat`.

    Shares, not percentages; a bound that cannot be known is None. `gain` is the paired difference to the base model.
    `chat` has a row for each metric of a chat benchmark, on its own scale (see `chat.stage.collect`).
    Raises DataError when there is no result, or when two models answered different problems or were judged otherwise.
    """
    greedy = {(path.parts[-2], path.parts[-3]): read_json(path) for path in evaluate_dir.glob("*/*/result.json")}
    judged = chat_results.collect(evaluate_dir)
    if not greedy and not judged:
        raise DataError(f"{evaluate_dir}: no result.json of any model and benchmark")
    rows = [_row(benchmark, label, found, greedy) for (benchmark, label), found in greedy.items()]
    seeds = []
    for benchmark, label in greedy:
        passes = [read_json(file) for file in sorted((evaluate_dir / label / benchmark).glob("seed-*/result.json"))]
        if passes:
            if any(one["verdicts"].keys() != greedy[benchmark, label]["verdicts"].keys() for one in passes):
                raise DataError(f"{benchmark}: the seeds of {label} answered different problems; evaluate it again")
            found = over_seeds([one["pass_at_1"] for one in passes])
            low, high = (known(bound) for bound in found.interval)
            seeds.append(
                {
                    "benchmark": benchmark,
                    "label": label,
                    "seeds": found.n,
                    "mean": found.mean,
                    "sd": known(found.sd),
                    "low": low,
                    "high": high,
                }
            )
    return {"rows": _in_order(rows), "seeds": _in_order(seeds), "chat": judged}


def _row(benchmark: str, label: str, found: Mapping[str, Any], greedy: Mapping[Any, Any]) -> dict[str, Any]:
    base = greedy.get((benchmark, BASE))
    gain, low, high = None, None, None
    if base is not None and label != BASE:
        if base["verdicts"].keys() != found["verdicts"].keys():
            raise DataError(f"{benchmark}: {label} and {BASE} answered different problems; evaluate both again")
        problems = sorted(base["verdicts"])
        difference = paired_difference(
            [base["verdicts"][problem] for problem in problems], [found["verdicts"][problem] for problem in problems]
        )
        gain, (low, high) = difference.mean, (known(bound) for bound in difference.interval)
    return {
        "benchmark": benchmark,
        "label": label,
        "n": found["n"],
        "value": found["pass_at_1"],
        "low": known(found["interval"][0]),
        "high": known(found["interval"][1]),
        "gain": gain,
        "gain_low": low,
        "gain_high": high,
        "cut": found["cut"],
        "unknown": sum(found["unknown"].values()),
    }


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["benchmark"], row["label"] != BASE, row["label"]))


def results_table(results: Mapping[str, Any]) -> Table:
    """Table for the terminal: each number with its 95 % interval, and paired gains over the base."""
    table = Table(title="Results (95 % interval)")
    for column in ("benchmark", "model", "metric"):
        table.add_column(column)
    for column in ("n", "value", "gain over base", "no verdict"):
        table.add_column(column, justify="right")
    for row in results["rows"]:
        table.add_row(
            row["benchmark"],
            row["label"],
            PASS_AT_1,
            str(row["n"]),
            _percent(row["value"], row["low"], row["high"]),
            _percent(row["gain"], row["gain_low"], row["gain_high"], sign="+"),
            str(row["unknown"]),
        )
    for row in results["seeds"]:
        shown = _percent(row["mean"], row["low"], row["high"])
        table.add_row(row["benchmark"], f"{row['label']}, {row['seeds']} seeds", PASS_AT_1, "", shown, "", "")
    for cells in chat_results.table_rows(results.get("chat", [])):
        table.add_row(*cells)
    return table


def _percent(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    bounds = "" if low is None or high is None else f" [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
    return f"{100 * value:{sign}.1f}{bounds}"
