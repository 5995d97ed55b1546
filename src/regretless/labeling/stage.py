"""Stage `verify`: responses and gold answers in, verdicts out."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, field_validator

from regretless.config import Section
from regretless.errors import ConfigError, DataError
from regretless.labeling.checks import Check, Verifier
from regretless.labeling.pool import Pool
from regretless.labeling.verifiers import VERIFIERS
from regretless.preferences import check_some_left, report_refusals
from regretless.progress import bar
from regretless.records import Refusal, Response, Verdict, read_responses, read_rows, write_jsonl, write_records
from regretless.store import atomic_path, read_json, write_json

PART_ROWS = 2000
"""Rows between two points that a killed run can go on from."""


class VerifyConfig(Section):
    """How responses are compared with their gold answers."""

    verifier: str = "math"
    """Name in the table of verifiers: `math` grades the last answer of a response, `math_any` accepts a response when
    any answer that it marks as one is right."""
    grade_cut: bool = False
    """Whether a response that ran into its limit of tokens is graded like the others; else its verdict is unknown.
    `math` takes the last number of a text that breaks off for its answer, `math_any` wants an answer marked as one."""
    time_limit: float = Field(default=10.0, gt=0)
    """Seconds that one response may take; then its process is killed and its verdict is unknown."""
    workers: int | None = Field(default=None, ge=1)
    """Processes at most; one per CPU core unless given. They start only for rows that need algebra."""

    @field_validator("verifier")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in VERIFIERS:
            raise ValueError(f"expected one of {', '.join(sorted(VERIFIERS))}")
        return value


class Question(NamedTuple):
    """What a verdict depends on."""

    response: str
    answer: str
    is_cut: bool
    """Whether the response ran into the limit on its tokens, and is therefore not graded."""


def run(config: VerifyConfig, responses: Path, output: Path) -> dict[str, Any]:
    """Write `responses.parquet` with verdicts, and `refused.jsonl`, into the folder `output`; returns the counts.

    A killed run goes on behind its last finished part. Raises DataError when no row can be used.
    """
    rows, refused = read_responses(responses)
    kept = [row for row in rows if row.answer is not None]
    refused += [_refusal(row, responses) for row in rows if row.answer is None]
    refused.sort(key=lambda refusal: refusal.line)
    report_refusals(refused, output / "refused.jsonl")
    check_some_left(kept, refused, responses)
    parts = output / "parts"
    questions = [
        Question(row.response, row.answer or "", row.finish_reason == "length" and not config.grade_cut) for row in kept
    ]
    checks = _checks(config, questions, parts)
    write_records(output / "responses.parquet", [_judged(row, check) for row, check in zip(kept, checks, strict=True)])
    shutil.rmtree(parts)
    return _summary(checks, refused)


def verify_file(config: VerifyConfig, responses: Path, output: Path) -> dict[str, Any]:
    """Copy rows {prompt, response, answer, …} with `verdict`, `verdict_reason` and `extracted` added; returns counts.

    All other columns are kept. `output` is a .jsonl or .parquet file; refused rows go beside it, to
    <name>.refused.jsonl. Raises ConfigError for another kind of output, DataError when no row can be used.
    """
    if output.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{output}: expected a .jsonl or .parquet file")
    kept: list[dict[str, Any]] = []
    refused: list[Refusal] = []
    for number, row in read_rows(responses):
        if isinstance(row, Refusal):
            refused.append(row)
        elif problem := _problem(row):
            refused.append(Refusal(str(responses), number, problem, row))
        else:
            kept.append(row)
    beside = output.with_suffix(".refused.jsonl")
    beside.unlink(missing_ok=True)
    if refused:
        report_refusals(refused, beside)
    check_some_left(kept, refused, responses)
    questions = [
        Question(row["response"], str(row["answer"]), row.get("finish_reason") == "length" and not config.grade_cut)
        for row in kept
    ]
    checks = _checks(config, questions, parts=None)
    judged = [{**row, **_columns(check)} for row, check in zip(kept, checks, strict=True)]
    if output.suffix == ".jsonl":
        write_jsonl(output, judged)
    else:
        _write_parquet(output, judged)
    return _summary(checks, refused)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may differ in their columns. Raises DataError for a column with values of several types."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        # Gold answers come as numbers and as texts; everywhere else in the package they are texts.
        values = [str(row[name]) if name == "answer" else row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"{path}: column {name}: expected values of one type, found several; write a .jsonl file instead"
            ) from error
    with atomic_path(path) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")


def _refusal(row: Response, responses: Path) -> Refusal:
    line = int((row.origin or "0").rpartition(":")[2])
    return Refusal(str(responses), line, "missing column(s) answer: nothing to verify against", {"prompt": row.prompt})


def _problem(row: Mapping[str, Any]) -> str | None:
    missing = [name for name in ("prompt", "response", "answer") if row.get(name) is None]
    if missing:
        return f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}"
    if not isinstance(row["response"], str):
        return f"response: expected text, got {type(row['response']).__name__}"
    if not isinstance(row["answer"], str | int | float):
        return f"answer: expected text or a number, got {type(row['answer']).__name__}"
    return None


def _columns(check: Check) -> dict[str, Any]:
    return {"verdict": check.verdict, "verdict_reason": check.reason, "extracted": check.extracted}


def _judged(row: Response, check: Check) -> Response:
    return dataclasses.replace(row, **_columns(check))


def _summary(checks: Sequence[Check], refused: Sequence[Refusal]) -> dict[str, Any]:
    verdicts = Counter(check.verdict for check in checks)
    reasons = Counter(f"{check.verdict}: {check.reason.partition(':')[0]}" for check in checks)
    return {
        "responses": len(checks),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        "reasons": dict(sorted(reasons.items())),
        "refused": len(refused),
    }


def _checks(config: VerifyConfig, questions: Sequence[Question], parts: Path | None) -> list[Check]:
    """Outcomes in the order of the questions; parts that lie in the folder `parts` are taken from there."""
    verifier = VERIFIERS[config.verifier]
    checks: list[Check] = []
    workers = config.workers or os.cpu_count() or 1
    with (
        Pool(verifier.check, workers=workers, seconds=config.time_limit) as pool,
        bar("verify", len(questions)) as advance,
    ):
        for start in range(0, len(questions), PART_ROWS):
            part = questions[start : start + PART_ROWS]
            file = parts / f"{start}.json" if parts else None
            if file and file.is_file():
                outcomes = [Check(Verdict(verdict), reason, found) for verdict, reason, found in read_json(file)]
                advance(len(outcomes))
            else:
                outcomes = [Check(Verdict.UNKNOWN, "")] * len(part)
                for position, check in _check_part(verifier, pool, part):
                    outcomes[position] = check
                    advance(1)
                if file:
                    write_json(file, [dataclasses.astuple(check) for check in outcomes])
            checks += outcomes
    return checks


def _check_part(verifier: Verifier, pool: Pool, part: Sequence[Question]) -> Iterator[tuple[int, Check]]:
    """Positions and outcomes as they come: first what is decided here at once, then what the workers find."""
    hard: list[int] = []
    for position, question in enumerate(part):
        check = _quick(verifier, question)
        if check is None:
            hard.append(position)
        else:
            yield position, check
    for row, check in pool.run([(part[position].response, part[position].answer) for position in hard]):
        yield hard[row], check


def _quick(verifier: Verifier, question: Question) -> Check | None:
    if question.is_cut:
        return Check(Verdict.UNKNOWN, "truncated")
    try:
        return verifier.quick(question.response, question.answer)
    except Exception:  # whatever it is, it shows in the worker, where it costs one row
        return None
