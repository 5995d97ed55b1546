"""Tasks of lm-evaluation-harness, run in a process of their own; results paired with the base model's by problem.

The harness decides what a task asks and how it scores. Of its files this module reads the score of every problem, which
the harness's own summary leaves out: two models are compared on the problems that they share.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from pydantic import Field

from regretless.core.errors import ConfigError, DataError, RegretlessError
from regretless.core.files import read_json, write_json
from regretless.core.intervals import (
    Interval,
    difference_over_seeds,
    none_if_nan,
    paired_difference,
    t_interval,
    wilson,
)
from regretless.core.paths import PathSetting
from regretless.core.settings import Section
from regretless.data.rows import read_rows
from regretless.modeling.load import ModelConfig, weights_of
from regretless.workflow.python_process import run_code, run_module
from regretless.workflow.run_folder import BASE

FOLDER = "harness"
"""Folder of the harness's results in that of a model's."""
RAW = "raw"
"""Folder with the harness's own files in that folder."""
SCORES = "scores.json"
LOG = "lm_eval.log"
SHOWN_LINES = 15


class HarnessSettings(Section):
    """How lm-evaluation-harness runs the tasks of `evaluate.harness`."""

    python: str | None = None
    """Python of the environment that has the package lm_eval; this one by default."""
    include_path: PathSetting | None = None
    """Folder with task files of your own."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Number of examples in a prompt; the task's own by default."""
    limit: int | None = Field(default=None, ge=1)
    """Most problems of each task, from the start; all by default."""
    batch_size: int = Field(default=8, ge=1)
    """Number of requests computed at the same time."""
    apply_chat_template: bool = False
    """Whether prompts go through the tokenizer's chat template."""
    device: str | None = None
    """Device, such as cuda:0 or cpu; the harness's own choice by default."""
    trust_remote_code: bool = False
    """Whether Python code that comes with data or tasks may run."""


def check_harness(settings: HarnessSettings) -> None:
    """Raise ConfigError unless the environment has lm_eval."""
    python = settings.python or sys.executable
    script = "import importlib.util; sys.exit(importlib.util.find_spec('lm_eval') is None)"
    try:
        done = subprocess.run(run_code(script, python=settings.python), capture_output=True, check=False)
    except OSError as error:
        raise ConfigError(f"{python}: cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        raise ConfigError(
            f"{python} has no package lm_eval: pip install lm_eval, or set harness_settings.python to the Python of an "
            "environment that has it"
        )


