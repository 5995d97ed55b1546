"""Verified or judged responses of models to benchmarks, as results with their uncertainty.

Sampling and verifying are the stages `sample` and `verify`, judging is in `chat/`; `runs/evaluate.py` runs them for
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
from regretless.core.files import read_json
from regretless.core.intervals import in_percent, none_if_nan, over_seeds, paired_difference, wilson, within
from regretless.core.paths import PathSetting
from regretless.core.settings import REMOVABLE, ByFolder, Section, Seed, in_one_folder
from regretless.core.terminal import FoldingTable
from regretless.core.yaml_settings import merge
from regretless.data.columns import Verdict
from regretless.data.prompt_templates import TEMPLATES
from regretless.data.prompts import PromptSource
from regretless.evaluation import harness
from regretless.evaluation.benchmarks import BENCHMARKS
from regretless.evaluation.chat import chat_results
from regretless.evaluation.chat.chat_results import ChatBenchmark
from regretless.evaluation.conditions import (
    SAMPLES,
    AskedFor,
    check_alike,
    of_harness,
    of_pass,
    passes_alike,
    results_in,
)
from regretless.evaluation.harness import HarnessSettings
from regretless.labeling.verifiers import VERIFIERS
from regretless.modeling.load import ADAPTER
from regretless.sampling.engine_settings import (
    LOWEST_TEMPERATURE,
    USUAL_BATCH,
    BatchSize,
    Penalty,
    SamplingServer,
    StopSetting,
    VllmOptions,
)
from regretless.sampling.engines import ENGINES, check_engine_settings
from regretless.servers.server_settings import ServerConfig
from regretless.workflow.run_folder import BASE, substitute
from regretless.workflow.stage_folder import MANIFEST, UNUSED

TAKEN = {BASE, SAMPLES, UNUSED, "results.json"}
"""What else lies among the folders of the models."""
PASS_AT_1 = "Pass@1 (%)"


class BenchmarkSource(Section):
    """One benchmark: a known one by name, the user's own problems, or a known one with changed settings."""

    benchmark: Annotated[str, AfterValidator(BENCHMARKS.check)] | None = None
    """Name of a known benchmark, which supplies every setting that is not given here."""
    dataset: PathSetting | None = None
    """Problems to read: a hub id, a folder of a data set, or a .jsonl, .json, .csv or .parquet file."""
    split: str | None = None
    """Split to read, of a hub data set or a folder."""
    subset: str | None = None
    """Configuration of a hub data set."""
    prompt_column: str | None = None
    """Column with the problem."""
    answer_column: str | None = None
    """Column with the gold answer or a worked solution."""
    limit: int | None = Field(default=None, ge=1)
    """Most problems to read, from the start; all by default."""
    template: Annotated[str, AfterValidator(TEMPLATES.check)] | None = None
    """Template that makes a prompt of a problem: math, assistant, user, plain, or the name of a plug-in; by default as
    for prompts (`prompts.template`)."""
    verifier: Annotated[str, AfterValidator(VERIFIERS.check)] | None = None
    """Verifier of the answers to this benchmark; by default that of `evaluate`."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.benchmark is None and self.dataset is None:
            raise ValueError("expected a known benchmark's name in the setting benchmark, or a dataset")
        return self

    @property
    def source(self) -> PromptSource:
        """The prompts and gold answers."""
        defaults = BENCHMARKS[self.benchmark] if self.benchmark else {"answer_column": "answer"}
        changes = self.model_dump(exclude_none=True, exclude={"benchmark", "verifier"})
        if self.dataset is not None:
            # A local copy has its own split and configuration, if any.
            defaults = {name: value for name, value in defaults.items() if name not in ("split", "subset")}
        return PromptSource(**(dict(defaults) | changes))


class EvaluateConfig(Section):
    """Greedy Pass@1 of the base and the trained models, optional sampling runs over seeds, and chat benchmarks."""

    benchmarks: Annotated[ByFolder[BenchmarkSource], REMOVABLE] = Field(default={})
    """Benchmarks with gold answers, each under a label of your choice; null removes one that the recipe extends."""
    chat: Annotated[ByFolder[ChatBenchmark], REMOVABLE] = Field(default={})
    """Benchmarks whose answers a judge reads, each under a label of your choice; null removes one."""
    policies: Annotated[ByFolder[PathSetting], REMOVABLE] = Field(default={})
    """Further models to evaluate besides `model` and what `train` makes, each under a label of your choice: folders of
    trained models or adapters, or hub ids; null removes one."""
    harness: list[str] = Field(default=[])
    """Tasks of lm-evaluation-harness (ifeval, mmlu_pro, …) to run with every model, in a process of their own. Needs
    the package lm_eval."""
    harness_settings: HarnessSettings = HarnessSettings()
    """How these tasks run."""
    server: ServerConfig | None = None
    """Server of the judges of all chat benchmarks, with its budget; a benchmark's own `server` takes precedence. A
    budget applies to one model on one benchmark, unless these share a file of cached replies."""
    seed: Seed = 0
    """Random seed of the chat benchmarks that do not set their own."""
    engine: Annotated[str, AfterValidator(ENGINES.check)] = "transformers"
    """Software that answers the benchmarks, as in `sample`."""
    engine_server: SamplingServer | None = None
    """Server that answers the benchmarks, for an engine that uses one; `server` is the judges'."""
    vllm: VllmOptions | None = None
    """Settings of vLLM, for the engine `vllm`."""
    verifier: Annotated[str, AfterValidator(VERIFIERS.check)] | None = None
    """Verifier of answers to benchmarks with gold answers, as in `verify`; by default that of `verify`."""
    grade_cut: bool | None = None
    """Whether an answer that was cut at `max_new_tokens` can be correct; by default as in `verify`."""
    max_new_tokens: int = Field(default=2048, ge=1)
    """Most tokens in an answer to a benchmark with gold answers. Answers that are cut are counted, and not correct
    unless `grade_cut` is true."""
    repetition_penalty: Penalty = 1.0
    """Repetition penalty for answers to benchmarks with gold answers; 1 turns it off. The RePO authors' scripts use
    1.05."""
    stop: StopSetting = Field(default=[])
    """Texts that end an answer to a benchmark with gold answers, as in `sample`. A pretrained model that goes on with a
    question of its own is otherwise graded by its answer to that. A chat benchmark has its own `stop`."""
    batch_size: BatchSize = USUAL_BATCH
    """Number of answers generated at the same time, or the memory for them, as in `sample`."""
    seeds: list[Seed] = Field(default_factory=list)
    """Random seeds of sampled passes over the benchmarks with gold answers, in addition to the greedy pass. The paper
    uses 41 to 45."""
    temperature: float = Field(default=0.7, ge=LOWEST_TEMPERATURE)
    """Sampling temperature of the passes in `seeds`; the greedy pass does not use it."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Share of probability that the passes in `seeds` draw tokens from, as in `sample`; the greedy pass does not use
    it."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that the passes in `seeds` draw from, as in `sample`; the greedy pass does not use
    it."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        """Pass server and seed on to the chat benchmarks without them."""
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
    def _settings_of_the_engine(self) -> Self:
        check_engine_settings(self.engine, {"engine_server": self.engine_server}, self.vllm)
        return self

    @model_validator(mode="after")
    def _benchmarks_with_names(self) -> Self:
        if not self.benchmarks and not self.chat and not self.harness:
            raise ValueError("expected at least one benchmark in `benchmarks` or `chat`, or a task in `harness`")
        labels = [*self.benchmarks, *self.chat]
        if harness.FOLDER in map(str.casefold, labels):
            raise ValueError(f"benchmarks: the name {harness.FOLDER} has a meaning of its own; choose another one")
        if twice := in_one_folder(labels):
            raise ValueError(
                f"chat: `benchmarks` has the same label: {', '.join(dict.fromkeys(twice))}; choose another"
            )
        if taken := [label for label in self.policies if label.casefold() in TAKEN]:
            raise ValueError(f"policies: the name {', '.join(taken)} has a meaning of its own; choose another one")
        return self


def summarize(responses: Path) -> dict[str, Any]:
    """Pass@1 of one pass over a benchmark: verified responses, one per problem.

    A response without a verdict (truncated, or undecided by the verifier) is not correct, and counted by its reason.
    Raises DataError if there are no responses, or several to one problem.
    """
    columns = ["prompt_id", "verdict", "verdict_reason", "finish_reason"]
    rows = pq.read_table(responses, columns=columns).to_pylist()
    if not rows or len({row["prompt_id"] for row in rows}) != len(rows):
        raise DataError(f"{responses}: expected one response per problem, got {len(rows)} rows; sample with n=1")
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
        "empty": chat_results.empty_answers([responses]),
        "stopped": sum(row["finish_reason"] == "stop_string" for row in rows),
        "unknown": reasons,
        "verdicts": correct,
    }


def collect(evaluate_dir: Path, current: Sequence[int] = (), asked_for: AskedFor = None) -> dict[str, Any]:
    """Results below `<evaluate_dir>/<model>/<benchmark>/`: `rows` of greedy runs, `seeds` of sampling runs, `chat`.

    Shares, not percentages; a bound that cannot be computed is None, as that of a mean over equal seeds. `gain` is the
    paired difference to the base model. Of the sampled passes those count that were made like the ones of the seeds
    `current`, or else like the latest; `left_out`, where there are others, names them.
    `base`, where the base model is an adapter on another model, names both: gains are not over that model alone.
    `chat` has a row for each metric of a chat benchmark, on its own scale (see `chat_results.collect`), and `harness`,
    where its tasks ran, one for each of their metrics.
    Raises DataError if there is no result, or if the base model and another one answered different problems, or were
    answered, graded or judged with different settings.
    """
    greedy = results_in(evaluate_dir, "result.json", asked_for)
    judged = chat_results.collect(evaluate_dir, asked_for)
    tasks = {label: scores for (_, label), scores in results_in(evaluate_dir, harness.SCORES, asked_for).items()}
    if not greedy and not judged and not tasks:
        raise DataError(f"{evaluate_dir}: no result.json for any model and benchmark")
    _check_tasks(evaluate_dir, tasks)
    rows = [_row(evaluate_dir, benchmark, label, greedy) for benchmark, label in greedy]
    seeds, left_out = [], []
    for benchmark, label in sorted(greedy):
        names, note = passes_alike(evaluate_dir, label, benchmark, current)
        left_out += [note] if note else []
        if names:
            folder = evaluate_dir / label / benchmark
            values = [read_json(folder / name / "result.json")["pass_at_1"] for name in names]
            summary = over_seeds(values)
            low, high = (none_if_nan(bound) for bound in within(summary.interval, values, 0.0, 1.0))
            seeds.append(
                {
                    "benchmark": benchmark,
                    "label": label,
                    "seeds": summary.n,
                    "mean": summary.mean,
                    "sd": none_if_nan(summary.sd),
                    "low": low,
                    "high": high,
                }
            )
    results: dict[str, Any] = {"rows": _in_order(rows), "seeds": _in_order(seeds), "chat": judged}
    if (base := adapter_of(evaluate_dir)) is not None:
        results["base"] = base
    if left_out:
        results["left_out"] = left_out
    return {**results, "harness": harness.rows_of(tasks)} if tasks else results


def adapter_of(evaluate_dir: Path) -> str | None:
    """The adapter and its base that the row of the base model stands for; None if it is a whole model."""
    manifest = next(iter(sorted((evaluate_dir / SAMPLES / BASE).rglob(MANIFEST))), None)
    model = read_json(manifest)["settings"].get("model", {}) if manifest is not None else {}
    name, adapter = (str(model.get(key) or "") for key in ("name_or_path", "adapter"))
    file = Path(substitute(name, evaluate_dir.parent)) / ADAPTER
    if not adapter and file.is_file():
        name, adapter = str(read_json(file).get("base_model_name_or_path") or "an unnamed base"), name
    return f"the adapter {adapter} on {name or 'a model with random weights'}" if adapter else None


def _check_tasks(evaluate_dir: Path, tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise DataError if the harness asked the base model and another one the same task differently."""
    for label, scores in tasks.items():
        if label != BASE and tasks.get(BASE, {}).keys() & scores.keys():
            # Problems are compared task by task, where gains are taken.
            first, second = (of_harness(evaluate_dir, name, harness.FOLDER, name, {}) for name in (BASE, label))
            check_alike(harness.FOLDER, first, second, evaluate_dir / label / harness.FOLDER)


