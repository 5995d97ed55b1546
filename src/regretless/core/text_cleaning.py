"""Text filters: input becomes text that any file can store, output becomes text that cannot control a terminal."""

from __future__ import annotations

import base64
import io
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of lists and objects in a row. Python's own limits differ between its versions."""
MOST_DIGITS = 4300
"""Most digits of an integer that Python converts to text."""
_LONE = re.compile("[\ud800-\udfff]")
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean_text(text: str) -> str:
    """The text with surrogate halves joined where both are present, and replaced by U+FFFD where one is missing.

    JSON can contain half a character (`"\\ud800"`), and no UTF-8 file, parquet column or tokenizer can hold it. All
    other characters stay, including NUL and control characters: they are text, and tokens stand for them.
    """
    if is_clean(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_clean(text: str) -> bool:
    """True if any file can store the text: it has no surrogates."""
    # An ASCII string contains none, which Python knows without a scan.
    return text.isascii() or _LONE.search(text) is None


def whole_text(text: str) -> str:
    """The text with surrogate halves joined where both are present. Raises ValueError where one is missing."""
    if is_clean(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    if half := _LONE.search(joined):
        raise ValueError(f"half of a surrogate pair, {half[0]!r}, which no file can store")
    return joined


def whole_value(value: Any) -> Any:
    """`whole_text` of every text, including keys, in a value that is not too deep."""
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        return {whole_value(key): whole_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_value(item) for item in value]
    return value


def whole_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row with `whole_text` of every text; lists of numbers are not scanned.

    Raises ValueError if half of a character is missing, or a column is nested deeper than `MAX_DEPTH`.
    """
    return {whole_text(str(name)): _whole_column(clean_text(str(name)), value) for name, value in row.items()}


def _whole_column(name: str, value: Any) -> Any:
    nested = isinstance(value, Mapping) or (isinstance(value, list | tuple) and not _is_number(value[:1]))
    if nested and is_too_deep(value):
        raise ValueError(f"{name}: nested deeper than {MAX_DEPTH} levels")
    try:
        return whole_value(value) if nested or isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_number(first: Sequence[Any]) -> bool:
    return len(first) == 1 and isinstance(first[0], int | float)


def json_value(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The value in a form that JSON can hold, for records of rejected rows.

    Numbers without a JSON form (NaN, infinity) and other values become texts; what is too deep is cut off.
    """
    if isinstance(value, Mapping | list | tuple) and depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {clean_text(str(key)): json_value(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, depth - 1) for item in value]
    if isinstance(value, int) and value.bit_length() > 3 * MOST_DIGITS:
        return f"integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return clean_text(text_of(value))


def text_of(value: Any) -> str:
    """A value that JSON has no form for as text: bytes in base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def without_nan(value: Any) -> Any:
    """The value with null for every NaN and infinity, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return value


def is_too_deep(value: Any) -> bool:
    """True if lists and mappings are nested deeper than `MAX_DEPTH`; does not look further."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, Mapping | list | tuple)
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(item, Mapping | list | tuple)
        ]
        if not level:
            return False
    return True


def printable(text: str) -> str:
    """The text for a terminal: characters that would control it, or hide or reverse text, as escapes such as `\\x1b`.

    Line breaks and tabs stay. Bytes of a file name that are not UTF-8 are shown as bytes.
    """
    return text if text.isascii() and text.isprintable() else _HIDDEN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if 0xDC80 <= number <= 0xDCFF:  # Python's placeholder for a byte of a file name
        return f"\\x{number - 0xDC00:02x}"
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def one_line(text: str) -> str:
    """`printable` with line breaks as escapes too, so that text from a row cannot look like a line of its own."""
    return printable(text).replace("\n", "\\n").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def never_fail_to_print() -> None:
    """Print characters that the encoding of standard output or error lacks as escapes (\\u2265 for ≥), without errors.

    For programs to call at their start: a terminal's encoding must not cost hours of work.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