def run(tasks: Sequence[str], settings: HarnessSettings, model: ModelConfig, output: Path) -> dict[str, Any]:
    """Run tasks with one model; writes the score of every problem to `output`/scores.json. Returns a summary.

    Raises ConfigError for a model without weights in files, RegretlessError if the harness fails, DataError if it
    scored nothing.
    """
    raw = output / RAW
    log = output / LOG
    with log.open("ab") as handle:
        done = subprocess.run(
            command(tasks, settings, model, raw), stdout=handle, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        raise RegretlessError("\n  ".join([f"lm_eval ended with exit code {done.returncode} ({log}):", *last]))
    scores = read_scores(raw)
    if not scores:
        raise DataError(f"{raw}: lm_eval wrote no scores of single problems for {', '.join(tasks)}")
    write_json(output / SCORES, scores)
    return {"tasks": len({task_of(score) for score in scores}), "scores": sum(map(len, scores.values()))}


def command(tasks: Sequence[str], settings: HarnessSettings, model: ModelConfig, output: Path) -> list[str]:
    """The command line of the harness. Raises ConfigError for a model without weights in files."""
    if model.architecture is not None:
        raise ConfigError("harness: a model with random weights has no files that lm_eval could load")
    origin = weights_of(model)
    origin.refuse_quantization(model, "lm_eval")
    values: dict[str, Any] = {
        "pretrained": origin.base,
        "revision": origin.revision,
        "peft": origin.adapter,
        "dtype": model.dtype,
    }
    values |= {"tokenizer": model.tokenizer, "trust_remote_code": model.trust_remote_code or None}
    arguments = {name: value for name, value in values.items() if value is not None}
    words = [*run_module("lm_eval", python=settings.python), "run", "--model", "hf"]
    # As JSON, because a path may contain a comma.
    words += ["--model_args", json.dumps(arguments), "--tasks", *tasks, "--batch_size", str(settings.batch_size)]
    words += ["--log_samples", "--output_path", str(output)]
    optional = {
        "--include_path": settings.include_path,
        "--num_fewshot": settings.num_fewshot,
        "--limit": settings.limit,
        "--device": settings.device,
    }
    for flag, value in optional.items():
        words += [] if value is None else [flag, str(value)]
    flags = {
        "--apply_chat_template": settings.apply_chat_template,
        "--trust_remote_code": settings.trust_remote_code,
    }
    return words + [flag for flag, wanted in flags.items() if wanted]


def read_scores(raw: Path) -> dict[str, dict[str, float]]:
    """Score of each problem by its number and content, for each `task|metric|filter` of the harness's sample files.

    Metrics that are not one number per problem (instruction-level ones) are left out. An earlier attempt's files count
    only where a later one wrote none.
    """
    scores: dict[str, dict[str, float]] = {}
    for path in sorted(raw.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        fresh: dict[str, dict[str, float]] = {}
        for _, row in read_rows(path):
            if not isinstance(row, dict):
                continue
            for metric in row.get("metrics") or ():
                value = row.get(metric)
                if isinstance(value, bool | int | float):
                    key = f"{task}|{metric}|{row.get('filter') or 'none'}"
                    problem = f"{row.get('doc_id')}-{str(row.get('doc_hash'))[:12]}"
                    fresh.setdefault(key, {})[problem] = float(value)
        scores |= fresh
    return scores


def lower_is_better(raw: Path) -> set[str]:
    """`task|metric` of the metrics for which the harness's result files say that less is better."""
    lower: set[str] = set()
    for path in raw.rglob("results_*.json"):
        for task, metrics in (read_json(path).get("higher_is_better") or {}).items():
            lower |= {f"{task}|{metric}" for metric, higher in metrics.items() if higher is False}
    return lower


def task_of(key: str) -> str:
    """The task of a key `task|metric|filter`."""
    return key.partition("|")[0]


def metric_of(key: str) -> str:
    """The name of the metric of a key `task|metric|filter`."""
    _, metric, kind = key.split("|")
    return metric if kind == "none" else f"{metric}, {kind}"


def rows_of(scores: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A result for each task, metric and model, from the scores of each model by its label.

    Means with 95 % intervals, and the paired difference to the base model: Wilson's and Newcombe's for a metric that
    is 0 or 1 for each problem of all models, t-intervals over problems otherwise. Raises DataError if two models
    answered different problems.
    """
    everything = [(key, values.values()) for mine in scores.values() for key, values in mine.items()]
    fractions = {key for key, values in everything if not are_shares(values)}
    rows = []
    for label, mine in scores.items():
        for key, values in mine.items():
            task, right_or_wrong = task_of(key), key not in fractions
            interval = _interval(list(values.values()), right_or_wrong)
            row = {
                "benchmark": task,
                "label": label,
                "metric": metric_of(key),
                "n": len(values),
                "value": mean(values.values()),
                "low": none_if_nan(interval.low),
                "high": none_if_nan(interval.high),
                "gain": None,
                "gain_low": None,
                "gain_high": None,
            }
            base = scores.get(BASE, {}).get(key)
            if base is not None and label != BASE:
                row |= _gain(task, label, base, values, right_or_wrong)
            rows.append(row)
    return sorted(rows, key=lambda row: (row["benchmark"], row["metric"], row["label"] != BASE, row["label"]))


def _gain(
    task: str, label: str, base: Mapping[str, float], values: Mapping[str, float], right_or_wrong: bool
) -> dict[str, Any]:
    if base.keys() != values.keys():
        raise DataError(f"{task}: {label} and {BASE} answered different problems; evaluate both again")
    first, second = ([scores[problem] for problem in sorted(base)] for scores in (base, values))
    if right_or_wrong:
        difference = paired_difference([bool(score) for score in first], [bool(score) for score in second])
    else:
        difference = difference_over_seeds(first, second)
    low, high = difference.interval
    return {"gain": difference.mean, "gain_low": none_if_nan(low), "gain_high": none_if_nan(high)}


def _interval(values: Sequence[float], right_or_wrong: bool) -> Interval:
    if right_or_wrong:
        return wilson(int(sum(values)), len(values))
    # Equal scores say nothing of how scores vary.
    sd = stdev(values) if len(set(values)) > 1 else float("nan")
    return t_interval(mean(values), sd, len(values))


def are_shares(values: Iterable[float]) -> bool:
    """Whether scores are 0 or 1, as those of single answers that are right or wrong."""
    return set(values) <= {0.0, 1.0}
