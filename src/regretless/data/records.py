"""The rows that stages exchange: responses and pairs, their parquet schema, and their readers and writers."""

from __future__ import annotations

import dataclasses
import json
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from regretless.core.errors import DataError
from regretless.core.files import atomic_path
from regretless.core.text_gate import MAX_DEPTH, MOST_DIGITS, clean_text, clean_value, is_too_deep, json_value, one_line
from regretless.data.schema import (
    RESPONSE,
    ResponseColumns,
    Unusable,
    check_lengths,
    check_numbers,
    found,
    given_numbers,
)

Message = dict[str, str]
Text = str | list[Message]
"""A plain text, or a conversation: messages with `role` and `content`."""


class Verdict(StrEnum):
    """A verifier's decision; unknown is counted and never paired."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


SideName = Literal["chosen", "rejected"]
SIDES: tuple[SideName, SideName] = ("chosen", "rejected")
PER_TOKEN = ("token_ids", "tokens", "logps", "token_numbers")
"""Fields of a response, and of a side, with one value for each token."""
FinishReason = Literal["stop", "length"]
LogpsKind = Literal["raw", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled answer with the token log-probabilities of the model that generated it."""

    prompt_id: str
    response_id: str
    prompt: Text
    prompt_token_ids: list[int] | None = None
    response: str
    token_ids: list[int] | None = None
    """Generated tokens, the end-of-sequence token included when it was generated."""
    tokens: list[str] | None = None
    """Token strings, if a server returns no ids for its log-probabilities."""
    logps: list[float] | None = None
    """Log-probability of each token id (nats) under the behavior model; `logps_kind` says which distribution."""
    logps_kind: LogpsKind | None = None
    """`raw`: the model's own distribution; `sampled`: after temperature, top-p, top-k and penalties."""
    sampled_logps: list[float] | None = None
    """Log-probability of each token id (nats) in the distribution it was sampled from."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token id by name, which pairs pass on to the objectives that name them in `needs`."""
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    engine: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids (`regretless.modeling.load.tokenizer_fingerprint`)."""
    sampling: str | None = None
    """Sampling parameters as JSON."""
    seed: int | None = None
    finish_reason: FinishReason | None = None
    answer: str | None = None
    """Gold answer of the prompt."""
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    extracted: str | None = None
    """Text that the verifier took as the response's answer."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""
    origin: str | None = field(default=None, compare=False)
    """Origin of the row, `file:line`, for messages; set by the reader and never stored."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """The tokens that the log-probabilities belong to: token ids, or token strings if there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids


