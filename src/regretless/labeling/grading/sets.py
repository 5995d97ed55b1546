r"""Sets of real numbers: intervals, unions, differences, inequalities and descriptions, as sympy's sets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from regretless.labeling.grading.forms import TEXT_COMMAND, cut_outside_brackets

SIGN = re.compile(
    r"\\(?:cup|cap|setminus|backslash|mathbb|mid|infty|[lg]eq?|neq?|lor|vee|land|wedge)(?![a-zA-Z])|[<>]"
    r"|\bor\b|\bexcept\b|\||\b(?:all|every|any)\s"
)
"""What an answer has that may be a set and is no list."""
UNION = re.compile(r"\\(?:cup|lor|vee)(?![a-zA-Z])|\bor\b")
INTERSECTION = re.compile(r"\\(?:cap|land|wedge)(?![a-zA-Z])|\band\b")
DIFFERENCE = re.compile(r"\\(?:setminus|backslash)(?![a-zA-Z])|\bexcept(?:\sfor)?\b")
_ALL = (
    r"(?i:(?:all|every|any)\s(?:real\s)?(?:numbers?|reals?|values)(?:\sof)?(?:\s[a-z])?)"
    r"\s(?:(?:such\s)?that\s(?:are\s)?|with\s|where\s)?"
)
COMPARED = {
    r"(?:strictly\s)?(?:greater|larger|more)\sthan": ">",
    r"(?:strictly\s)?(?:less|smaller|fewer)\sthan": "<",
    r"at\sleast|(?:greater|larger|more)\sthan\sor\sequal\sto": r"\ge",
    r"at\smost|(?:less|smaller)\sthan\sor\sequal\sto": r"\le",
}
IN_WORDS = [
    (re.compile(rf"{_ALL}strictly\sbetween\s(.{{1,40}}?)\sand\s(.{{1,40}}?)"), r"\1 < x < \2"),
    *(
        (re.compile(rf"{_ALL}(?:{words})\s(\S.{{0,20}})"), rf"x {re.escape(sign)} \1")
        for words, sign in COMPARED.items()
    ),
    (re.compile(rf"{_ALL}(?=.*[<>\\])(?!except)(.{{3,60}})"), r"\1"),
]
"""Sets in words, and the inequality that each is."""
REALS = re.compile(
    r"\\mathbb\s?\{?R\}?|(?i:(?:all|any|every)(?=\s)(?:\sreal)?(?:\s(?:numbers?|reals?|values?))?(?:\sof)?(?:\s[a-z])?)"
)
BUILDER = re.compile(r"\\?\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s?\{?R\}?\s*)?(?::|\\mid|\\vert|\|)\s*(.{1,100}?)\s*\\?\}")
MEMBER = re.compile(r"[a-z]\s*\\in(?![a-zA-Z])\s*")
Parse = Callable[[str], Any]


def read_set(text: str, parse: Parse) -> Any | None:
    """The set of real numbers that a cleaned answer states; None if it is none. `parse` reads an expression."""
    from sympy import Complement, Intersection, S, Union  # type: ignore[import-untyped]

    text = TEXT_COMMAND.sub(r" \1 ", text).strip()
    for pattern, inequality in IN_WORDS:
        if words := pattern.fullmatch(text):
            text = words.expand(inequality)
            break
    text = MEMBER.sub("", text, count=1) if MEMBER.match(text) else text
    for separator, join in ((UNION, Union), (INTERSECTION, Intersection), (DIFFERENCE, Complement)):
        parts = cut_outside_brackets(text, separator)
        if len(parts) > 1:
            sets = [read_set(part, parse) or _points(part, parse) for part in parts]
            if any(one is None for one in sets):
                return None
            return Complement(sets[0], Union(*sets[1:])) if join is Complement else join(*sets)
    if REALS.fullmatch(text):
        return S.Reals
    if builder := BUILDER.fullmatch(text):
        return _as_set(parse(builder[2]))
    return _as_set(parse(text))


def _points(text: str, parse: Parse) -> Any | None:
    """The set of numbers without braces, as behind "except"."""
    from sympy import Expr, FiniteSet

    values = [parse(part.partition("=")[2] or part) for part in re.split(r",|\band\b", text)]
    return FiniteSet(*values) if values and all(isinstance(one, Expr) and one.is_number for one in values) else None


def _as_set(value: Any) -> Any | None:
    from sympy import And, Equality, FiniteSet, Interval, Set, Tuple
    from sympy.core.relational import Relational  # type: ignore[import-untyped]

    if isinstance(value, FiniteSet) and any(isinstance(one, Relational) for one in value):
        return None
    if isinstance(value, Set):
        return value
    if isinstance(value, Tuple) and len(value) == 2 and all(one.is_extended_real for one in value):
        return Interval.open(*value)
    if isinstance(value, Equality) and isinstance(value.rhs, Set):
        return value.rhs
    if isinstance(value, Relational | And) and len(value.free_symbols) == 1:
        return value.as_set()
    return None


def equal_sets(one: Any, other: Any) -> bool:
    """True if two sets have the same members."""
    return bool(one == other or (one.is_subset(other) and other.is_subset(one)))
