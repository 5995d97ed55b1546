"""Files of rows: parquet, JSONL, JSON and CSV, their column types, readers and writers."""

from __future__ import annotations

import csv
import itertools
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from regretless.core.errors import DataError
from regretless.core.files import atomic_path, json_line, parse_json, what_is_not_a_file
from regretless.core.text_cleaning import MAX_DEPTH, clean_text, is_too_deep, text_of, whole_row
from regretless.data.columns import COLUMN_TYPES, FLOATS, SIDES, TEXT, Pair, Response, Side, field_names
from regretless.data.messages import parts_of, stored_text
from regretless.data.rejected_rows import Refusal

TEXT_COLUMNS = ("prompt", *SIDES)
FILE_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Files that `read_rows` reads."""
JSON_LINES = frozenset({".jsonl", ".ndjson"})
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz")
"""Suffixes of compressed files and archives."""
LONGEST_ROW = 2**26
"""Most bytes of a row: the tokens of a million, with ids and log-probabilities, need about half of it."""
TOO_LONG = f"more than {LONGEST_ROW} bytes in one row"
STEPS = ("step_ends", "step_labels")
RARE = (
    *("token_bytes", "token_numbers", "top_logps", "top_logps_kind", "continuations", "source_row"),
    *("topic", "preference_probability", "answer_is_json", *STEPS),
)
"""Columns that a table has only where some row has a value; those of sides too."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half a character in JSON."""


def pair_row(pair: Pair) -> dict[str, Any]:
    """A pair as a row of a file: a side's text under the side's name, its other fields as `chosen_…`, `rejected_…`."""
    row: dict[str, Any] = {"prompt": pair.prompt, **dict.fromkeys(SIDES)}
    row |= {name: getattr(pair, name) for name in field_names(Pair) if name not in row}
    for side in SIDES:
        values = pair.sides.get(side)
        for name in field_names(Side):
            row[side if name == "text" else f"{side}_{name}"] = None if values is None else getattr(values, name)
    return row


def write_records(
    path: str | Path, records: Sequence[Response] | Sequence[Pair], metadata: Mapping[str, str] | None = None
) -> None:
    """Write records atomically: to .parquet (with metadata, if given), or as JSON lines to .jsonl or .ndjson.

    Raises DataError for another suffix, for responses among pairs, if a text column mixes strings and conversations
    (parquet columns have one type), and for NaN and infinity, which JSON does not have.
    """
    path = Path(path)
    if path.suffix not in {".parquet", *JSON_LINES}:
        raise DataError(f"{path}: expected a name that ends in .parquet, .jsonl or .ndjson")
    if len({isinstance(record, Pair) for record in records}) > 1:
        raise DataError(f"{path}: expected responses or pairs, got both; write them to two files")
    rows = [_stored(record) for record in records]
    if path.suffix in JSON_LINES:
        with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
            handle.writelines(_json_line(number, row) for number, row in enumerate(rows, 1))
        return
    names = [name for name in (rows[0] if rows else ()) if not _is_absent(name, rows)]
    texts = {name: stored_text if name in TEXT_COLUMNS else _unchanged for name in names}
    table = pa.table(
        {name: pa.array([texts[name](row[name]) for row in rows], column_type(name, rows)) for name in names}
    )
    write_parquet(path, table, metadata)


def write_parquet(path: Path, table: pa.Table, metadata: Mapping[str, str] | None = None) -> None:
    """Write a table atomically, with checksums so that a reader detects a damaged file, and with metadata if given."""
    if metadata is not None:
        table = table.replace_schema_metadata(dict(metadata))
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        pq.write_table(table, handle, compression="zstd", write_page_checksum=True)


def _unchanged(value: Any) -> Any:
    return value


def _json_line(number: int, row: Mapping[str, Any]) -> str:
    """A row as a line of a JSONL file. Raises DataError for numbers that JSON does not have."""
    entries = []
    for name, value in row.items():
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        except ValueError as error:
            raise DataError(f"record {number}: {name}: expected finite numbers, got NaN or infinity") from error
        entries.append(f'"{name}": {text}')
    return clean_text(f"{{{', '.join(entries)}}}\n")


def _plain(value: Any) -> Any:
    """The numbers of a NumPy scalar, an array or a tensor; any other value as text, bytes in base64."""
    return value.tolist() if hasattr(value, "tolist") else text_of(value)