def _row(evaluate_dir: Path, benchmark: str, label: str, greedy: Mapping[tuple[str, str], Any]) -> dict[str, Any]:
    result, base = greedy[benchmark, label], greedy.get((benchmark, BASE))
    gain, low, high = None, None, None
    if base is not None and label != BASE:
        first, second = (of_pass(evaluate_dir, name, benchmark, name) for name in (BASE, label))
        check_alike(benchmark, first, second, evaluate_dir / label / benchmark)
        problems = sorted(base["verdicts"])
        difference = paired_difference(
            [base["verdicts"][problem] for problem in problems], [result["verdicts"][problem] for problem in problems]
        )
        gain, (low, high) = difference.mean, (none_if_nan(bound) for bound in difference.interval)
    return {
        "benchmark": benchmark,
        "label": label,
        "n": result["n"],
        "value": result["pass_at_1"],
        "low": none_if_nan(result["interval"][0]),
        "high": none_if_nan(result["interval"][1]),
        "gain": gain,
        "gain_low": low,
        "gain_high": high,
        "cut": result["cut"],
        "empty": result.get("empty", 0),
        "unknown": sum(result["unknown"].values()),
    }


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["benchmark"], row["label"] != BASE, row["label"]))


RIGHT = ("n", "value", "gain over base", "no verdict", "empty")
"""Columns of numbers on the terminal."""


