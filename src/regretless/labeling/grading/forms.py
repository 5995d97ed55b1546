r"""Parses answers with several parts: lists, choices, equations, `\pm`. Input and parts are text."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from regretless.labeling.grading.numerals import CACHED, VARIABLE, Numeral, read_number

MAX_ITEMS = 20
"""Longer lists remain one expression: comparing two lists takes time proportional to the product of their lengths."""
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|rm)\s?\{([^{}]*)\}")
CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s|选项)?\s?(?:\(\s?([A-Ja-j])\s?\)|([A-J])(?:[).:](?!\w*=)|$)|([a-j])\))\s*(.*)",
    re.DOTALL,
)
SEPARATOR = re.compile(r",|;|、|\band\b|\bor\b|和|或|\\(?:lor|land|vee|wedge)(?![a-zA-Z])")
AND_OR = re.compile(r"\band\b|\bor\b|和|或|\\(?:lor|land|vee|wedge|cup|cap)(?![a-zA-Z])")
OR = re.compile(r"or|或|\\(?:lor|vee|cup)")
INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|l?t|gt|equiv|in)(?![a-zA-Z])")
THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
NAME = re.compile(
    r"(?:\([a-z](?:_\d)?(?:,\s?[a-z](?:_\d)?){1,3}\)|\\?[a-zA-Z](?:\^\{-1\})?(?:_\{?\w{1,9}\}?|'|\s?\(\s?[-\w,\s]{1,12}\))?|[A-Za-z]{3,20}|\\[a-z]{2,7})\s*"
)
"""Left side of an equation that states a value: x, f(x), a_1, Area, \theta."""
APPROXIMATELY = re.compile(r"≈|\\approx(?![a-zA-Z])")
EQUALITY = re.compile(rf"=|{APPROXIMATELY.pattern}")
BOUND = re.compile(r"\\(?:sum|int|prod|lim)(?![a-zA-Z])")
"""Letters on the left side are bound: `\\lim_{n\\to\\infty} \\frac1n = 0` states 0."""
MEMBER = re.compile(rf"{NAME.pattern}(?:\\in(?![a-zA-Z])|∈)\s*")
"""`x \\in` before a set, which states the set."""
STATING = re.compile(r"[=≈∈\\]")
"""What a text has that states another one: a quick test."""
PAIRED = {
    "range": re.compile(r"(?:from\s)?(.{1,40}?)\s?(?:\bto\b|\bthrough\b|–|—|-)\s?([^\s-].{0,40})"),
    "remainder": re.compile(
        r"(.{1,40}?)\s?(?:,?\s(?:with\s)?(?:an?\s)?remainder(?:\sof)?|\b[Rr](?:em)?\.?(?![a-z]))\s?=?\s?(.{1,40})"
    ),
    "ratio": re.compile(r"(.{1,40}?)\s?:\s?(.{1,40})"),
}
"""Answers of two numbers that are neither a list nor a calculation."""
TRUTH = re.compile(r"(?i:\b(not\s)?(yes|no|true|false|oui|non|vrai|faux|ja|nein|wahr|falsch)\b)|(不)?(是|否|对|错)")
NEGATIVE_WORDS = {"no", "false", "non", "faux", "nein", "falsch", "否", "错"}
MAX_TRUTH = 100
"""Longest text (characters) that says yes or no."""
STATES = {
    "no solution": re.compile(
        r"\\emptyset|\\\{\s?\\\}|(?i:empty\sset|\bno\s(?:real\s|such\s|possible\s|integer\s)?(?:solutions?|values?|numbers?)\b)|无解"
    ),
    "undetermined": re.compile(
        r"(?i:(?:can\s?not|can't|could\snot|impossible\sto)\s(?:be\s)?(?:determined?|tell|say|known?)|undetermined"
        r"|not\senough\sinformation|insufficient\s(?:information|data))|无法确定"
    ),
    "infinitely many": re.compile(
        r"(?i:infinitely\smany|infinite\s(?:number\sof\s)?solutions|an\sinfinite\snumber)|无数|无穷多"
    ),
    "divergent": re.compile(r"(?i:\bdiverge(?:s|nt)\b)|发散"),
    "convergent": re.compile(r"(?i:\bconverge(?:s|nt)\b)|收敛"),
    "undefined": re.compile(r"(?i:\bundefined|(?:does\snot|doesn't)\sexist|\bDNE\b|\bnot\sdefined)|不存在"),
}
"""What an answer may say in place of a value."""
MAX_STATE = 60
"""Longest gold answer (characters) that says one of them."""
UNIT_VECTOR = re.compile(
    r"\\(?:mathbf|hat|vec|boldsymbol|bm|widehat|overrightarrow)\s?\{?\s?(?:\\(?:mathbf|hat|boldsymbol|bm)\s?\{?\s?)?"
    r"\\?([ijk])(?:math)?(?![a-zA-Z])\s?\}{0,2}"
)
TERM = re.compile(
    r"\s*([-+]?)\s*(\d{1,9}(?:\.\d{1,9})?|\d{0,9}\\frac\s?\{[^{}]{1,20}\}\s?\{[^{}]{1,20}\}|\(?[^-+()]{0,30}?\)?)\s*([ijk])"
)
LETTER_LIST = re.compile(r"\(?[A-J]\)?(?:\s?(?:[,;、&]|,?\s?(?:and|和))\s?\(?[A-J]\)?)+")
CONGRUENCE = re.compile(r"(.{1,40}?)\s*\\equiv\s*(-?\d{1,9})\s*\(?\s*\\?[pb]?mod\s?\{?\s?(\d{1,9})\s?\}?\)?")
CHAIN = re.compile(r"(\\[lg]eq?(?:slant)?(?![a-zA-Z])|[<>≤≥]=?)")
RELATIONS = {
    r"\le": "<=",
    r"\leq": "<=",
    r"\leqslant": "<=",
    r"\ge": ">=",
    r"\geq": ">=",
    r"\geqslant": ">=",
    "≤": "<=",
    "≥": ">=",
}
CASES = re.compile(r"\\begin\{cases\}(.{1,400}?)\\end\{cases\}", re.DOTALL)
ROW = re.compile(
    r"([^&]{1,100}?),?\s*(?:&|\\text\s?\{)\s*,?\s*(?:\\text\s?\{)?\s?(?:if|when|for)?\s?\}?\s*([^&]{1,100})", re.DOTALL
)
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


@lru_cache(CACHED)
def read_choice(text: str) -> LetteredChoice | None:
    r"""The choice that a cleaned text states: `B`, `(B)`, `B. 21`, `\textbf{(B)} 21`, "option B"; else None."""
    match = CHOICE.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip())
    if match is None or SEPARATOR.match(match[4]):  # (B) or (C)
        return None
    return LetteredChoice((match[1] or match[2] or match[3]).upper(), match[4].strip())


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


def by_name(group: Brackets) -> list[str] | None:
    """The values of a bare list of equations whose names are in the order of the alphabet: `x = 3, y = 4`."""
    pairs = [[side.strip(" $") for side in item.split("=")] for item in group.items]
    if group.brackets or not all(len(pair) == 2 and re.fullmatch("[a-z]", pair[0]) for pair in pairs):
        return None
    names = [pair[0] for pair in pairs]
    return [pair[1] for pair in pairs] if names == sorted(set(names)) else None


def said(text: str) -> bool | None:
    """True for yes and true, False for no, false and "not true", None for texts that say neither, or both."""
    words = TRUTH.findall(text) if len(text) <= MAX_TRUTH else []
    values = {((word or sign).lower() in NEGATIVE_WORDS) == bool(no or not_) for no, word, not_, sign in words}
    return values.pop() if len(values) == 1 else None


@lru_cache(CACHED)
def is_truth(text: str) -> bool:
    """True for a gold answer that is yes, no, true or false, and nothing else."""
    return TRUTH.fullmatch(TEXT_COMMAND.sub(r"\1", text).strip(" .$")) is not None


def read_state(text: str) -> str | None:
    """What an answer says in place of a value, such as "no solution"; None if it states a value, or several of them."""
    states = {name for name, pattern in STATES.items() if pattern.search(text)}
    return states.pop() if len(states) == 1 else None


def read_vector(text: str) -> str | None:
    r"""The row `(2, -1, 4)` that `2\mathbf{i} - \mathbf{j} + 4\mathbf{k}` or `2i - j + 4k` states; None for others."""
    marked = UNIT_VECTOR.sub(r" \1", text)
    parts, position = dict.fromkeys("ijk", "0"), 0
    while position < len(marked):
        term = TERM.match(marked, position)
        if term is None or parts[term[3]] != "0" or (position and not term[1]):
            return None
        parts[term[3]] = term[1].strip("+") + (term[2].strip() or "1")
        position = term.end()
    return f"({parts['i']}, {parts['j']}, {parts['k']})" if position else None


def read_letters(text: str) -> list[str] | None:
    """The letters of several options: `A, C and D`, `ACD`; None for others."""
    text = TEXT_COMMAND.sub(r"\1", text).strip()
    letters = re.findall("[A-J]", text)
    is_run = text == "".join(letters) and letters == sorted(set(letters))
    is_list = LETTER_LIST.fullmatch(text) is not None
    return letters if len(letters) > 1 and (is_run or is_list) else None


def read_congruence(text: str) -> tuple[str, int, int] | None:
    r"""Letter, remainder and modulus of `x \equiv -3 \pmod 8`; None for others."""
    match = CONGRUENCE.fullmatch(text.strip())
    return (match[1], int(match[2]) % int(match[3]), int(match[3])) if match and int(match[3]) else None


def read_chain(text: str) -> list[str] | None:
    r"""Sides and signs of a chain of inequalities in ascending order: `c > b > a` is a, <, b, <, c; None for others."""
    parts = [part.strip() for part in CHAIN.split(text)]
    signs = [RELATIONS.get(part, part) for part in parts[1::2]]
    if not signs or not all(parts[::2]) or any(sign[0] != signs[0][0] for sign in signs):
        return None
    parts[1::2] = signs
    return parts if signs[0][0] == "<" else [part.replace(">", "<") for part in reversed(parts)]


def read_cases(text: str) -> list[tuple[str, str]] | None:
    r"""Values and conditions of `\begin{cases} … \end{cases}`; None for others."""
    match = CASES.search(text)
    rows = [ROW.fullmatch(row.strip()) for row in re.split(r"\\\\", match[1]) if row.strip()] if match else []
    return [(row[1].strip(" ,"), row[2].strip(" .,")) for row in rows if row] if rows and all(rows) else None


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
    """Sides of a chain of equations and approximations; the text itself if it is no chain, or has an inequality.

    Signs in brackets, as in a sum's subscript `{k=1}`, belong to their side.
    """
    if INEQUALITY.search(text):
        return [text]
    return cut_outside_brackets(text, EQUALITY)


def cut_outside_brackets(text: str, sign: re.Pattern[str]) -> list[str]:
    """Parts of a text between signs that stand outside of all brackets; between all signs if brackets do not match."""
    cuts = [match.span() for match in sign.finditer(text)]
    if cuts and any(character in OPEN for character in text):
        depth = _depths(text)
        cuts = [cut for cut in cuts if depth[cut[0]] == 0] if depth[-1] == 0 else cuts
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _depths(text: str) -> list[int]:
    """Before each character, and at the end: how many brackets are open."""
    return [0, *accumulate((character in OPEN) - (character in CLOSE) for character in text)]


def stated_values(text: str) -> list[str]:
    """Values that an answer states: itself; for `x = 5` or `2 + 3 = 5` the last side; for `1/3 ≈ 0.33` both.

    An equation between two expressions, such as `y = 2x`, states itself as well as its last side if a name is left.
    """
    if not STATING.search(text):
        return [text]
    if (member := MEMBER.match(text)) and not INEQUALITY.search(text, member.end()):
        return [text[member.end() :].strip()]
    parts = sides(text)
    if len(parts) == 1 or not all(parts) or len(set(parts)) == 1:  # 0 = 0 states nothing
        return [text]
    if len(parts) == 2 and NAME.fullmatch(parts[1]) and read_number(parts[0]):  # 5 = x
        return parts[:1]
    last_of_each = [sides(part)[-1] for part in cut_outside_brackets(text, APPROXIMATELY)]
    letters = set(VARIABLE.findall(TEXT_COMMAND.sub("", parts[0]))) - {"i", "e"}
    if NAME.fullmatch(parts[0]) or BOUND.match(parts[0]) or not letters:
        return last_of_each
    return [text]


def read_paired(text: str) -> tuple[str, Numeral, Numeral] | None:
    """Name and numbers of a range (`10 to 15`), a quotient with remainder (`5 R 2`) or a ratio (`3:4`); else None."""
    text = " ".join(TEXT_COMMAND.sub(r" \1 ", text).split())
    if not text[:1].isdigit() and not text.startswith("from"):
        return None
    for name, pattern in PAIRED.items():
        if match := pattern.fullmatch(text):
            numbers = read_number(match[1].strip()), read_number(match[2].strip())
            if numbers[0] and numbers[1]:
                return name, numbers[0], numbers[1]
    return None
