"""Results of benchmarks as logs of Inspect (inspect_ai), one file for each model and benchmark, for its viewer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from regretless.core.errors import ConfigError
from regretless.core.files import read_json
from regretless.core.stage_folder import MANIFEST
from regretless.core.versions import versions

COLUMNS = ("prompt_id", "prompt", "response", "answer", "extracted", "verdict", "verdict_reason", "finish_reason")
GRADES = {"correct": "C", "wrong": "I"}
"""Inspect's letters for correct and incorrect; a response without a verdict counts as incorrect, and says why."""


def check_inspect() -> None:
    """Raise ConfigError unless inspect_ai can be imported."""
    try:
        import inspect_ai.log
    except ImportError as error:
        raise ConfigError(f"needs the package inspect-ai: pip install inspect-ai ({error})") from error
    assert inspect_ai.log


def write_logs(finished: Mapping[tuple[str, str], Path], output: Path) -> dict[str, Any]:
    """Write `output`/<model>-<benchmark>.eval for each (model, benchmark) and its folder with verified responses.

    Returns a summary. Raises ConfigError without inspect_ai.
    """
    check_inspect()
    from inspect_ai.log import write_eval_log

    for (label, benchmark), folder in finished.items():
        write_eval_log(log_of(label, benchmark, folder), str(output / f"{label}-{benchmark}.eval"), format="eval")
    return {"logs": len(finished)}


def log_of(label: str, benchmark: str, folder: Path) -> Any:
    """The `EvalLog` of one model on one benchmark; `folder` holds its responses with verdicts and result.json."""
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalSample,
        EvalScore,
        EvalSpec,
    )
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    kinds: Mapping[str, Any] = {"system": ChatMessageSystem, "assistant": ChatMessageAssistant}
    result, manifest = read_json(folder / "result.json"), read_json(folder / MANIFEST)
    samples = []
    for row in pq.read_table(folder / "responses.parquet", columns=list(COLUMNS)).to_pylist():
        prompt = row["prompt"]
        asked = (
            prompt
            if isinstance(prompt, str)
            else [kinds.get(one["role"], ChatMessageUser)(content=one["content"]) for one in prompt]
        )
        text = row["response"] if isinstance(row["response"], str) else row["response"][-1]["content"]
        stop = "max_tokens" if row["finish_reason"] == "length" else "stop"
        first = [ChatMessageUser(content=asked)] if isinstance(asked, str) else asked
        samples.append(
            EvalSample(
                id=row["prompt_id"],
                epoch=1,
                input=asked,
                target=row["answer"] or "",
                messages=[*first, ChatMessageAssistant(content=text)],
                output=ModelOutput.from_content(label, text, stop_reason=stop),
                scores={
                    "verifier": Score(
                        value=GRADES.get(row["verdict"], "I"),
                        answer=row["extracted"],
                        explanation=row["verdict_reason"],
                    )
                },
            )
        )
    verifier = str(manifest["settings"].get("verifier", "verifier"))
    metrics = {"accuracy": EvalMetric(name="accuracy", value=result["pass_at_1"])}
    low, high = result["interval"]
    for name, value in (("interval_low", low), ("interval_high", high)):
        metrics[name] = EvalMetric(name=name, value=value)
    return EvalLog(
        status="success",
        eval=EvalSpec(
            created=manifest["finished"],
            task=benchmark,
            model=label,
            dataset=EvalDataset(name=benchmark, samples=len(samples), sample_ids=[one.id for one in samples]),
            config=EvalConfig(),
            packages=versions(),
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=len(samples),
            scores=[EvalScore(name="verifier", scorer=verifier, metrics=metrics)],
        ),
        samples=samples,
    )