def _is_absent(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if no row has a value in a column that few files have; `token_numbers` would have no type either."""
    return column.endswith(RARE) and not any(row[column] for row in rows)


def _stored(record: Response | Pair) -> dict[str, Any]:
    if isinstance(record, Pair):
        return pair_row(record)
    # Not dataclasses.asdict: it copies every token of every response.
    return {name: getattr(record, name) for name in field_names(Response)}


def column_type(column: str, rows: Sequence[Mapping[str, Any]]) -> pa.DataType:
    """Type of a column of records. Raises DataError if a text column mixes strings and conversations."""
    if column in TEXT_COLUMNS:
        kinds = {isinstance(row.get(column), str) for row in rows if row.get(column) is not None}
        if len(kinds) > 1:
            raise DataError(
                f"column {column}: some rows are strings and some are message lists; make them all one or the other"
            )
        if kinds == {True}:
            return pa.string()
        parts = parts_of([row.get(column) for row in rows])
        return pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", *parts)]))
    name = column.removeprefix("chosen_").removeprefix("rejected_")
    if name == "token_numbers":
        keys = sorted({key for row in rows for key in row.get(column) or ()})
        return pa.struct([(key, FLOATS) for key in keys]) if keys else pa.null()
    return COLUMN_TYPES.get(name, TEXT).stored


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    """Rows of a parquet, JSONL, JSON or CSV file with their 1-based line (or row) number; broken rows become refusals.

    Texts contain whole characters only (`text_cleaning.clean_text`). Raises DataError if the file is missing, of
    another kind, or broken as a whole.
    """
    check_is_file(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix in JSON_LINES:
        return _jsonl_rows(path)
    if path.suffix == ".json":
        return _json_rows(path)
    if path.suffix in (".csv", ".tsv"):
        return _csv_rows(path)
    remedy = "; unpack it first" if path.suffix in PACKED else "; convert it, for example with pandas"
    raise DataError(f"{path}: expected .parquet, .jsonl, .json or .csv, got {path.suffix or 'no suffix'}{remedy}")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    with path.open("rb") as handle:
        for number in itertools.count(1):
            line = handle.readline(LONGEST_ROW + 1)
            if not line:
                return
            if len(line) > LONGEST_ROW:
                while line and not line.endswith(b"\n"):
                    line = handle.readline(LONGEST_ROW)
                yield number, Refusal(str(path), number, TOO_LONG)
            elif line.strip():
                yield number, _parse_line(path, number, line.removeprefix(BOM_UTF8) if number == 1 else line)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any] | Refusal:
    try:
        text = line.decode()
        row = parse_json(text)
    except UnicodeDecodeError as error:
        return Refusal(str(path), number, f"not valid UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return Refusal(str(path), number, f"not valid JSON: {error}")
    return _object(path, number, row, text)


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    try:
        text = path.read_bytes().removeprefix(BOM_UTF8).decode()
        rows = parse_json(text)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}; one object a line belongs in a .jsonl file") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    half, long = SURROGATE.search(text) is not None, len(text) > LONGEST_ROW
    del text
    for number, row in enumerate(rows, 1):
        if long and len(json_line(row)) > LONGEST_ROW:
            yield number, Refusal(str(path), number, TOO_LONG)
        else:
            yield number, _object(path, number, row, "\\ud800" if half else "", always=True)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Refusal]]:
    """Rows of a table as text: every cell is a text, and an empty one is no value."""
    csv.field_size_limit(LONGEST_ROW)
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            names = next(reader, [])
            if len(set(names)) < len(names) or not all(name.strip() for name in names):
                raise DataError(
                    f"{path}: expected the columns' names in the first line, each once; got {', '.join(names)}"
                )
            number = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(names):
                    yield number, {name: cell or None for name, cell in zip(names, cells, strict=True)}
                elif cells:
                    reason = f"expected {len(names)} cells, as in the first line, got {len(cells)}"
                    yield number, Refusal(str(path), number, reason)
                number = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid CSV in UTF-8: {error}") from error


def _object(path: Path, number: int, row: Any, text: str, *, always: bool = False) -> dict[str, Any] | Refusal:
    """A row as parsed from `text`; `always`: the text does not limit how deep it is nested."""
    if not isinstance(row, dict):
        return Refusal(str(path), number, f"expected a JSON object, got {type(row).__name__}")
    if (always or text.count("[") + text.count("{") > MAX_DEPTH) and is_too_deep(row):
        return Refusal(str(path), number, f"nested deeper than {MAX_DEPTH} levels")
    try:
        return whole_row(row) if SURROGATE.search(text) is not None else row
    except ValueError as error:
        return Refusal(str(path), number, str(error), row)


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
    if batch.nbytes > LONGEST_ROW:
        return [_single_row(path, first + index, batch.slice(index, 1)) for index in range(len(batch))]
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError):  # texts that are not UTF-8, dates that Python does not have
        return [_single_row(path, first + index, batch.slice(index, 1)) for index in range(len(batch))]
    return rows


def _single_row(path: Path, number: int, batch: pa.RecordBatch) -> dict[str, Any] | Refusal:
    if batch.nbytes > LONGEST_ROW:
        return Refusal(str(path), number, TOO_LONG)
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
        files = sorted(file.name for file in path.iterdir() if file.suffix in FILE_SUFFIXES)
        inside = f" with {', '.join(files[:3])}{' and more' if len(files) > 3 else ''}; name one" if files else ""
        raise DataError(f"{path}: expected a file, found a folder{inside}")
    if kind := what_is_not_a_file(path):
        raise DataError(f"{path}: expected a file, found {kind}")
    if path.is_symlink():
        raise DataError(f"{path}: no such file: it is a link to {path.readlink()}, which does not exist")
    raise DataError(f"{path}: no such file")
