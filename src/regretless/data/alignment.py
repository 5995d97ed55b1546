"""Log-probabilities for a policy with another tokenizer: sums over the spans between bytes where tokens of both end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from regretless.core.errors import DataError
from regretless.data.codec import CUT_CHARACTER

BYTES_OF_CHARACTER = 4
"""The most in UTF-8."""


def common_units(writer: Sequence[int], reader: Sequence[int]) -> tuple[list[int], list[int]]:
    """The number of each token's unit, from 0, in two tokenizations of one text: the writer's and the policy's.

    writer, reader: bytes that each token adds to the text. A unit ends with every byte where tokens of both end. Tokens
    of 0 bytes belong to the unit behind them; those at the end, which close the response, are a unit of their own.
    Raises DataError unless both have equally many bytes, and both or none close the response.
    """
    if sum(writer) != sum(reader):
        raise DataError(f"token_bytes: {sum(writer)} bytes, where the policy's tokens have {sum(reader)}")
    common = sorted(set(accumulate(writer)) & set(accumulate(reader)) - {0})
    units = [
        [bisect_right(common, end - own) for end, own in zip(accumulate(of), of, strict=True)]
        for of in (writer, reader)
    ]
    if {*units[0]} != {*units[1]}:
        raise DataError("token_bytes: only one of the two tokenizations closes the response with an end token")
    return units[0], units[1]


def sums_at_ends(values: Sequence[float], units: Sequence[int], others: Sequence[int]) -> list[float]:
    """Sums of values over units, each at the unit's last token of another tokenization and 0 at the others before it.

    values: one for each token, of the units `units`; others: the units of the other tokens, as by `common_units`.
    """
    sums = [0.0] * (max(units, default=-1) + 1)
    for value, unit in zip(values, units, strict=True):
        sums[unit] += value
    return [sums[unit] if unit != behind else 0.0 for unit, behind in zip(others, [*others[1:], -1], strict=True)]


def behind_space(lengths: Sequence[int], text: str) -> list[int]:
    """Bytes of tokens without those of the spaces that their text begins with, which tokenizers treat differently."""
    spare, left = len(text) - len(text.lstrip(" ")), []
    for length in lengths:
        left.append(max(0, length - spare))
        spare = max(0, spare - length)
    return left


def within_text(lengths: Sequence[int], text: str, *, cut: bool, longest: int) -> tuple[int, str]:
    """How many tokens, of so many bytes each, lie within a text, and the text that they write.

    cut: the text is the beginning of a response, so that the last token may be one of both that the other lacks: one of
    a part of a character, or (up to `longest` characters) the one within which a stop string began.
    Raises DataError if the bytes are not those of the text.
    """
    data = (text.rstrip(CUT_CHARACTER) if cut else text).encode()
    total = sum(lengths)
    if total == len(data):
        return len(lengths), data.decode()
    if cut and -longest < total - len(data) < BYTES_OF_CHARACTER:
        ends = list(accumulate(lengths))
        for count in range(len(ends), 0, -1):
            if (end := ends[count - 1]) <= len(data) and _is_between_characters(data, end):
                return count, data[:end].decode()
    raise DataError(f"token_bytes: {total} bytes, where the text has {len(data)}")


def _is_between_characters(data: bytes, place: int) -> bool:
    return place == len(data) or data[place] & 0xC0 != 0x80
