"""The verify stage: verdicts from responses and gold answers."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
from pydantic import AfterValidator, Field

from regretless.core.errors import ConfigError, RegretlessError
from regretless.core.files import read_json, write_json, write_jsonl
from regretless.core.progress import Advance, bar
from regretless.core.settings import Section
from regretless.core.text_cleaning import without_nan
from regretless.data.columns import CONTINUATIONS, TOP, Response, Verdict, as_bytes
from regretless.data.messages import stored_text
from regretless.data.rejected_rows import Refusal, check_some_left, report_refusals
from regretless.data.responses import check_present, check_response
from regretless.data.rows import column_type, read_rows, write_parquet
from regretless.data.schema import GoldAnswer, Unusable, given_numbers, quoted, read_gold, stored_gold
from regretless.labeling.base import DIED, FAILED, Check, Verifier, check_problem
from regretless.labeling.verifiers import VERIFIERS
from regretless.labeling.worker_pool import Pool
from regretless.workflow.workers import Need, cpus, executor

NAMES = ("prompt_id", "response_id")
RESPONSE_COLUMNS = frozenset(field.name for field in dataclasses.fields(Response))
RESULT = "responses.parquet"
TRUNCATED = "truncated"
"""Reason of a response that was cut, and is therefore not graded."""
PART_ROWS = 2000
"""Rows per part; an interrupted run resumes after its last complete part."""


class VerifyConfig(Section):
    """How responses are compared with their gold answers."""

    verifier: Annotated[str, AfterValidator(VERIFIERS.check)] = "math"
    """How responses are checked. `math` grades the last answer of a response; `math_any` accepts a response if any
    answer that is marked as one is right. Both accept any item of a gold answer that is a list, and take no objects. Or
    the name of a plug-in."""
    grade_cut: bool = False
    """Whether a response that was cut at the token limit is graded like others; otherwise its verdict is unknown. If it
    is graded, `math` falls back on the last number in the text, `math_any` requires a marked answer."""
    time_limit: float = Field(default=10.0, gt=0, le=86_400)
    """Seconds of CPU time that checking one response may take; after that its process is ended and its verdict is
    unknown. A check that only waits is ended after eight times as many seconds."""
    workers: int | None = Field(default=None, ge=1)
    """Most worker processes; one per CPU core by default. They start only if some rows need algebra."""


class VerdictKey(NamedTuple):
    """The fields that a verdict depends on."""

    question: tuple[Any, ...]
    """Response and gold answer, and the prompt for a verifier that reads it."""
    is_cut: bool
    """True if the response reached its token limit, and is therefore not graded."""


def run(config: VerifyConfig, responses: Path, output: Path, result: str = RESULT) -> dict[str, Any]:
    """Write the rows {prompt, response, answer, …} with `verdict`, `verdict_reason` and `extracted`; returns counts.

    Written into the folder `output`: the file `result` (.parquet or .jsonl) with all columns of the rows, and
    refused.jsonl. An interrupted run resumes after its last complete part. Raises DataError if no row is usable,
    RegretlessError if the verifier failed on every row that it was to grade.
    """
    verifier = VERIFIERS.find(config.verifier)
    is_table = result.endswith(".parquet")
    usable: dict[int, dict[str, Any]] = {}
    golds: dict[int, GoldAnswer] = {}
    refused: list[Refusal] = []
    for number, row in read_rows(responses):
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        try:
            golds[number] = gold = _gold(row, verifier)
        except Unusable as reason:
            refused.append(Refusal(str(responses), number, str(reason), row))
        else:
            usable[number] = {**row, **stored_gold(gold)} if is_table else row
    if is_table:
        refused += _split_types(usable, responses)
    report_refusals(sorted(refused, key=lambda refusal: refusal.line), output / "refused.jsonl")
    rows = list(usable.values())
    check_some_left(rows, refused, responses)
    names = ("prompt",) if verifier.with_prompt else ()
    questions = [
        VerdictKey(
            (row["response"], golds[number], *(row[name] for name in names)),
            row.get("finish_reason") == "length" and not config.grade_cut,
        )
        for number, row in usable.items()
    ]
    parts = output / "parts"
    checks = _checks(config, questions, parts)
    _refuse_if_all_failed(config.verifier, checks, parts)
    judged = [{**row, **_columns(check)} for row, check in zip(rows, checks, strict=True)]
    if is_table:
        _write_parquet(output / result, judged)
    else:
        write_jsonl(output / result, map(without_nan, judged))
    shutil.rmtree(parts)
    return _summary(checks, refused)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows that may have different columns, but the same type in each column."""
    write_parquet(path, pa.table({name: _array(name, rows) for name in _names(rows)}))


def _names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _array(name: str, rows: Iterable[Mapping[str, Any]]) -> pa.Array:
    """A column of a table. Raises ArrowException or OverflowError if its values have no common type."""
    rows = list(rows)
    # Names may be numbers or texts; everywhere else in the package they are texts.
    values = [row.get(name) for row in rows]
    if name in NAMES:
        values = [None if value is None else str(value) for value in values]
    if name == "token_numbers":
        values = [given_numbers(value) for value in values]  # a table has no object without a name
    if name == "prompt":
        values = [stored_text(value) for value in values]
    if name in (TOP, CONTINUATIONS):
        values = list(map(as_bytes, values))
    if name in RESPONSE_COLUMNS:
        return pa.array(values, column_type(name, rows))
    return pa.array(list(map(_with_keys, values)))


def _with_keys(value: Any) -> Any:
    """The value with null in place of each object without keys, for which a table has no type."""
    if isinstance(value, dict):
        return {key: _with_keys(item) for key, item in value.items()} or None
    return list(map(_with_keys, value)) if isinstance(value, list) else value


