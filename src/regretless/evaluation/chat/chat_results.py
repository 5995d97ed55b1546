"""Runs a chat benchmark on files of responses, and collects the results of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from regretless.core.errors import DataError
from regretless.core.files import path_fingerprint, write_json, write_jsonl
from regretless.core.intervals import PERCENT, difference
from regretless.data.prompts import PromptRow
from regretless.evaluation.chat import alpaca_eval, arena_hard, mt_bench
from regretless.evaluation.chat.alpaca_eval import AlpacaEvalConfig
from regretless.evaluation.chat.arena_hard import ArenaHardConfig
from regretless.evaluation.chat.judging import bounded, means
from regretless.evaluation.chat.mt_bench import MtBenchConfig
from regretless.evaluation.chat.verdicts import HIGHEST, LOWEST
from regretless.evaluation.conditions import JUDGING_FILES, AskedFor, check_alike, of_chat, results_in
from regretless.servers.ask import Question
from regretless.workflow.run_folder import BASE

ChatBenchmark = Annotated[AlpacaEvalConfig | ArenaHardConfig | MtBenchConfig, Field(discriminator="benchmark")]
"""Settings of one chat benchmark, discriminated by `benchmark`: for a recipe's section."""


class ChatKind(NamedTuple):
    """What differs between chat benchmarks here."""

    module: Any
    """Defines `next_prompts`, `judge_questions` and `evaluate`."""
    main_metric: str
    """The metric whose numbers of each question are in `values` of a result."""
    unit: str
    """Of all its metrics; a key of `ENDS`."""

    @property
    def scale(self) -> float:
        """Factor from `values` to the unit."""
        return PERCENT if self.unit == "%" else 1.0


CHAT_KINDS = {
    "alpaca_eval": ChatKind(alpaca_eval, "win_rate", "%"),
    "arena_hard": ChatKind(arena_hard, "win_rate", "%"),
    "mt_bench": ChatKind(mt_bench, "score", "1–10"),
}
"""By the name of the benchmark."""
ENDS = {"%": (0.0, 100.0), "1–10": (float(LOWEST), float(HIGHEST))}
"""Ends of the scale of metrics with a unit: no interval reaches beyond them, and no gain is larger than from end to
end."""
CATEGORY, TURN = "category_", "turn_"
"""Name prefixes of metrics over a subset of the questions or answers."""
RESULT, JUDGMENTS = "chat_result.json", "judgments.jsonl"


def next_prompts(config: ChatBenchmark, responses: Sequence[Path]) -> dict[float, list[PromptRow]]:
    """Prompts that are not answered yet, keyed by temperature; empty when all are.

    responses: all files of responses so far; none at first. Answer the returned prompts with n = 1, top-p 1, no top-k
    and no repetition penalty, and call again with the new files added, until nothing is returned.
    Raises DataError if the responses do not match the benchmark's questions.
    """
    rows: dict[float, list[PromptRow]] = CHAT_KINDS[config.benchmark].module.next_prompts(config, responses)
    return rows


def judge_questions(config: ChatBenchmark, responses: Sequence[Path]) -> list[Question[Any]]:
    """What the judge is asked about the responses to all prompts. Raises DataError and ConfigError as `run` does."""
    questions: list[Question[Any]] = CHAT_KINDS[config.benchmark].module.judge_questions(config, responses)
    return questions


def run(config: ChatBenchmark, responses: Sequence[Path], output: Path) -> dict[str, Any]:
    """Judge the responses of a benchmark's prompts; returns the main numbers.

    Written into the folder `output`: chat_result.json (metrics with n, standard error and interval; failed judgments by
    reason; cost; hashes of the files that it was judged with) and judgments.jsonl (one row for each judgment). The
    judge's replies are cached beside the folder.
    Raises ConfigError, DataError, BudgetError and ServerError, as the benchmarks do; after the last two, the next run
    resumes with the cached replies.
    """
    result, judgments = CHAT_KINDS[config.benchmark].module.evaluate(config, responses, output)
    write_jsonl(output / JUDGMENTS, judgments)
    # A path alone would not tell that another content was judged with.
    files = {name: path_fingerprint(path) for name, path in config.files().items() if name in JUDGING_FILES}
    write_json(output / RESULT, {**result, "files": files})
    numbers = {name: metric["value"] for name, metric in result["metrics"].items() if not name.startswith(CATEGORY)}
    return {"questions": result["questions"], **numbers, "failed": sum(result["failed"].values()), "cut": result["cut"]}


def collect(evaluate_dir: Path, asked_for: AskedFor = None) -> list[dict[str, Any]]:
    """Results below <evaluate_dir>/<model>/<benchmark>/, a row for each metric.

    `gain` is the difference to the model `base`, paired by question, on the questions that both have a judgment for; it
    is None for metrics that are not means over questions. Raises DataError if the two answered different questions, or
    were answered or judged with different settings.
    """
    results = results_in(evaluate_dir, RESULT, asked_for)
    rows = []
    for (benchmark, label), result in sorted(
        results.items(), key=lambda item: (item[0][0], item[0][1] != BASE, item[0])
    ):
        base = results.get((benchmark, BASE)) if label != BASE else None
        kind = CHAT_KINDS[result["benchmark"]]
        gains = {} if base is None else {kind.main_metric: _gain(evaluate_dir, benchmark, label, results)}
        for name, metric in result["metrics"].items():
            gain = gains.get(name, {})
            rows.append(
                {
                    "benchmark": benchmark,
                    "label": label,
                    "judge": result["judge"],
                    "metric": name,
                    "unit": kind.unit,
                    **{key: metric[key] for key in ("n", "value", "standard_error", "low", "high")},
                    "gain": gain.get("value"),
                    "gain_low": gain.get("low"),
                    "gain_high": gain.get("high"),
                    "failed": sum(result["failed"].values()),
                    "cut": result["cut"],
                    "requests": result["requests"],
                    "dollars": result["dollars"],
                }
            )
    return rows


def _gain(
    evaluate_dir: Path, benchmark: str, label: str, results: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    base, result = (results[benchmark, name] for name in (BASE, label))
    kinds = [(each["benchmark"], each["judge"], each["questions"]) for each in (base, result)]
    if kinds[0] != kinds[1]:
        raise DataError(
            f"{benchmark}: {BASE} and {label} were judged differently: {kinds[0]}, {kinds[1]}; evaluate both again"
        )
    before, after = (of_chat(evaluate_dir, name, benchmark, name, results[benchmark, name]) for name in (BASE, label))
    check_alike(benchmark, before, after, evaluate_dir / label / benchmark)
    first, second = base["values"], result["values"]
    kind = CHAT_KINDS[result["benchmark"]]
    gain = difference(first, second, kind.scale)
    common = [key for key in first if key in second]
    old, new = (means({key: values[key] for key in common}) for values in (first, second))
    low, high = ENDS[kind.unit]
    return bounded(gain, [b - a for a, b in zip(old, new, strict=True)], low - high, high - low).shown()
