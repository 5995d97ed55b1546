"""The rows that stages exchange: responses and pairs, their parquet schema, and their readers and writers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from regretless.errors import DataError
from regretless.store import atomic_path

Message = dict[str, str]
Text = str | list[Message]
"""A text as such, or a conversation: messages with `role` and `content`."""


class Verdict(StrEnum):
    """What a verifier found; unknown is counted and never paired."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


FinishReason = Literal["stop", "length"]
LogpsKind = Literal["raw", "sampled"]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled answer with the token log-probabilities of the model that wrote it."""

    prompt_id: str
    response_id: str
    prompt: Text
    prompt_token_ids: list[int] | None = None
    response: str
    token_ids: list[int] | None = None
    """Generated tokens, the end-of-sequence token included when it was generated."""
    tokens: list[str] | None = None
    """Token strings, where a server gives no ids for its log-probabilities."""
    logps: list[float] | None = None
    """Log-probability of each token id (nats) under the behaviour model; `logps_kind` says which distribution."""
    logps_kind: LogpsKind | None = None
    """`raw`: the model's own distribution; `sampled`: after temperature, top-p, top-k and penalties."""
    sampled_logps: list[float] | None = None
    """Log-probability of each token id (nats) in the distribution it was drawn from."""
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    engine: str | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids (`regretless.models.tokenizer_fingerprint`)."""
    sampling: str | None = None
    """Sampling parameters as JSON."""
    seed: int | None = None
    finish_reason: FinishReason | None = None
    answer: str | None = None
    """Gold answer of the prompt."""
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    extracted: str | None = None
    """What the verifier took for the response's answer."""
    score: float | None = None
    """Scalar quality from a judge; higher is better."""
    origin: str | None = field(default=None, compare=False)
    """Where the row was read, `file:line`, for messages; set by the reader and never stored."""

    @property
    def pieces(self) -> list[int] | list[str] | None:
        """What the log-probabilities belong to: token ids, or token strings where there are no ids."""
        return self.tokens if self.token_ids is None else self.token_ids


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One preference: TRL's columns, and beside them the ids and behaviour log-probabilities of both sides."""

    prompt: Text
    chosen: Text
    rejected: Text | None = None
    """None only in data for supervised training."""
    pair_id: str | None = None
    prompt_id: str | None = None
    chosen_id: str | None = None
    rejected_id: str | None = None
    prompt_token_ids: list[int] | None = None
    chosen_token_ids: list[int] | None = None
    rejected_token_ids: list[int] | None = None
    chosen_logps: list[float] | None = None
    """Nats per chosen token under the policy that wrote it."""
    rejected_logps: list[float] | None = None
    logps_kind: LogpsKind | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that made the ids of both sides."""
    chosen_tokens: list[str] | None = None
    """Token strings, where a data set gives no ids for its log-probabilities; the policy's tokenizer resolves them."""
    rejected_tokens: list[str] | None = None
    chosen_model: str | None = None
    """Name of the model that wrote the response."""
    rejected_model: str | None = None
    chosen_complete: bool | None = None
    """False when the response was cut (no end-of-sequence token belongs behind it)."""
    rejected_complete: bool | None = None
    chosen_score: float | None = None
    rejected_score: float | None = None
    kind: Literal["original", "masked"] = "original"
    origin: str | None = field(default=None, compare=False)
    """Where the row was read, `file:line`, for messages; set by the reader and never stored."""


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
IDS, FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
COLUMN_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(("prompt_token_ids", "token_ids", "chosen_token_ids", "rejected_token_ids"), IDS),
    **dict.fromkeys(("logps", "sampled_logps", "chosen_logps", "rejected_logps"), FLOATS),
    **dict.fromkeys(("tokens", "chosen_tokens", "rejected_tokens"), pa.list_(pa.string())),
    **dict.fromkeys(("score", "chosen_score", "rejected_score"), pa.float64()),
    **dict.fromkeys(("chosen_complete", "rejected_complete"), pa.bool_()),
    "seed": pa.int64(),
}
TEXT_COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Refusal:
    """An input row that cannot be used: where it stands and why."""

    source: str
    line: int
    """1-based line of a text file, or row of a table."""
    reason: str
    row: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def write_records(path: Path, records: Sequence[Response] | Sequence[Pair]) -> None:
    """Write records atomically, as parquet or (by the suffix) JSONL.

    Raises DataError when a text column mixes strings and conversations: parquet columns have one type.
    """
    rows = [_stored(record) for record in records]
    if path.suffix == ".jsonl":
        write_jsonl(path, rows)
        return
    names = list(rows[0]) if rows else []
    table = pa.table({name: pa.array([row[name] for row in rows], _column_type(name, rows)) for name in names})
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _stored(record: Response | Pair) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies every token of every response.
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name != "origin"}