@dataclass(frozen=True, kw_only=True)
class Side:
    """One response of a pair: its text, and what is known about its tokens."""

    text: Text
    id: str | None = None
    token_ids: list[int] | None = None
    """Generated tokens, the end-of-sequence token included when it was generated."""
    tokens: list[str] | None = None
    """Token strings, if a data set has no ids for its log-probabilities; the policy's tokenizer resolves them."""
    logps: list[float] | None = None
    """Log-probability of each token (nats) under the behavior policy."""
    token_numbers: dict[str, list[float]] | None = None
    """Further numbers per token by name, for objectives that name them in `needs`."""
    model: str | None = None
    """Name of the model that generated the response."""
    complete: bool | None = None
    """False if the response was truncated (no end-of-sequence token belongs after it)."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """The tokens that the log-probabilities belong to: token ids, or token strings if there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids

    def without_last(self, count: int) -> Side:
        """The side without its last `count` tokens; the caller sets its remaining text."""
        return replace(
            self,
            token_ids=self.token_ids and self.token_ids[:-count],
            tokens=self.tokens and self.tokens[:-count],
            logps=self.logps and self.logps[:-count],
            token_numbers=self.token_numbers and {name: row[:-count] for name, row in self.token_numbers.items()},
            complete=False,
            score=None,
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One preference. Files have flat columns for its sides (`pair_row`): TRL's, `chosen_logps`, `rejected_logps`, …"""

    prompt: Text
    chosen: Side
    rejected: Side | None = None
    """None only in data for supervised training."""
    pair_id: str | None = None
    prompt_id: str | None = None
    prompt_token_ids: list[int] | None = None
    logps_kind: LogpsKind | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids of both sides."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template besides the messages, as JSON; `tools` among them."""
    kind: Literal["original", "masked"] = "original"
    origin: str | None = field(default=None, compare=False)
    """Origin of the row, `file:line`, for messages; set by the reader and never stored."""

    @property
    def sides(self) -> dict[SideName, Side]:
        """The existing sides, by name."""
        return {"chosen": self.chosen} if self.rejected is None else {"chosen": self.chosen, "rejected": self.rejected}


def pair_row(pair: Pair) -> dict[str, Any]:
    """A pair as a row of a file: a side's text under the side's name, its other fields as `chosen_…`, `rejected_…`."""
    row: dict[str, Any] = {"prompt": pair.prompt, **dict.fromkeys(SIDES)}
    row |= {name: getattr(pair, name) for name in _names(Pair) if name not in row}
    for side in SIDES:
        values = pair.sides.get(side)
        for name in _names(Side):
            row[side if name == "text" else f"{side}_{name}"] = None if values is None else getattr(values, name)
    return row


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
COLUMN_TYPES: dict[str, pa.DataType] = {
    "prompt_token_ids": IDS,
    "token_ids": IDS,
    "tokens": pa.list_(pa.string()),
    "logps": FLOATS,
    "sampled_logps": FLOATS,
    "score": pa.float64(),
    "complete": pa.bool_(),
    "seed": pa.int64(),
}
"""Columns that are not text; those of a side have its name as prefix, as in `chosen_logps`."""
TEXT_COLUMNS = ("prompt", *SIDES)
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a character in JSON."""


@dataclass(frozen=True)
class Refusal:
    """An input row that cannot be used: its location and the reason."""

    source: str
    line: int
    """1-based line of a text file, or row of a table."""
    reason: str
    row: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return one_line(f"{self.source}:{self.line}: {self.reason}")


def write_records(path: Path, records: Sequence[Response] | Sequence[Pair]) -> None:
    """Write records atomically, as parquet or (by the suffix) JSONL.

    Raises DataError if a text column mixes strings and conversations: parquet columns have one type.
    """
    rows = [_stored(record) for record in records]
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
        return
    names = [name for name in (rows[0] if rows else ()) if not _is_absent(name, rows)]
    table = pa.table({name: pa.array([row[name] for row in rows], column_type(name, rows)) for name in names})
    write_parquet(path, table)


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a table atomically, with checksums so that a reader detects a damaged file."""
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        pq.write_table(table, handle, compression="zstd", write_page_checksum=True)


def _is_absent(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if no row has numbers in a column of `token_numbers`, which then has no type either."""
    return column.endswith("token_numbers") and not any(row[column] for row in rows)


def _stored(record: Response | Pair) -> dict[str, Any]:
    if isinstance(record, Pair):
        return pair_row(record)
    return {name: getattr(record, name) for name in _names(Response)}


# Not dataclasses.asdict: it copies every token of every response.
@cache
def _names(kind: type[Response | Pair | Side]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.name != "origin")


def column_type(column: str, rows: Sequence[Mapping[str, Any]]) -> pa.DataType:
    """Type of a column of records. Raises DataError if a text column mixes strings and conversations."""
    if column in TEXT_COLUMNS:
        kinds = {isinstance(row.get(column), str) for row in rows if row.get(column) is not None}
        if len(kinds) > 1:
            raise DataError(
                f"column {column}: some rows are strings and some are message lists; make them all one or the other"
            )
        return pa.string() if kinds == {True} else MESSAGES
    name = column.removeprefix("chosen_").removeprefix("rejected_")
    if name == "token_numbers":
        keys = sorted({key for row in rows for key in row.get(column) or ()})
        return pa.struct([(key, FLOATS) for key in keys]) if keys else pa.null()
    return COLUMN_TYPES.get(name, pa.string())


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(json_line(row) for row in rows)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a JSONL file for any row: values without a JSON form are written as text (`json_value`)."""
    try:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        line = json.dumps(json_value(row), ensure_ascii=False, allow_nan=False)
    return clean_text(line) + "\n"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    """Rows of a parquet, JSONL or JSON file with their 1-based line (or row) number; broken rows become refusals.

    Texts contain whole characters only (`text_gate.clean_text`). Raises DataError if the file is missing, of another
    kind, or broken as a whole.
    """
    check_is_file(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix in {".jsonl", ".ndjson"}:
        return _jsonl_rows(path)
    if path.suffix == ".json":
        return _json_rows(path)
    raise DataError(f"{path}: expected .parquet, .jsonl or .json, got {path.suffix or 'no suffix'}")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield number, _parse_line(path, number, line.removeprefix(BOM_UTF8) if number == 1 else line)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | Refusal:
    try:
        text = line.decode()
        row = json.loads(text)
    except UnicodeDecodeError as error:
        return Refusal(str(path), number, f"not valid UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return Refusal(str(path), number, f"not valid JSON: {_reason(error)}")
    return _object(path, number, row, text)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested deeper than {MAX_DEPTH} levels"
    return f"an integer of more than {MOST_DIGITS} digits" if "digits" in str(error) else str(error)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    try:
        text = path.read_bytes().removeprefix(BOM_UTF8).decode()
        rows = json.loads(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not valid JSON: {_reason(error)}; one object a line belongs in a .jsonl file"
        ) from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    half = SURROGATE.search(text) is not None
    del text
    for number, row in enumerate(rows, 1):
        yield number, _object(path, number, row, "\\ud800" if half else "", always=True)


def _object(path: Path, number: int, row: Any, text: str, *, always: bool = False) -> dict[str, Any] | Refusal:
    """A row as parsed from `text`; `always`: the text does not limit how deep it is nested."""
    if not isinstance(row, dict):
        return Refusal(str(path), number, f"expected a JSON object, got {type(row).__name__}")
    if (always or text.count("[") + text.count("{") > MAX_DEPTH) and is_too_deep(row):
        return Refusal(str(path), number, f"nested deeper than {MAX_DEPTH} levels")
    return clean_value(row) if SURROGATE.search(text) is not None else row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    with path.open("rb") as handle:  # not by its name, which may not be UTF-8
        try:
            # Buffered: without it a whole row group's columns are read at once.
            file = pq.ParquetFile(handle, buffer_size=1 << 20, page_checksum_verification=True)
            names = file.schema_arrow.names
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: not a parquet file that can be read ({_first_line(error)}); create it again"
            ) from error
        if len(set(names)) < len(names):
            raise DataError(f"{path}: expected every column once, got {', '.join(names)}")
        first = 1
        # Group by group: one iterator over all of them keeps every group's buffers to its end.
        for group in range(file.num_row_groups):
            number, end = first, first + file.metadata.row_group(group).num_rows
            try:
                for batch in file.iter_batches(batch_size=512, row_groups=[group]):
                    for row in _batch_rows(path, number, batch):
                        yield number, row
                        number += 1
            except (pa.ArrowException, OSError) as error:
                reason = f"rows {number} to {end - 1} cannot be read ({_first_line(error)}); create the file again"
                yield number, Refusal(str(path), number, reason)
            first = end


def row_count(path: Path) -> int | None:
    """Rows of a parquet file; None if unknown without reading them."""
    if path.suffix != ".parquet" or not path.is_file():
        return None
    with path.open("rb") as handle:
        try:
            return int(pq.read_metadata(handle).num_rows)
        except (pa.ArrowException, OSError):
            return None


def _batch_rows(path: Path, first: int, batch: pa.RecordBatch) -> Sequence[dict[str, Any] | Refusal]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):  # texts that are not UTF-8, dates that Python does not have
        return [_single_row(path, first + place, batch.slice(place, 1)) for place in range(len(batch))]
    return rows


def _single_row(path: Path, number: int, batch: pa.RecordBatch) -> dict[str, Any] | Refusal:
    row: dict[str, Any] = {}
    for name in batch.schema.names:
        try:
            row[name] = batch[name].to_pylist()[0]
        except (ValueError, OverflowError) as error:
            expected = "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else "cannot be read"
            return Refusal(str(path), number, f"{name}: {expected}: {_first_line(error)}")
    return row


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_is_file(path: Path) -> None:
    """Raise DataError with the problem unless the path leads to a file."""
    if path.is_file():
        return
    if path.is_dir():
        raise DataError(f"{path}: expected a file, found a folder")
    if path.is_symlink():
        raise DataError(f"{path}: no such file: it is a link to {path.readlink()}, which does not exist")
    raise DataError(f"{path}: no such file")


T = TypeVar("T")


def of_one_kind(rows: Sequence[T], kind: Callable[[T], tuple[bool, ...]]) -> tuple[list[T], list[T]]:
    """Rows whose texts are of the most common kind, and the others: a column of a table has one type.

    kind: which of a row's texts are strings (the others are conversations).
    """
    kinds = Counter(map(kind, rows))
    if len(kinds) < 2:
        return list(rows), []
    most = max(kinds, key=kinds.__getitem__)
    return [row for row in rows if kind(row) == most], [row for row in rows if kind(row) != most]


def other_kind(prompt: Text) -> str:
    """Reason to reject a prompt that is a text where the others are conversations, or vice versa."""
    here, most = ("a text", "conversations") if isinstance(prompt, str) else ("a conversation", "texts")
    return f"prompt: {here}, where most rows have {most}; a file holds one kind"


def split_ambiguous(rows: Sequence[Response], path: Path) -> tuple[list[Response], list[Refusal]]:
    """Responses whose prompt id stands for one prompt, and the others, whose prompt is ambiguous."""
    first: dict[str, Response] = {}
    other: dict[str, Response] = {}
    for row in rows:
        if first.setdefault(row.prompt_id, row).prompt != row.prompt:
            other.setdefault(row.prompt_id, row)
    reasons = {
        name: f"prompt_id: {found(name)} stands for two prompts ({first[name].origin} and {row.origin}); "
        "every prompt needs its own id"
        for name, row in other.items()
    }
    refused = [_refusal(row, path, reasons[row.prompt_id]) for row in rows if row.prompt_id in reasons]
    return [row for row in rows if row.prompt_id not in reasons], refused


def _refusal(row: Response, path: Path, reason: str) -> Refusal:
    line = int((row.origin or "0").rpartition(":")[2])
    return Refusal(str(path), line, reason, {"prompt": row.prompt, "response": row.response})


def read_responses(path: Path) -> tuple[list[Response], list[Refusal]]:
    """Responses of a file, and the rejected rows; at least `prompt` and `response` are required."""
    kept: list[Response] = []
    refused: list[Refusal] = []
    for number, row in read_rows(path):
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        try:
            kept.append(_response(row, path, number))
        except Unusable as reason:
            refused.append(Refusal(str(path), number, str(reason), row))
    kept, others = of_one_kind(kept, lambda row: (isinstance(row.prompt, str),))
    refused += [_refusal(row, path, other_kind(row.prompt)) for row in others]
    return kept, sorted(refused, key=lambda refusal: refusal.line)


def _response(row: Mapping[str, Any], path: Path, number: int) -> Response:
    """Response of a row. Raises Unusable."""
    columns = check_response(row)
    prompt_id = text_key(row["prompt"]) if columns.prompt_id in (None, "") else str(columns.prompt_id)
    prompt = row["prompt"]
    values = {name: value for name, value in columns if value is not None}
    values |= {
        "prompt_id": prompt_id,
        "response_id": f"{prompt_id}-{number}" if columns.response_id in (None, "") else str(columns.response_id),
        "prompt": prompt
        if isinstance(prompt, str)
        else [{key: item[key] for key in ("role", "content")} for item in prompt],
        "token_numbers": given_numbers(columns.token_numbers),
        "answer": None if columns.answer is None else str(columns.answer),
        "verdict": None if columns.verdict is None else Verdict(columns.verdict),
        "origin": f"{path}:{number}",
    }
    return Response(**values)


def check_response(row: Mapping[str, Any]) -> ResponseColumns:
    """Columns of a response row. Raises Unusable with the missing or unexpected column."""
    missing = [name for name in ("prompt", "response") if row.get(name) is None]
    if missing:
        raise Unusable(f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}")
    columns = RESPONSE.check(row)
    pieces = columns.tokens if columns.token_ids is None else columns.token_ids
    problem = check_lengths("logps", pieces, columns.logps) or check_numbers(
        "token_numbers", pieces, columns.token_numbers
    )
    if problem is not None:
        raise Unusable(problem)
    return columns


def text_key(text: Text) -> str:
    """Short stable identity of a text or conversation."""
    from regretless.core.files import fingerprint

    return fingerprint(text)[:16]


def write_refusals(path: Path, refusals: Sequence[Refusal]) -> None:
    """Write rejected rows with file, line and reason as JSONL."""
    write_jsonl(path, [dataclasses.asdict(refusal) for refusal in refusals])
