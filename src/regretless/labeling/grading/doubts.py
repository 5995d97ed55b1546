r"""Why an answer that agrees with the gold answer is not called correct all the same: it can be read in another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from regretless.labeling.grading.forms import TEXT_COMMAND
from regretless.labeling.grading.marks import BOX, HASH, HEDGED, STATEMENT
from regretless.labeling.grading.numerals import VARIABLE, clean, equal_numbers, read_number

APPROXIMATE = re.compile(
    r"(?:≈|\\approx(?![a-zA-Z])|(?i:\b(?:approximately|about|roughly|around|nearly))|约|大约|大概)[\s:$*]{0,4}$"
)
UNSURE = re.compile(
    r"(?i:\b(?:not\s(?:entirely\s|quite\s|completely\s)?(?:sure|certain)|or\sso\b|or\smaybe|or\sperhaps|otherwise|depending\son))"
)
SLASH_PRODUCT = re.compile(r"(?<![\w.])(?:\d+|[a-z])\s?/\s?(?:\d+\s?|[a-z])(?:[a-zA-Z]|π|\\pi|\\sqrt|\()(?![a-zA-Z])")
RATIO = re.compile(r"\d\s?:\s?\d")
FRACTION = re.compile(r"/|frac")
COUNTED = re.compile(r"\d\s?(?:\\text\s?\{)?\s?[a-z]{3}")
TAKEN_BACK = re.compile(
    r"(?i:\b(?:i\smade\s(?:a|an)\s(?:mistake|error)|wait\b|scratch\sthat|let\sme\s(?:re|go\sthrough|check|try)))"
)
LIST_DASH = re.compile(r"\n\s*-\s\d")
OPEN_BOX = re.compile(r"\\boxed\{[^{}]*\Z")
BOXES_ALONE = re.compile(r"\\boxed\{([^{}]{1,80})\}[\s$\]\[\\()]*\\boxed\{([^{}]{1,80})\}[\s$.\]\\)]*\Z")
FIRST_NUMBER = re.compile(r"[\s:*$]{0,4}([-+]?\d[\d,]*(?:\.\d+)?)[.\s]*(?=\n|$|#)")
MAX_CONTEXT = 40
"""Characters before an answer in which a word may qualify it."""


def _is_rounded(response: str, gold: str, extracted: str) -> bool:
    """A decimal that is called approximate, for an exact value."""
    start = response.rfind(extracted.split(" ", maxsplit=1)[0])
    if start < 0 or "." not in extracted or "." in gold:
        return False
    number = read_number(clean(gold))
    is_integer = number is not None and number.value.denominator == 1
    return not is_integer and APPROXIMATE.search(response[max(0, start - MAX_CONTEXT) : start]) is not None


def _are_two_boxes(response: str, gold: str, extracted: str) -> bool:
    boxes = BOXES_ALONE.search(response)
    return boxes is not None and boxes[1].strip() != boxes[2].strip() and len(BOX.findall(response)) == 2


def _contradicts_statement(response: str, gold: str, extracted: str) -> bool:
    """A box or marked line whose number is not the one that the sentence before it calls the answer."""
    marks = [match.start() for mark in (HASH, BOX) for match in mark.finditer(response)]
    statements = list(STATEMENT.finditer(response, 0, max(marks))) if marks else []
    stated = FIRST_NUMBER.match(response, statements[-1].end()) if statements else None
    numbers = read_number(clean(stated[1])) if stated else None, read_number(clean(extracted))
    return numbers[0] is not None and numbers[1] is not None and not equal_numbers(numbers[1], numbers[0])


def _is_taken_back(response: str, gold: str, extracted: str) -> bool:
    statements = list(STATEMENT.finditer(response))
    return bool(statements) and TAKEN_BACK.search(response, statements[-1].end()) is not None


def _has_other_case(response: str, gold: str, extracted: str) -> bool:
    """Letters that differ in case alone: for the algebra system M and m are one."""
    letters = [set(VARIABLE.findall(TEXT_COMMAND.sub("", text))) for text in (gold, extracted)]
    return letters[0] != letters[1] and {one.lower() for one in letters[0]} == {one.lower() for one in letters[1]}


DOUBTS: Mapping[str, Callable[[str, str, str], bool]] = {
    "hedged": lambda response, gold, extracted: HEDGED.match(extracted) is not None,
    "approximate": _is_rounded,
    "not sure": lambda response, gold, extracted: UNSURE.search(response[-200:]) is not None,
    "may be read in two ways": lambda response, gold, extracted: (
        (SLASH_PRODUCT.search(extracted) is None) != (SLASH_PRODUCT.search(gold) is None)
    ),
    "dash or minus": lambda response, gold, extracted: (
        extracted.startswith("-") and LIST_DASH.search(response) is not None
    ),
    "box is not closed": lambda response, gold, extracted: OPEN_BOX.search(response) is not None,
    "two boxes": _are_two_boxes,
    "two answers": _contradicts_statement,
    "taken back": _is_taken_back,
    "capital or small letters": _has_other_case,
    "ratio or fraction": lambda response, gold, extracted: (
        (RATIO.search(extracted) is None) != (RATIO.search(gold) is None)
        and FRACTION.search(gold + extracted) is not None
    ),
    "percent or number": lambda response, gold, extracted: (
        "%" in extracted and "%" not in gold and COUNTED.search(gold) is not None
    ),
}
"""Reasons, and functions of (response, gold, extracted): does it apply? Asked of agreeing answers only."""


def doubt(response: str, gold: str, extracted: str) -> str | None:
    """Why an answer that agrees with the gold one can be read in another way; None if it cannot."""
    return next((reason for reason, applies in DOUBTS.items() if applies(response, gold, extracted)), None)