def _column_type(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.DataType:
    if name in TEXT_COLUMNS:
        kinds = {isinstance(row[name], str) for row in rows if row[name] is not None}
        if len(kinds) > 1:
            raise DataError(
                f"column {name}: some rows are strings and some are message lists; make them all one or the other"
            )
        return pa.string() if kinds == {True} else MESSAGES
    return COLUMN_TYPES.get(name, pa.string())


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, atomically."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        handle.writelines(json_line(row) for row in rows)


def json_line(row: Mapping[str, Any]) -> str:
    """One line of a JSONL file."""
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    """Rows of a parquet, JSONL or JSON file with their 1-based line (or row) number; broken lines come as refusals.

    Raises DataError when the file is missing or of another kind.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".parquet":
        number = 0
        # Buffered: without it a whole row group's columns are read at once. Group by group: one iterator over all of
        # them keeps every group's buffers to its end.
        file = pq.ParquetFile(path, buffer_size=1 << 20)
        groups = (file.iter_batches(batch_size=512, row_groups=[group]) for group in range(file.num_row_groups))
        for batch in chain.from_iterable(groups):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    elif path.suffix in {".jsonl", ".ndjson"}:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, _parse_line(path, number, line)
    elif path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}: not valid JSON: {error}; one object a line belongs in a .jsonl file") from error
        if not isinstance(rows, list):
            raise DataError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
        yield from ((number, _object(path, number, row)) for number, row in enumerate(rows, 1))
    else:
        raise DataError(f"{path}: expected .parquet, .jsonl or .json, got {path.suffix or 'no suffix'}")


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | Refusal:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Refusal(str(path), number, f"not valid UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return Refusal(str(path), number, f"not valid JSON: {error}")
    return _object(path, number, row)


def _object(path: Path, number: int, row: Any) -> dict[str, Any] | Refusal:
    if not isinstance(row, dict):
        return Refusal(str(path), number, f"expected a JSON object, got {type(row).__name__}")
    return row


def read_responses(path: Path) -> tuple[list[Response], list[Refusal]]:
    """Responses of a file; at least `prompt` and `response` are required. Refused rows come beside them."""
    kept: list[Response] = []
    refused: list[Refusal] = []
    fields = {field.name for field in dataclasses.fields(Response)}
    for number, row in read_rows(path):
        if isinstance(row, Refusal):
            refused.append(row)
            continue
        reason = _response_problem(row)
        if reason:
            refused.append(Refusal(str(path), number, reason, row))
            continue
        values = {key: value for key, value in row.items() if key in fields and value is not None}
        values.setdefault("prompt_id", text_key(row["prompt"]))
        values.setdefault("response_id", f"{values['prompt_id']}-{number}")
        values["origin"] = f"{path}:{number}"
        values |= {key: str(values[key]) for key in ("prompt_id", "response_id", "answer") if key in values}
        if "verdict" in values:
            values["verdict"] = Verdict(values["verdict"])
        kept.append(Response(**values))
    return kept, refused


def _response_problem(row: Mapping[str, Any]) -> str | None:
    missing = [name for name in ("prompt", "response") if row.get(name) is None]
    if missing:
        return f"missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}"
    if not isinstance(row["response"], str):
        return f"response: expected text, got {type(row['response']).__name__}"
    if row.get("verdict") is not None and row["verdict"] not in set(Verdict):
        return f"verdict: expected correct, wrong or unknown, got {row['verdict']!r}"
    if not isinstance(row.get("score"), int | float | None):
        return f"score: expected a number, got {row['score']!r:.40}"
    token_ids = row.get("token_ids")
    return logps_problem("logps", row.get("tokens") if token_ids is None else token_ids, row.get("logps"))


def logps_problem(
    name: str, token_ids: Sequence[int] | Sequence[str] | None, logps: Sequence[float] | None
) -> str | None:
    """What is wrong with a response's log-probabilities (nats, one per token id or string), or None."""
    if logps is None:
        return None
    if token_ids is None:
        return f"{name}: given without token ids, so there is no telling which tokens they belong to"
    if len(logps) != len(token_ids):
        return f"{name}: expected one value per token, got {len(logps)} values for {len(token_ids)} tokens"
    for position, value in enumerate(logps):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"{name}: value {position} is {value}; expected a finite number"
        if value > POSITIVE_TOLERANCE:
            return f"{name}: value {position} is {value:.6g}, above 0; expected log-probabilities in nats"
    return None


POSITIVE_TOLERANCE = 1e-3
"""Engines that compute in half precision report log-probabilities slightly above 0 for certain tokens."""


def text_key(text: Text) -> str:
    """Short stable identity of a text or conversation."""
    from regretless.store import fingerprint

    return fingerprint(text)[:16]


def write_refusals(path: Path, refusals: Sequence[Refusal]) -> None:
    """Write refused rows with file, line and reason as JSONL."""
    write_jsonl(path, [dataclasses.asdict(refusal) for refusal in refusals])