def results_table(results: Mapping[str, Any]) -> Table:
    """Table for the terminal: each number with its 95 % interval, and paired gains over the base model.

    A metric that all rows have stands in the title, and columns that would be empty or zero are left out, so that the
    usual table fits into 80 characters. A metric of lm-evaluation-harness is in percent if `in_percent`.
    """
    rows: list[dict[str, str]] = []
    for row in results["rows"]:
        value = _percent(row["value"], row["low"], row["high"])
        gain = _percent(row["gain"], row["gain_low"], row["gain_high"], sign="+")
        counts = str(row["unknown"]), str(row.get("empty", 0))
        rows.append(_cells(row["benchmark"], row["label"], PASS_AT_1, str(row["n"]), value, gain, *counts))
    for row in results["seeds"]:
        text = _percent(row["mean"], row["low"], row["high"])
        seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
        rows.append(_cells(row["benchmark"], f"{row['label']}, {seeds}", PASS_AT_1, "", text))
    of_tasks = results.get("harness", ())
    percent = in_percent((row["benchmark"], row["metric"], row["value"]) for row in of_tasks)
    for row in of_tasks:
        is_share = (row["benchmark"], row["metric"]) in percent
        write = _percent if is_share else _number
        value = write(row["value"], row["low"], row["high"])
        gain = write(row["gain"], row["gain_low"], row["gain_high"], sign="+")
        metric = f"{row['metric']} (%)" if is_share else row["metric"]
        rows.append(_cells(row["benchmark"], row["label"], metric, str(row["n"]), value, gain))
    for row in results.get("chat", ()):
        if row["metric"].startswith((chat_results.CATEGORY, chat_results.TURN)):
            continue  # only in the report
        value = _number(row["value"], row["low"], row["high"]) or "–"
        gain = _number(row["gain"], row["gain_low"], row["gain_high"], sign="+")
        metric = f"{row['metric'].replace('_', ' ')} ({row['unit']})"
        counts = str(row["failed"]), str(row.get("empty", 0))
        rows.append(_cells(row["benchmark"], row["label"], metric, str(row["n"]), value, gain, *counts))
    # Leave out columns that say nothing.
    metrics = {row["metric"] for row in rows}
    (metric,) = metrics if len(metrics) == 1 else ("Results",)
    shown = [name for name in CELLS if any(row[name] not in ("", "0") for row in rows)]
    shown = [name for name in shown if name != "metric" or len(metrics) > 1]
    # Print the rest; a number is not folded inside a word.
    table = FoldingTable(title=f"{metric} [95 % interval]")
    base = [f"{BASE}, which gains are over, is {results['base']}"] if "base" in results else []
    table.caption = "\n".join([*base, *results.get("contaminated", ()), *results.get("left_out", ())]) or None
    for name in shown:
        if name in RIGHT:
            longest = max(len(word) for row in rows for word in row[name].split() or [""])
            table.add_column(name, justify="right", min_width=longest)
        else:
            table.add_column(name)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


CELLS = ("benchmark", "model", "metric", *RIGHT)


def _cells(*values: str) -> dict[str, str]:
    """A row of the table by column; what is left out is empty."""
    return {name: values[column] if column < len(values) else "" for column, name in enumerate(CELLS)}


def _percent(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    value, low, high = (None if number is None else 100 * number for number in (value, low, high))
    return _number(value, low, high, sign, digits=1)


def _number(value: float | None, low: float | None, high: float | None, sign: str = "", digits: int = 2) -> str:
    if value is None:
        return ""
    bounds = "" if low is None or high is None else f" [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"
    return f"{value:{sign}.{digits}f}{bounds}"