def _split_types(rows: dict[int, dict[str, Any]], responses: Path) -> list[Refusal]:
    """Remove the rows that do not fit into one table with the others; the most common type of a column counts."""
    refused: list[Refusal] = []
    for name in _names(rows.values()):
        while not _fits(name, rows.values()):
            expected, others = _others(name, {number: row for number, row in rows.items() if row.get(name) is not None})
            refused += [
                Refusal(
                    str(responses),
                    number,
                    f"{name}: expected {expected}, got {quoted(rows[number][name])}; or write a .jsonl file",
                    rows[number],
                )
                for number in others
            ]
            for number in others:
                del rows[number]
    return refused


def _fits(name: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    """True if the rows' values have a common type for the column of a table."""
    try:
        _array(name, rows)
    except (pa.ArrowException, OverflowError):
        return False
    return True


def _others(name: str, rows: Mapping[int, Mapping[str, Any]]) -> tuple[str, list[int]]:
    """Of rows that do not fit into one table: what a column is expected to hold, and the numbers of those that lack it.

    First those that fit into none, as a list of numbers and texts, then those of another kind than most, or of another
    type in detail.
    """
    if alone := [number for number, row in rows.items() if not _fits(name, [row])]:
        return "a value that a table can hold", alone
    kinds = {number: _kind(row[name]) for number, row in rows.items()}
    if len(set(kinds.values())) == 1:
        kinds = {number: str(_array(name, [row]).type) for number, row in rows.items()}
    most, _ = Counter(kinds.values()).most_common(1)[0]
    return f"{most}, as in most rows", [number for number, kind in kinds.items() if kind != most]


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number" if not isinstance(value, int) or -(2**63) <= value < 2**63 else "a number of any length"
    if isinstance(value, list):
        return f"a list of {_kind(value[0])}" if value else "a list"
    names = {str: "text", dict: "an object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _gold(row: Mapping[str, Any], verifier: Verifier) -> GoldAnswer:
    """The gold answer of a row that this verifier can grade. Raises Unusable."""
    check_present(row, ("prompt", "response", "answer"))
    check_response(row)
    gold = read_gold(row)
    assert gold is not None
    if problem := verifier.gold_problem(gold):
        raise Unusable(f"answer: {problem}")
    return gold


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


@dataclasses.dataclass(frozen=True)
class VerifiedPart:
    """A numbered part of the questions, and the file of its outcomes."""

    questions: Sequence[VerdictKey]
    file: Path

    def __str__(self) -> str:
        return str(self.file)


class PartVerifier(contextlib.AbstractContextManager["PartVerifier"]):
    """Verifies parts, with a pool of processes for what needs algebra. Each worker makes one."""

    def __init__(self, config: VerifyConfig) -> None:
        self.verifier = VERIFIERS[config.verifier]
        self.pool = Pool(self.verifier.check, workers=config.workers or cpus(), seconds=config.time_limit)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.__exit__(kind, error, trace)

    def __call__(self, part: VerifiedPart, advance: Advance) -> None:
        """Write the part's outcomes."""
        outcomes = [Check(Verdict.UNKNOWN, "")] * len(part.questions)
        for position, check in _check_part(self.verifier, self.pool, part.questions):
            outcomes[position] = check
            advance(1)
        write_json(part.file, [dataclasses.astuple(check) for check in outcomes])


def _checks(config: VerifyConfig, questions: Sequence[VerdictKey], folder: Path) -> list[Check]:
    """Outcomes in the order of the questions; finished parts are read from the folder."""
    starts = range(0, len(questions), PART_ROWS)
    parts = [VerifiedPart(questions[start : start + PART_ROWS], folder / f"{start}.json") for start in starts]
    missing = [part for part in parts if not part.file.is_file()]
    done = len(questions) - sum(len(part.questions) for part in missing)
    with bar("verify", len(questions), done) as advance:
        executor().run(Need("verify"), partial(PartVerifier, config), missing, advance)
    return [
        Check(Verdict(verdict), reason, extracted)
        for part in parts
        for verdict, reason, extracted in read_json(part.file)
    ]


def _refuse_if_all_failed(verifier: str, checks: Sequence[Check], parts: Path) -> None:
    """Raise RegretlessError if the verifier raised or died for every row: it is broken, and not the responses."""
    graded = [check for check in checks if check.reason != TRUNCATED]
    if graded and all(check.reason.startswith((FAILED, DIED)) for check in graded):
        shutil.rmtree(parts)  # for a verifier that has been corrected
        raise RegretlessError(
            f"verifier {verifier}: failed on each of the {len(graded)} rows that it was to grade; the first: "
            f"{graded[0].reason.removeprefix(FAILED + ': ')}; correct the verifier, or choose another"
        )


def _check_part(verifier: Verifier, pool: Pool, part: Sequence[VerdictKey]) -> Iterator[tuple[int, Check]]:
    """Indices and outcomes as they complete: first those that are decided here at once, then those of the workers."""
    hard: list[int] = []
    for position, question in enumerate(part):
        check = _quick(verifier, question)
        if check is None:
            hard.append(position)
        else:
            yield position, check
    for row, check in pool.run([part[position].question for position in hard]):
        yield hard[row], check


def _quick(verifier: Verifier, question: VerdictKey) -> Check | None:
    if question.is_cut:
        return Check(Verdict.UNKNOWN, TRUNCATED)
    try:
        check = verifier.quick(*question.question)
    except Exception:  # any error recurs in the worker, where it affects one row
        return None
    if check is not None and (problem := check_problem(check)) is not None:
        raise ConfigError(f"verifier {verifier.check.__module__}: its function quick {problem}")
    return check
