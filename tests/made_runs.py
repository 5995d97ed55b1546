"""Run folders with planned verdicts, in the files that an evaluation writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from regretless.core.files import fingerprint, write_json, write_text
from regretless.core.settings import dump
from regretless.core.yaml_settings import merge
from regretless.data.columns import Response, Verdict
from regretless.data.rows import write_records
from regretless.evaluation.chat import alpaca_eval, mt_bench
from regretless.evaluation.results import summarize
from regretless.labeling.verify import VerifyConfig
from regretless.sampling.engine_settings import SamplingParams
from regretless.workflow.stage_folder import StageFolder

BENCHMARK = "sums"
Verdicts = Sequence[bool | int]


def finish(folder: Path, settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    StageFolder(folder, "0" * 32).finish(folder.name, settings, {}, 1.0)


def made_run(
    folder: Path,
    greedy: Mapping[str, Mapping[str, Verdicts]],
    *,
    seed: int = 0,
    sampled: Mapping[str, Mapping[int, Verdicts]] | None = None,
    problem: str = "What is {number} + 1?",
    verify: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    **recipe: Any,
) -> Path:
    """A finished run. greedy: verdicts of each model label on each benchmark. sampled: those of decoding seeds, the
    same on each benchmark. problem: text of each problem. recipe: sections over a plain one."""
    benchmarks = {name: {"dataset": f"{name}.jsonl"} for labels in greedy.values() for name in labels}
    methods = [label for label in greedy if label != "base"]
    seeds = sorted({one for passes in (sampled or {}).values() for one in passes})
    values: dict[str, Any] = {
        "name": "made",
        "seed": seed,
        "model": {"name_or_path": "owner/Tiny-1B"},
        "sample": {"seed": seed},
        **({"train": {"objective": methods, "seed": seed}} if methods else {}),
        "evaluate": {"benchmarks": benchmarks, **({"seeds": seeds} if seeds else {})},
    }
    write_text(folder / "recipe.yaml", yaml.safe_dump(merge(values, recipe), sort_keys=False))
    for label, by_benchmark in greedy.items():
        for benchmark, verdicts in by_benchmark.items():
            passes = {"": verdicts}
            passes |= {f"seed-{one}": found for one, found in ((sampled or {}).get(label) or {}).items()}
            for name, found in passes.items():
                place = folder / "evaluate" / label / benchmark / name
                rows = [
                    Response(
                        prompt_id=f"test-{index}",
                        response_id=f"test-{index}-0",
                        prompt=problem.format(number=index),
                        response="?",
                        answer=str(index + 1),
                        verdict=Verdict.CORRECT if right else Verdict.WRONG,
                        finish_reason="stop",
                    )
                    for index, right in enumerate(found)
                ]
                place.mkdir(parents=True, exist_ok=True)
                write_records(place / "responses.parquet", rows)
                write_json(place / "result.json", summarize(place / "responses.parquet"))
                finish(place, dump(VerifyConfig.parse({**(verify or {})}, "verify")))
                params = {"n": 1, "temperature": 0.7 if name else 0.0, "max_new_tokens": 64, **(sampling or {})}
                answers = folder / "evaluate" / "samples" / label / benchmark / (name or "greedy")
                finish(answers, {"sampling": dump(SamplingParams.parse(params, "sample")), "prompts": {}, "model": {}})
    return folder


def add_chat(
    folder: Path, label: str, name: str, settings: Mapping[str, Any], found: dict[str, Any], asked: str
) -> None:
    """A judged chat benchmark in a run folder, and in its recipe."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    values = merge(recipe, {"evaluate": {"chat": {name: dict(settings)}}})
    write_text(folder / "recipe.yaml", yaml.safe_dump(values, sort_keys=False))
    place = folder / "evaluate" / label / name
    place.mkdir(parents=True, exist_ok=True)
    write_json(
        place / "chat_result.json", {**found, "judge": settings["judge"], "requests": 1, "dollars": None, "cut": 0}
    )
    finish(place, dict(settings))
    answering = {
        key: settings.get(key) for key in ("benchmark", "questions", "limit", "template", "max_new_tokens", "seed")
    }
    kind = f"{settings['benchmark']}-{fingerprint(answering)[:8]}"
    turn = folder / "evaluate" / "samples" / label / kind / "turn-1-temperature-0"
    finish(turn, {"sampling": dump(SamplingParams(n=1, temperature=0.0)), "prompts": asked, "model": {}})


def add_harness(
    folder: Path, label: str, scores: Mapping[str, Mapping[str, float]], settings: Mapping[str, Any] | None = None
) -> None:
    """Finished tasks of lm-evaluation-harness in a run folder, and in its recipe."""
    tasks = sorted({key.partition("|")[0] for key in scores})
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    write_text(folder / "recipe.yaml", yaml.safe_dump(merge(recipe, {"evaluate": {"harness": tasks}})))
    place = folder / "evaluate" / label / "harness"
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "scores.json", scores)
    finish(
        place, {"model": {"adapter": label}, "tasks": tasks, "num_fewshot": None, "device": None, **(settings or {})}
    )


CHAT = {"questions": "q.jsonl", "limit": None, "template": "user", "max_new_tokens": 8, "seed": 0, "judge": "judge-1"}


def rate(folder: Path, label: str, ratings: Sequence[float], asked: str = "asked", **settings: Any) -> None:
    """MT-Bench with one rating for each question."""
    grades = [mt_bench.Grade(str(index), "writing", 1, rating, None) for index, rating in enumerate(ratings)]
    add_chat(folder, label, "mt", {**CHAT, "benchmark": "mt_bench", **settings}, mt_bench.scores(grades), asked)


def prefer(folder: Path, label: str, preferences: Sequence[float], **settings: Any) -> None:
    """AlpacaEval without the data of its length control, which leaves that metric unknown."""
    comparisons = [alpaca_eval.JudgedAnswer(index, one, 10, 10 + index, None) for index, one in enumerate(preferences)]
    found = json.loads(json.dumps(alpaca_eval.win_rates(comparisons, None)))
    add_chat(folder, label, "alpaca", {**CHAT, "benchmark": "alpaca_eval", **settings}, found, "asked")
