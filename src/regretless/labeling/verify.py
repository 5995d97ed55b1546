"""Stage `verify`: responses and gold answers in, verdicts out."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import AfterValidator, Field

from regretless.core.errors import DataError
from regretless.core.files import read_json, write_json, write_jsonl
from regretless.core.settings import Section
from regretless.core.terminal import bar
from regretless.core.text_gate import without_nan
from regretless.data.records import Response, Verdict
from regretless.data.refusals import Refusal, check_some_left, report_refusals
from regretless.data.responses import check_response
from regretless.data.rows import column_type, read_rows, write_parquet
from regretless.data.schema import Unusable, found
from regretless.labeling.check import Check, Verifier
from regretless.labeling.pool import Pool
from regretless.labeling.verifiers import VERIFIERS

NAMES = ("answer", "prompt_id", "response_id")
RESPONSE_COLUMNS = frozenset(field.name for field in dataclasses.fields(Response))
RESULT = "responses.parquet"
PART_ROWS = 2000
"""Rows between two points that a killed run can go on from."""


class VerifyConfig(Section):
    """How responses are compared with their gold answers."""

    verifier: Annotated[str, AfterValidator(VERIFIERS.check)] = "math"
    """`math` grades the last answer of a response, `math_any` accepts a response when any answer that it marks as one
    is right; or the name of a plug-in."""
    grade_cut: bool = False
    """Whether a response that ran into its limit of tokens is graded like the others; else its verdict is unknown.
    `math` takes the last number of a text that breaks off for its answer, `math_any` wants an answer marked as one."""
    time_limit: float = Field(default=10.0, gt=0)
    """Seconds of the processor's time that one response may take; then its process ends and its verdict is unknown. One
    that only waits has eight times as long, on the clock."""
    workers: int | None = Field(default=None, ge=1)
    """Processes at most; one per CPU core unless given. They start only for rows that need algebra."""


class VerdictKey(NamedTuple):
    """What a verdict depends on."""

    response: str
    answer: str
    is_cut: bool
    """Whether the response ran into the limit on its tokens, and is therefore not graded."""


def run(config: VerifyConfig, responses: Path, output: Path, result: str = RESULT) -> dict[str, Any]:
    """Write the rows {prompt, response, answer, …} with `verdict`, `verdict_reason` and `extracted`; returns counts.

    Written into the folder `output`: the file `result` (.parquet or .jsonl) with all columns of the rows, and
    refused.jsonl. An interrupted run resumes behind its last finished part. Raises DataError when no row can be used.
    """
    kept: dict[int, dict[str, Any]] = {}
    refused: list[Refusal] = []
    for number, row in read_rows(responses):
        if isinstance(row, Refusal):
            refused.append(row)
        elif problem := _problem(row):
            refused.append(Refusal(str(responses), number, problem, row))
        else:
            kept[number] = row
    is_table = result.endswith(".parquet")
    if is_table:
        refused += _split_types(kept, responses)
    report_refusals(sorted(refused, key=lambda refusal: refusal.line), output / "refused.jsonl")
    rows = list(kept.values())
    check_some_left(rows, refused, responses)
    questions = [
        VerdictKey(row["response"], str(row["answer"]), row.get("finish_reason") == "length" and not config.grade_cut)
        for row in rows
    ]
    parts = output / "parts"
    checks = _checks(config, questions, parts)
    judged = [{**row, **_columns(check)} for row, check in zip(rows, checks, strict=True)]
    if is_table:
        _write_parquet(output / result, judged)
    else:
        write_jsonl(output / result, map(without_nan, judged))
    shutil.rmtree(parts)
    return _summary(checks, refused)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may differ in their columns, but not in the types of these."""
    write_parquet(path, pa.table({name: _array(name, rows) for name in _names(rows)}))


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _array(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Array:
    """A column of a table. Raises ArrowException or OverflowError when its values have no type in common."""
    rows = list(rows)
    # Gold answers and names come as numbers and as texts; everywhere else in the package they are texts.
    values = [row.get(name) for row in rows]
    if name in NAMES:
        values = [None if value is None else str(value) for value in values]
    return pa.array(values, column_type(name, rows) if name in RESPONSE_COLUMNS else None)


def _split_types(rows: dict[int, dict[str, Any]], responses: Path) -> list[Refusal]:
    """Take the rows out that do not fit into one table with the others; a column's commonest kind of value counts."""
    refused: list[Refusal] = []
    for name in _names(rows.values()):
        while True:
            try:
                _array(name, rows.values())
                break
            except (pa.ArrowException, OverflowError):
                kinds = Counter(_kind(row[name]) for row in rows.values() if row.get(name) is not None)
                most = max(kinds, key=kinds.__getitem__)
                others = [
                    number for number, row in rows.items() if row.get(name) is not None and _kind(row[name]) != most
                ]
                if not others:
                    raise DataError(
                        f"{responses}: column {name}: its values have no type in common that a table can hold; write a "
                        ".jsonl file, or take the column out"
                    ) from None
            refused += [
                Refusal(
                    str(responses),
                    number,
                    f"{name}: expected {most} as in most rows, for a table, got {found(rows[number][name])}; or write "
                    "a .jsonl file",
                    rows[number],
                )
                for number in others
            ]
            for number in others:
                del rows[number]
    return refused


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number" if not isinstance(value, int) or -(2**63) <= value < 2**63 else "a number of any length"
    if isinstance(value, list):
        return f"a list of {_kind(value[0])}" if value else "a list"
    names = {str: "text", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _problem(row: Mapping[str, Any]) -> str | None:
    missing = [name for name in ("prompt", "response", "answer") if row.get(name) is None]
    if missing:
        return f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}"
    try:
        check_response(row)
    except Unusable as reason:
        return str(reason)
    return None


def _columns(check: Check) -> dict[str, Any]:
    return {"verdict": check.verdict, "verdict_reason": check.reason, "extracted": check.extracted}


def _summary(checks: Sequence[Check], refused: Sequence[Refusal]) -> dict[str, Any]:
    verdicts = Counter(check.verdict for check in checks)
    reasons = Counter(f"{check.verdict}: {check.reason.partition(':')[0]}" for check in checks)
    return {
        "responses": len(checks),
        **{verdict.value: verdicts[verdict] for verdict in Verdict},
        "reasons": dict(sorted(reasons.items())),
        "refused": len(refused),
    }


def _checks(config: VerifyConfig, questions: Sequence[VerdictKey], parts: Path | None) -> list[Check]:
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


def _check_part(verifier: Verifier, pool: Pool, part: Sequence[VerdictKey]) -> Iterator[tuple[int, Check]]:
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


def _quick(verifier: Verifier, question: VerdictKey) -> Check | None:
    if question.is_cut:
        return Check(Verdict.UNKNOWN, "truncated")
    try:
        return verifier.quick(question.response, question.answer)
    except Exception:  # whatever it is, it shows in the worker, where it costs one row
        return None
