r"""Why an answer that agrees with the gold answer is not called correct all the same: it can be read in another way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from regretless.labeling.grading.extraction import boxed, has_decimal_commas, listed_options
from regretless.labeling.grading.forms import TEXT_COMMAND, read_choice, read_state
from regretless.labeling.grading.marks import BOX, HASH, HEDGED, LABEL, NO_VALUE, STATEMENT, Phrase
from regretless.labeling.grading.notations import clean
from regretless.labeling.grading.numerals import equal_numbers, read_number
from regretless.labeling.grading.units import read_clock

APPROXIMATE = re.compile(
    r"(?:≈|\\approx(?![a-zA-Z])|(?i:\b(?:approximately|about|roughly|around|nearly))|约|大约|大概)[\s:$*]{0,4}$"
)
CHANGED_BEFORE = re.compile(
    r"(?i:\b(?:half\sof|twice|double|triple|root\sof|square\sof|cube\sof|(?:more|less|fewer|greater|larger|smaller)\sthan"
    r"|(?:percent|%)\sof|cannot\sbe|(?:minimum|maximum)\sof|close\sto|over|under|above|below))[\s:$*]{1,4}$|(?<![\w/~\"])(?:[<>≤≥]\s?|~)$"
)
CHANGED_BEHIND = re.compile(
    r"[\s$*]{0,4}(?:\?|[\u4e00-\u9fff]{0,3}(?:左右|多)|(?i:squared|cubed|factorial|(?:(?:percent|%)\s)?of\s\$?\d|(?:more|less|fewer)\sthan\s\$?(?:\d|[a-z]\b(?!\s))"
    r"|is\s(?:wrong|incorrect|not)\b|(?:if|minimum|maximum|at\s(?:most|least)|or\s(?:more|less|fewer|higher|lower)|and\ssomething)\b"
    r"|\((?:approx|roughly|about|estimated)[a-z.]*\)|\+(?!\s?[\da-z(\\])))"
)
UNSURE = re.compile(
    r"(?i:\b(?:not\s(?:entirely\s|quite\s|completely\s)?(?:sure|certain)|or\sso\b|or\smaybe|or\sperhaps|otherwise|depending\son"
    r"|my\sguess|something\slike))"
)
SLASH_PRODUCT = re.compile(
    r"(?<![\w.])(?:\d+|[a-z])\s?/\s?(?:\d+\s?|[a-z](?!m[²³]))(?:[a-zA-Z]|π|\\pi|\\sqrt|\()(?![a-zA-Z])"
)
COMMAND, LETTER, WORD = re.compile(r"\\[a-zA-Z]+"), re.compile("[a-zA-Z]"), re.compile("[a-zA-Z]{3}")
RATIO = re.compile(r"\d\s?:\s?\d")
FRACTION = re.compile(r"/|frac")
CASE = re.compile(r"If(?<!\wIf)\b[^.\n]{0,120}(?:\\boxed|\banswer\sis\b)")
COUNTED = re.compile(r"\d\s?(?:\\text\s?\{)?\s?[a-z]{3}")
TAKEN_BACK = Phrase(
    "i made|wait|scratch|let me",
    r"(?i:\b(?:i\smade\s(?:a|an)\s(?:mistake|error)|wait\b|scratch\sthat|let\sme\s(?:re|go\sthrough|check|try)))",
)
LIST_DASH = re.compile(r"\n\s*-\s\d")
OPEN_BOX = re.compile(r"\\boxed\{[^{}]*\Z")
BOXES_ALONE = re.compile(r"\\boxed\{([^{}]{1,80})\}[\s$\]\[\\()]*\\boxed\{([^{}]{1,80})\}[\s$.\]\\)]*\Z")
FIRST_NUMBER = re.compile(r"[\s:*$]{0,4}([-+]?\d[\d,]*(?:\.\d+)?)(?:[.\s]*(?=\n|$|#)|[.\s]+(?=[A-Z]))")
THREE_DIGITS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}[.,]\d{3}(?![\d.,])")
BETWEEN = re.compile(r"(?<!strictly )\bbetween\b")
MAX_TAIL = 200
"""Characters at the end of a response in which it may say that it is not sure."""
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


def _is_changed(response: str, gold: str, extracted: str) -> bool:
    """A number that a word before or behind it makes another one: half of 12, 12 squared."""
    start = response.rfind(extracted)
    if start < 0 or not re.search(r"(?:\d|%|percent)$", extracted):
        return False
    behind = response[start + len(extracted) : start + len(extracted) + MAX_CONTEXT]
    return (
        CHANGED_BEFORE.search(response[max(0, start - MAX_CONTEXT) : start]) is not None
        or CHANGED_BEHIND.match(behind) is not None
    )


def _are_two_boxes(response: str, gold: str, extracted: str) -> bool:
    boxes = BOXES_ALONE.search(response)
    return boxes is not None and boxes[1].strip() != boxes[2].strip() and len(BOX.findall(response)) == 2


def _contradicts_statement(response: str, gold: str, extracted: str) -> bool:
    """A box or marked line whose number is not the one that the sentence before it calls the answer."""
    boxes, hashes = boxed(response), list(HASH.finditer(response)) if "####" in response else []
    if boxes and hashes and (line := FIRST_NUMBER.match(response, hashes[-1].end())):
        number, other = read_number(clean(boxes)), read_number(clean(line[1]))
        return number is not None and other is not None and not equal_numbers(number, other)
    marks = [match.start() for match in (*hashes, *BOX.finditer(response))]
    statements = list(STATEMENT.finditer(response, 0, max(marks)))[-1:] if marks else []
    if not boxes and LABEL.search(response):
        statements += STATEMENT.finditer(response)
    stated = [match for one in statements if (match := FIRST_NUMBER.match(response, one.end()))]
    value = read_number(clean(extracted)) if stated else None
    others = [read_number(clean(one[1])) for one in stated]
    return value is not None and any(other is not None and not equal_numbers(value, other) for other in others)


def _is_taken_back(response: str, gold: str, extracted: str) -> bool:
    taken_back = list(TAKEN_BACK.finditer(response))[-1:]
    statements = list(STATEMENT.finditer(response)) if taken_back else []
    return bool(statements) and statements[-1].end() <= taken_back[0].start()


def _is_ratio(response: str, gold: str, extracted: str) -> bool:
    ratios = [RATIO.search(text) is not None for text in (gold, extracted)]
    return ratios[0] != ratios[1] and FRACTION.search(gold + extracted) is not None


def _has_other_case(response: str, gold: str, extracted: str) -> bool:
    """Letters that differ in case alone: for the algebra system M and m are one."""
    symbols = [COMMAND.sub(" ", TEXT_COMMAND.sub(" ", text)) for text in (gold, extracted)]
    letters = [set(LETTER.findall(text)) for text in symbols]
    if letters[0] == letters[1] or {one.lower() for one in letters[0]} != {one.lower() for one in letters[1]}:
        return False
    return not (WORD.search(symbols[0]) or read_choice(gold) or read_clock(gold))


def _is_another_option(response: str, gold: str, extracted: str) -> bool:
    """A letter with a value that the list of options has behind another letter."""
    choice = read_choice(clean(extracted))
    if choice is None or not choice.value or (option := listed_options(response).get(choice.letter)) is None:
        return False
    numbers = read_number(clean(choice.value)), read_number(clean(option))
    return numbers[0] is not None and numbers[1] is not None and not equal_numbers(numbers[1], numbers[0])


class Doubt(NamedTuple):
    """A reason, as a function of (response, gold, extracted), with a response and a gold answer that show it."""

    applies: Callable[[str, str, str], bool]
    example: str
    gold: str


DOUBTS: Mapping[str, Doubt] = {
    "hedged": Doubt(lambda response, gold, extracted: HEDGED.match(extracted) is not None, "At least 12 boxes.", "12"),
    "changed by a word": Doubt(_is_changed, "The answer is half of 12.", "12"),
    "approximate": Doubt(_is_rounded, "The answer is approximately 113.1.", r"36\pi"),
    "not sure": Doubt(
        lambda response, gold, extracted: UNSURE.search(response[-MAX_TAIL:]) is not None,
        "The answer is 40, but I am not sure.",
        "40",
    ),
    "may be read in two ways": Doubt(
        lambda response, gold, extracted: (
            (SLASH_PRODUCT.search(extracted) is None) != (SLASH_PRODUCT.search(gold) is None)
        ),
        "The answer is 1/2x.",
        r"\frac{1}{2x}",
    ),
    "dash or minus": Doubt(
        lambda response, gold, extracted: extracted.startswith("-") and LIST_DASH.search(response) is not None,
        "The answer is:↵- 8",
        "-8",
    ),
    "box is not closed": Doubt(
        lambda response, gold, extracted: OPEN_BOX.search(response) is not None, r"So it is \boxed{12", "12"
    ),
    "two cases": Doubt(
        lambda response, gold, extracted: len(CASE.findall(response)) > 1,
        "If Ann comes, the answer is 10. If she does not, the answer is 9.",
        "9",
    ),
    "cannot be determined": Doubt(
        lambda response, gold, extracted: (
            NO_VALUE.search(response) is not None and NO_VALUE.search(extracted) is None and read_state(gold) is None
        ),
        "It cannot be determined. If they are twins, it is 42.",
        "42",
    ),
    "ends of an interval": Doubt(
        lambda response, gold, extracted: (
            gold[:1] in "([" and BETWEEN.search(response[-MAX_TAIL:]) is not None and "(" not in extracted
        ),
        "The answer is that x lies between 2 and 5.",
        "(2, 5)",
    ),
    "two boxes": Doubt(_are_two_boxes, r"\boxed{6}↵\boxed{8}", "8"),
    "two answers": Doubt(_contradicts_statement, "The answer is 12.↵#### 13", "13"),
    "taken back": Doubt(_is_taken_back, "The answer is 20. Wait, maybe not.", "20"),
    "capital or small letters": Doubt(_has_other_case, r"\boxed{MV}", "mv"),
    "ratio or fraction": Doubt(_is_ratio, "The answer is 1:3.", r"\frac13"),
    "another option": Doubt(_is_another_option, "A) 8, B) 12. The answer is A) 12.", "A"),
    "comma of a decimal or of thousands": Doubt(
        lambda response, gold, extracted: THREE_DIGITS.search(extracted) is not None and has_decimal_commas(response),
        "Die Antwort ist 2.500.",
        "2.5",
    ),
    "percent or number": Doubt(
        lambda response, gold, extracted: "%" in extracted and "%" not in gold and COUNTED.search(gold) is not None,
        "The answer is 5%.",
        r"5 \text{ students}",
    ),
}
"""Asked of agreeing answers only."""


OF_THE_LAST = frozenset({"box is not closed", "two cases", "two boxes", "two answers", "taken back"})
"""Those about which answer of a response is its last: `math_any` takes any of them."""


def doubt(response: str, gold: str, extracted: str, *, any_counts: bool = False) -> str | None:
    """Why an answer that agrees with the gold one can be read in another way; None if it cannot.

    any_counts: it need not be the response's last answer.
    """
    for reason, one in DOUBTS.items():
        if not (any_counts and reason in OF_THE_LAST) and one.applies(response, gold, extracted):
            return reason
    return None
