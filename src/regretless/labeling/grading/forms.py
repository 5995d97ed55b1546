r"""Parses answers with several parts: lists, choices, equations, `\pm`. Input and parts are text."""

from __future__ import annotations

import re
from typing import NamedTuple

from regretless.labeling.grading.numerals import VARIABLE, read_number

MAX_ITEMS = 20
"""Longer lists remain one expression: comparing two lists takes time proportional to the product of their lengths."""
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")
CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s|选项)?\s?(?:\(\s?([A-Ja-j])\s?\)|([A-J])(?:[).:](?!\w*=)|$))\s*(.*)", re.DOTALL
)
SEPARATOR = re.compile(r",|;|、|\band\b|\bor\b|和|或|\\(?:lor|land|vee|wedge)(?![a-zA-Z])")
AND_OR = re.compile(r"\band\b|\bor\b|和|或|\\(?:lor|land|vee|wedge|cup|cap)(?![a-zA-Z])")
OR = re.compile(r"or|或|\\(?:lor|vee|cup)")
INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|l?t|gt|equiv|in)(?![a-zA-Z])")
THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
NAME = re.compile(r"(?:\\?[a-zA-Z](?:_\{?\w{1,9}\}?|'|\s?\(\s?[a-z]\s?\))?|[A-Za-z]{3,20}|\\[a-z]{2,7})\s*")
"""Left side of an equation that states a value: x, f(x), a_1, Area, \theta."""
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|±")
OPEN, CLOSE = "([{", ")]}"


class LetteredChoice(NamedTuple):
    """One of several options: its letter, and the text after the letter."""

    letter: str
    value: str


class Brackets(NamedTuple):
    """Items and their brackets; "" for a bare list and a set in braces, which have no order."""

    brackets: str
    items: list[str]
    is_set: bool = False
    """True if the brackets were braces: repeated items count once."""


def read_choice(text: str) -> LetteredChoice | None:
    r"""The choice that a cleaned text states: `B`, `(B)`, `B. 21`, `\textbf{(B)} 21`, "option B"; else None."""
    match = CHOICE.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip())
    return LetteredChoice((match[1] or match[2]).upper(), match[3].strip()) if match else None


def read_group(text: str) -> Brackets | None:
    r"""The list, pair, interval or set that a cleaned text states, also `3 \pm 2`; None for others or long lists."""
    if text.count("=") < 2 and read_number(stated_values(text)[-1]):
        return None  # x = 1,234
    text = TEXT_COMMAND.sub(r"\1", text).replace(r"\{", "{").replace(r"\}", "}").strip()
    brackets = ""
    if text and text[0] in OPEN and text[-1] in CLOSE and _closes_at_end(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    items = _split(text)
    if items is None or (brackets and len(items) < 2 and brackets != "{}") or len(items) > MAX_ITEMS:
        return None
    is_set = brackets == "{}"
    if brackets in ("", "{}"):
        items = [one for item in items for one in _both_signs(item)]
        brackets = ""
        if len(items) < 2:
            return None
    return Brackets(brackets, items, is_set)


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in OPEN) - (character in CLOSE)
        if depth == 0:
            return position == len(text) - 1
    return False


def _split(text: str) -> list[str] | None:
    """Parts between separators outside of all brackets; None if brackets do not match or a part is empty."""
    cuts, depth = [], 0
    separators = {match.start(): match.end() for match in SEPARATOR.finditer(text)}
    # "1,200, 300" has two items, "1,200" alone would be a number.
    if ", " in text:
        for match in THOUSANDS.finditer(text):
            separators.pop(match.start(), None)
    for position, character in enumerate(text):
        depth += (character in OPEN) - (character in CLOSE)
        if depth < 0:
            return None
        if depth == 0 and position in separators:
            cuts.append((position, separators[position]))
    if depth:
        return None
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    parts = [text[start:end].strip().strip("$").strip() for start, end in zip(starts, ends, strict=True)]
    # ", and" are two separators in a row.
    parts = [part for number, part in enumerate(parts) if part or number == len(parts) - 1]
    return parts if all(parts) else None


def _both_signs(item: str) -> list[str]:
    if len(PLUS_MINUS.findall(item)) != 1:
        return [item]
    upper, lower = PLUS_MINUS.sub("+", item).strip(), PLUS_MINUS.sub("-", item).strip()
    return [upper.removeprefix("+").strip(), lower]


def connective(text: str) -> str | None:
    """ "and" or "or" if the inequalities of an answer are joined by one of them alone; else None."""
    found = {"or" if OR.fullmatch(word) else "and" for word in AND_OR.findall(text)}
    return found.pop() if len(found) == 1 and INEQUALITY.search(text) else None


def sides(text: str) -> list[str]:
    """Sides of a chain of equations and approximations; the text itself if it is no chain, or has an inequality."""
    if INEQUALITY.search(text):
        return [text]
    return [side.strip() for side in re.split(r"=|≈|\\approx(?![a-zA-Z])", text)]


def stated_values(text: str) -> list[str]:
    """Values that an answer states: itself; for `x = 5` or `2 + 3 = 5` the last side; for `1/3 ≈ 0.33` both.

    An equation between two expressions, such as `y = 2x`, states itself as well as its last side if a name is left.
    """
    parts = sides(text)
    if len(parts) == 1 or not all(parts):
        return [text]
    if len(parts) == 2 and NAME.fullmatch(parts[1]) and read_number(parts[0]):  # 5 = x
        return parts[:1]
    approximate = [side.strip() for side in re.split(r"≈|\\approx(?![a-zA-Z])", text)]
    last_of_each = [sides(part)[-1] for part in approximate]
    if NAME.fullmatch(parts[0]) or not VARIABLE.search(TEXT_COMMAND.sub("", parts[0])):
        return last_of_each
    return [text]
