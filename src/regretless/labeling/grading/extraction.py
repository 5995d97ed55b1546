r"""Extraction of the answer from a response or a worked solution.

Tried in this order: the last `\boxed{}`; the last marked line (GSM8K's `#### x`, `Answer: x`, `<answer>x</answer>`);
the last "the answer is x"; and finally the last formula or number of the text. All repeats in the patterns are
bounded, so that adversarial text costs linear time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from regretless.data.messages import CLOSE, OPEN
from regretless.labeling.grading.dates import DATE
from regretless.labeling.grading.forms import INEQUALITY, OR, STATES, TEXT_COMMAND, stated_values
from regretless.labeling.grading.marks import (
    BOLD,
    BOX,
    CHOSEN,
    CORRECTED,
    CORRECTION,
    END_OF_TURN,
    HASH,
    HEDGE_BEFORE,
    HEDGED,
    LABEL,
    NEXT_PROBLEM,
    ONLY,
    PLAN,
    STATEMENT,
    TAG,
    UNFINISHED,
)
from regretless.labeling.grading.notations import SCALE_LETTERS, clean, join_digits, plain_text
from regretless.labeling.grading.numerals import (
    CACHED,
    GROUPED,
    LARGE,
    PART,
    SCALES,
    UNDER_1000,
    UNIT_LETTERS,
    VARIABLE,
    read_number,
)
from regretless.labeling.grading.units import UNIT, unit_of

MAX_BOXES = 20
"""Boxes examined, from the end: enough for any answer, and a bound on the work for a text full of boxes."""
MAX_TAIL = 1000
"""Characters after "the answer is" within which the answer must begin."""
TOKEN_REST = re.compile(r"[\w.,]{0,20000}")
"""Extra characters of a tail, so that it does not end inside a number."""
BARE_BOX = re.compile(r"[^\s$.,;\\]{0,80}")
LINK = re.compile(r"(?:,|;|、|&|and|or|und|oder|et|ou|y|和|或|及){1,3}(?:[a-zA-Z]\w{0,8}(?:\(\w\))?=|[A-Z])?")
LINK_NOISE = re.compile(r"\s|\$|\\[()\[\],;!]|\\text\{|\}|\\q?quad|\.|\*\*")

LEAD = re.compile(
    r"(?i:(?:therefore|thus|hence|so|simply|just|only|exactly|approximately|about|roughly|around|nearly|probably|likely"
    r"|given by|equal to|as follows|either|indeed|then|clearly|now|also|still|that is|i\.e\.|option|choice|number"
    r"|letter|a total of)\b|约为|约|大约|大概|(?:一共|总共|共)有?|选项|选)[\s,:]{0,3}"
)
OPENING = re.compile(r"[\s*_:=>#`\"'】~]{0,40}")
NO_ANSWER = re.compile(
    r"(?i:correct|right|wrong|incorrect|clear|obvious|as follows|below|above|not|found|given|in\b|yes it|this|that|what"
    r"|how|obtained|simple|shown|unique|valid|consistent|reasonable|verified|confirmed|accurate|the same|it\b|them\b)"
)
"""Continuation of a sentence that mentions an answer without stating one."""
BREAK = re.compile(r"(?i:,|;|:|\s(?:because|since|as|so|which|where|when|for)\b)")
REASON = re.compile(r",?\s(?:because|since)\b")
MATH = re.compile(
    r"\$\$(?P<a>[^$]{1,600})\$\$|(?<!\\)\$(?P<b>(?:[^$\\\n]|\\.){1,400})\$|\\\((?P<c>.{1,400}?)\\\)|\\\[(?P<d>.{1,600}?)\\\]",
    re.DOTALL,
)
PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,20}\s{1,4}[a-zA-Z]{2}")
SENTENCE_END = re.compile(r"(?<!\.\.)[.!](?:\s|$)|[。!]|\n")
SENTENCE_START = re.compile(r"(?<=[.!?。！])\s")
MAX_GAP = 40
"""Longest text (characters) between two numbers of one answer."""
MAX_NEGATION = 40
"""Characters before a number in which a word may negate it."""
MAX_CHOICE = 60
"""Longest line (characters) that can be a bare choice."""
CHOICE = re.compile(
    r"\(([A-J]|[a-j](?=\)(?![^\n]{0,200}\([b-j]\))(?:[\s.:*]|$)))\)|([a-j](?=\)[\s.*])|[A-J](?=[).:,;]|\s{0,2}$|\s(?:because|since|as|is|-|–)\s))(?!\s?[:.]?=)"
)
LETTERS = re.compile(
    r"\(?[A-J]\)?(?:(?:\s?[,;&、和]\s?|,?\s(?:and|or)\s)\(?[A-J]\)?){1,9}(?!\s?[,;&、和]?\s?(?:and|or)?\s?[\d(\\$])(?!\w)"
)

# Mathematics in plain text: numbers, single letters and brackets with operators between them.
NUMBER = rf"(?:{GROUPED}|\d+)(?:\.\d+)?|\.\d+"
ATTACHED = r"(?:\((?![^()\n]{0,80}[A-Za-z]{2})[^()\n]{1,80}\)|_\{?\d{1,3}\}?"
ATTACHED += r"|\s?\\?%|\^\{?[-+]?\d{1,6}\}?|[²³!π]|°\s?[CF]?(?![a-zA-Z])|√\d{1,6}|[eE][-+]?\d{1,4}(?!\w)"
ATTACHED += r"|\s?[apAP]\.?\s?[mM]\b|\so'clock|[a-zA-Z](?![a-zA-Z0-9])){0,4}"
OPERAND = (
    rf"[-+±]?\s?(?:US|HK|Rs\.?\s?)?\\?[$€£¥₹]?(?:(?:{NUMBER})(?:\s\d{{1,6}}/\d{{1,6}}(?![\d/]))?{ATTACHED}"
    rf"|(?:sqrt|√|ln|log|exp|(?:arc)?(?:sin|cos|tan))\s?(?:\([^()\n]{{1,60}}\)|\d{{1,9}}){ATTACHED}"
    rf"|\|[^|\n]{{1,20}}\||\([^()\n]{{1,80}}\){ATTACHED}|π(?:[a-z](?![a-zA-Z])(?:\^\{{?\d\}}?|[²³])?)?|[a-zA-Z](?:_\w|_\{{\w{{1,3}}\}}|\([a-z]\))?(?:\^\{{?[-+]?\w{{1,6}}\}}?|[²³])?(?![a-zA-Z'’]))"
)
OPERATOR = r"\s{0,2}(?:[<>]=|[-+*/=:×÷·±^<>≤≥≠]|≈|(?<=[\d\s])x(?=\s?\d))\s{0,2}"
PLAIN = re.compile(
    rf"(?<![A-Za-z0-9_.^\\'’])(?<![_^]\{{)(?:{OPERAND})(?:{OPERATOR}(?:{OPERAND})){{0,30}}(?:\s?[-/]\s?)?"
)
LATEX = re.compile(
    r"(?:\\(?:begin|end)\{[a-z]{1,12}\}|\\\\|\\[a-zA-Z]{1,20}|\\[{},;!%| ]"
    r"|[0-9+\-*/^_=()\[\]{}|<>&%! ]|[.,](?=\s?[\d\\(\[+-])|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z'’]))"
    r"{2,600}"
)
"""LaTeX without dollar signs around it: commands, numbers, single letters and the characters between them."""
TEXT_ONLY = re.compile(
    r"\\(?:text|mathrm|therefore|because|q?quad|boxed|[cl]?dots|(?:black)?square|item|implies|hfill)"
)
GROUP = re.compile(
    r"\[\[[^\n]{1,100}?\]\]|(?:\bC(?=\())?\\?[(\[{]\s{0,2}[^()\[\]{}\n]{1,80},[^()\[\]{}\n]{1,80}\\?[)\]}]"
)
"""A pair, an interval or a set in plain text."""
SCALE_WORD = re.compile(
    rf"\s{{0,2}}(?:(?:{'|'.join(SCALES)}|percent)\b(?:\s(?:{'|'.join(SCALES)})\b)?|%|\\%|万亿?|亿)",
    re.IGNORECASE,
)
SCALE_LETTER = re.compile(rf"\s(?:{'|'.join(SCALE_LETTERS)})(?!\w)")
LETTER_UNIT = re.compile(rf"([-+]?(?:{NUMBER}))({UNIT_LETTERS})")


JOINED = re.compile(
    r"\s(?:to|through)\s|\s?[–—]\s?|,?\s(?:with\s)?(?:an?\s)?remainder(?:\sof)?\s|\sR\.?\s?|\s(?:plus|times|divided\sby)\s"
    r"|\s(?:in|out\sof)\s|\s?[∪∩∖]\s?"
)
"""Between two numbers that are one answer: a range, a quotient with its remainder, a calculation in words."""
OPTION_TEXT = re.compile(r"[:\s]{1,2}([a-zA-Z]{2,20}(?:\s[a-zA-Z]{2,20}){0,4})(?=[.,;\n]|$)")
"""The words of an option behind its letter, as in `(B) no`."""
DECIMAL_COMMA = re.compile(r"(\d(?<![\w.,(\[]\d)(?<!\{\{\d)\d{0,8}),(\d{1,2}|\d{4,9})(?![\w,]|\.\d)")
LANGUAGES = {
    "German": "der das und ist eine wir sind beträgt antwort ergebnis lösung also daher somit",
    "French": "le les est et une réponse donc nous des résultat vaut",
    "Spanish": "el los es y una respuesta resultado entonces por lo tanto",
    "Italian": "il è di una risposta risultato quindi dunque",
    "Portuguese": "é uma resposta resultado então portanto são",
    "Dutch": "het een antwoord dus zijn uitkomst",
    "Polish": "jest odpowiedź wynik więc oraz",
    "Russian": "ответ равен равно итак следовательно это",
}
"""Words that tell the languages in which a decimal has a comma."""
NAME_BEFORE = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])\s{0,2}=[\s$]{0,3}$")
MAX_NAME = 12
"""Characters before a box in which the name of its value stands."""
OPTIONS = re.compile(
    r"(?<![\w\\{(])\(?([A-Ja-j])[).:]\)?\s{0,3}([^\n]{1,80}?)(?=[,;.]?\s{1,3}(?:and\s|or\s)?\(?[A-Ja-j][).:]\)?\s|[,;.]?\s*(?:\n|$)|[.;]\s)"
)
"""An option with its letter."""
ALL = re.compile(r"(?i:(?:all|every|any)\s(?:real\s)?(?:numbers?|reals?|values?|[a-z]\b))[^\n]*?(?=[.\s*]*(?:\n|$))")
"""A set in words."""
ALL_LAST = re.compile(rf"(?:^|\b(?:is|are)\s)({ALL.pattern})")
LAST_WORD = re.compile(r"(?i:\b(?:(?:north|south)?-?(?:east|west)|north|south|noon|midnight|infinity))(?=[.!*]*$)")
"""Words at the end of a sentence that are values."""
WORKS = re.compile(r"\s(?:works?|satisf(?:y|ies)|(?:is|are)\s(?:a\s)?(?:allowed|possible|solutions?))\b.*$")
NUMBERED = re.compile(r"\s*1\.\s[^\n]{1,80}(?:\n\s*\d\.\s[^\n]{1,80}){1,9}")
ITEM = re.compile(r"\d\.\s([^\n]{1,80})")
"""Lines of a numbered list."""
HAN = re.compile(r"[\u4e00-\u9fff]")
RESULT = re.compile(
    r"\b(?:it['’]s|(?:is|are|was|were|be|get|obtain|find|gives?|yields?|has|have|faces?|facing|on|equals?|costs?|takes?|needs?|pays?|earns?"
    r"|makes?|weighs?|spends?))\s(?:it\s)?(?:the\s|an?\s)?|[是为有共]"
)
COMPLEMENT = re.compile(r"\S{1,30}(?:\s\S{1,30}){0,6}")
COUNTED = re.compile(
    rf"(?:^|\b(?:so|thus|hence|therefore|is|are|has|have|gets?|takes?|needs?|costs?|earns?|pays?|buys?|sells?|eats?),?\s)"
    rf"(?:only\s|exactly\s)?(?P<number>(?!one\b(?!\s(?:half|third|quarter))|zero\b)(?:a\s(?:half|quarter|third)|{UNDER_1000}(?:\s(?:{LARGE}))?(?:\s(?:dozen|{PART}))?)\b)"
    r"(?!\s(?:of\sthem\b|other|more\b|less\b|[a-z]{1,12}\sand\s))",
    re.IGNORECASE,
)
"""A number in words that begins a sentence or follows its verb."""
FACTORIAL = re.compile(r"[.,;)=]|\s?[-+*/=]|\s[a-z]")
"""What follows an exclamation mark that ends no sentence."""
NAMED = re.compile(r"\s[a-z]{3,15},?\sand\s")
"""Between two numbers of different things: 12 boys and 16 girls."""
NEXT_TERM = re.compile(r"(?:,\s?|\s)?(?:and\s)?")
ROUNDED = re.compile(r"\s(?:decimal|significant|places|d\.p|s\.f|digits|nearest)")
FROM = re.compile(r"(?:from|between)\s$", re.IGNORECASE)
FACTOR_BEHIND = re.compile(r"\s(?=[a-zA-Z](?:[_^²³]|\s?[-+*/=]\s?[\da-zA-Z(]))")
"""A space before a letter that is a variable: `4 x^{2}`."""
NEGATED = re.compile(r"(?i:n['’]t|\b(?:can)?not|\bnever)(?:\sbe)?[\s$*]{1,4}$")


def answer_in_response(text: str) -> str | None:
    """The final answer of a response as written there, or None if it has none."""
    return final_answer(own_answer(text))


def final_answer(text: str) -> str | None:
    """As `answer_in_response`, for what `own_answer` leaves of a response."""
    boxes = [match.start() for match in BOX.finditer(text)][-MAX_BOXES:]
    # Of a text with boxes, only their lines are read.
    lines = plain_text(text[text.rfind("\n", 0, boxes[0]) + 1 :]) if boxes else ""
    if boxes and (box := boxed(decimal_points(lines, text))):
        return box
    text = join_digits(decimal_points(plain_text(text), text))
    labels = _labels(text)
    change = CORRECTED.search(text, labels[-1].end()) if labels else None
    if change and (corrected := _stated(text[change.end() :])):
        return corrected
    return _marked(text, labels) or _stated(text) or _last_expression(text)


def answers_in_response(text: str) -> list[str]:
    r"""Every answer that a response marks as one, in order, without duplicates: each `\boxed{}`, the text after each
    "the answer is", and the last marked line. A bare formula or number does not count. At most 20 of each, from the
    end.
    """
    text = _behind_reasoning(text)
    text = join_digits(decimal_points(plain_text(text), text))
    answers = [_box_content(text, match.end())[0] for match in list(BOX.finditer(text))[-MAX_BOXES:]]
    statements = [match for match in STATEMENT.finditer(text) if not HEDGED.match(text, match.end())]
    answers += [_answer_at(text, match.end()) or "" for match in statements[-MAX_BOXES:]]
    answers += [boxed(text) or "", _marked(text, _labels(text)) or ""]
    return list(dict.fromkeys(filter(None, answers)))


@lru_cache(CACHED)
def answer_in_gold(text: str) -> str | None:
    """The answer in a gold text, which may be a worked solution (boxed, `#### x`, `A: x`, "the answer is x") or bare.

    None if the text or its box is empty.
    """
    text = plain_text(_behind_reasoning(text))
    if BOX.search(text):
        return boxed(text)
    text = join_digits(text)
    return _marked(text, _labels(text)) or (_stated(text) if is_prose(text) else None) or text.strip() or None


def decimal_points(text: str, response: str) -> str:
    """Text with points in numbers such as `3,5`, if the response's language writes decimals with a comma."""
    if "," not in text or not DECIMAL_COMMA.search(text) or not has_decimal_commas(response):
        return text
    return DECIMAL_COMMA.sub(r"\1.\2", text)


def has_decimal_commas(text: str) -> bool:
    """True for a text in a language that writes decimals with a comma: it has two of the language's words."""
    words = set(re.findall(r"[^\W\d_]+", text.lower()))
    return any(len(words & set(language.split())) > 1 for language in LANGUAGES.values())


def parts_in_boxes(text: str) -> list[str]:
    r"""Values in several boxes, with their names if all have different ones: `x = \boxed{4}`, `y = \boxed{-1}`."""
    boxes = list(BOX.finditer(text))
    names = [NAME_BEFORE.search(text, max(0, box.start() - MAX_NAME), box.start()) for box in boxes[:MAX_BOXES]]
    if 1 < len(boxes) <= MAX_BOXES and not any(names):
        return [_box_content(text, box.end())[0] for box in boxes]
    if len(boxes) < 2 or len({name[1] for name in names if name}) < len(boxes):
        return []
    return [f"{name[1]} = {_box_content(text, box.end())[0]}" for name, box in zip(names, boxes, strict=True) if name]


def last_complement(text: str) -> str | None:
    """The words behind the last verb of a response that marks no answer."""
    text = plain_text(own_answer(text))
    if BOX.search(text) or _marked(text, _labels(text)) or _stated(text):
        return None
    return _complement(SENTENCE_START.split(text.rstrip().rpartition("\n")[2])[-1])


def listed_options(text: str) -> dict[str, str]:
    """Values of the options that a text lists from A on, by their letters: `A) 8, B) 12`."""
    options: dict[str, str] = {}
    for match in OPTIONS.finditer(text):
        if match[1].upper() == chr(ord("A") + len(options)):
            options[match[1].upper()] = match[2].strip(" $*.,;")
    return options if len(options) > 1 else {}


def _behind_reasoning(text: str) -> str:
    """What follows the last `</think>`; nothing of a text that was cut inside its reasoning.

    Answers in the reasoning are drafts. Where the prompt ends with `<think>`, the text has the end of the block alone.
    """
    answer = text.rpartition(CLOSE)[2]
    return "" if answer.lstrip().startswith(OPEN) else answer


def own_answer(text: str) -> str:
    """A response without its reasoning, and without a next problem that the model made up behind its answer."""
    text = _behind_reasoning(text).lstrip()
    if (end := END_OF_TURN.search(text, 1)) is not None:
        text = text[: end.start()]
    for problem in NEXT_PROBLEM.finditer(text):
        before = text[: problem.start() + 1]
        if any(mark.search(before) for mark in (BOX, HASH, LABEL, STATEMENT)):
            return before
    return text


def is_prose(text: str) -> bool:
    """True if words follow each other, as in sentences and not in formulas."""
    return PROSE.search(text) is not None


def boxed(text: str) -> str | None:
    r"""Content of the last non-empty `\boxed{}` or `\fbox{}`, or None.

    Boxes separated only by "and", "or" or a comma form one answer: `\boxed{3}$ and $\boxed{5}` is "3, 5".
    """
    contents: list[str] = []
    next_start = len(text)
    starts = [match.span() for match in BOX.finditer(text)]
    for start, begin in reversed(starts[-MAX_BOXES:]):
        content, end = _box_content(text, begin)
        if contents and not _linked(text[end:next_start]):
            break
        if content and content not in contents:
            contents.insert(0, content)
        next_start = start
    return ", ".join(contents) or None


def _box_content(text: str, begin: int) -> tuple[str, int]:
    """Content of a box, from its brace on, and its end position; an unclosed box ends with its line."""
    if text[begin : begin + 1] != "{":
        token = BARE_BOX.match(text, begin)
        end = token.end() if token else begin
        return text[begin:end].strip(), end
    depth = 0
    for position in range(begin, len(text)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[begin + 1 : position].strip(), position + 1
    end = text.find("\n", begin)
    end = len(text) if end < 0 else end
    return text[begin + 1 : end].strip().rstrip("$."), end


def _linked(gap: str) -> bool:
    return len(gap) < 60 and LINK.fullmatch(LINK_NOISE.sub("", gap)) is not None


def _labels(text: str) -> list[re.Match[str]]:
    """`####` and labels such as `Answer:`, in order."""
    hashes = HASH.finditer(text) if "####" in text else ()
    return sorted((*hashes, *LABEL.finditer(text)), key=lambda match: match.start())


def _marked(text: str, labels: list[re.Match[str]]) -> str | None:
    """Answer of the last `#### x`, `Answer: x` or `<answer>x</answer>`.

    `####` also starts a Markdown heading, and `A:` a choice: before the last line only a plain number counts.
    """
    tags = list(TAG.finditer(text))
    if tags and tags[-1][1].strip():
        return _answer_at(tags[-1][1], 0)
    for match in reversed(labels[-MAX_BOXES:]):
        line, _, after = text[match.end() : match.end() + MAX_TAIL].lstrip().partition("\n")
        answer = _answer_at(text, match.end())
        # A separate line "Answer" is a heading, and so plausible; so is "Final answer: x".
        is_sure = not after.strip() or len(match[0].strip(" \t*_#>:\n")) > 1
        if answer and (is_sure or read_number(clean(line.strip(" *"))) is not None):
            return answer
    return None


def _stated(text: str) -> str | None:
    """Answer of the last "the answer is x" that states one, else of the last "option B"; "less than x" states none."""
    for match in reversed(list(STATEMENT.finditer(text))[-MAX_BOXES:]):
        if HEDGED.match(text, match.end()):
            continue
        if answer := _answer_at(text, match.end()):
            return answer
    chosen = [] if text.rstrip().endswith(",") else list(CHOSEN.finditer(text)) or list(ONLY.finditer(text))
    return chosen[-1][1] if chosen else None


def _answer_at(text: str, start: int) -> str | None:
    """The answer that begins at a position, or on the next line: a list of formulas, numbers or choices, or words."""
    rest = text[start : start + MAX_TAIL] + TOKEN_REST.match(text, start + MAX_TAIL)[0]  # type: ignore[index]
    rest = rest[OPENING.match(rest).end() :]  # type: ignore[union-attr]  # it matches everything
    sentence = SENTENCE_END.split(rest, maxsplit=1)[0]
    if (change := CORRECTION.search(sentence)) and (corrected := _pieces(change[0])):
        return _join(change[0], corrected[-1:])
    if inner := STATEMENT.match(rest) or re.match(rf"(?i:the\s(?:final\s)?)(?={STATEMENT.pattern})", rest):
        return _answer_at(rest, inner.end())
    for _ in range(3):
        if lead := LEAD.match(rest):
            rest = rest[lead.end() :]
            rest = rest[OPENING.match(rest).end() :]  # type: ignore[union-attr]
    if whole := _whole_answer(rest):
        return whole
    if choice := CHOICE.match(rest):
        letter, behind = choice[1] or choice[2], rest[choice.end() :].split("\n", 1)[0].lstrip(" ).:*_")
        pieces = _pieces(behind)
        value = _join(behind, _run_from_start(behind, pieces)) if pieces and pieces[0][0] == 0 else None
        if value is None and choice[1] and (words := OPTION_TEXT.match(rest, choice.end())):
            value = words[1]
        return f"({letter}) {value}" if value else letter
    pieces = _pieces(rest)
    if pieces and pieces[0][0] == 0:
        return _join(rest, _run_from_start(rest, pieces))
    return _in_sentence(SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *_"))


def _whole_answer(text: str) -> str | None:
    """The answer that begins a text, if it is a numbered list, a date, a set in words, or letters of options."""
    if listed := NUMBERED.match(text):
        lines = [(item[1], _pieces(item[1])) for item in ITEM.finditer(listed[0])]
        return ", ".join(_join(line, pieces[:1]) or line for line, pieces in lines)
    whole = DATE.match(text) or ALL.match(text) or LETTERS.match(text)
    return whole[0] if whole else None


def _in_sentence(sentence: str) -> str | None:
    """The answer in a sentence that does not begin with it: its first formula, else its last number, else its words."""
    if not sentence or (NO_ANSWER.match(sentence) and not any(character.isdigit() for character in sentence)):
        return None
    sentence = REASON.split(sentence, maxsplit=1)[0] or sentence
    pieces = [piece for piece in _pieces(sentence) if _has_value(sentence[piece[0] : piece[1]])]
    if pieces and (is_prose(sentence) or pieces[0][2] or HAN.search(sentence)):
        formulas = [piece for piece in pieces if piece[2]]
        return _join(sentence, [formulas[0]] if formulas else _run_to_end(sentence, pieces))
    if any(character in sentence for character in "\\$^_=<>") or not is_prose(sentence):
        return sentence
    return BREAK.split(sentence, maxsplit=1)[0].strip(" *\"'") or None


def _has_value(piece: str) -> bool:
    return any(character.isdigit() or character in "\\π=" for character in piece)


Piece = tuple[int, int, bool]
"""Start and end of a piece; true for a formula, false for mathematics in plain text."""


def _pieces(text: str) -> list[Piece]:
    """Formulas, and other pieces that look like mathematics, in order."""
    marked = MATH.finditer(text) if "$" in text or "\\" in text else ()
    formulas = [(match.start(), match.end(), True) for match in marked if _is_formula(match)]
    plain: list[Piece] = []
    begin = 0
    for start, end, _ in [*formulas, (len(text), len(text), True)]:
        plain += _plain_pieces(text, begin, start) if begin < start else []
        begin = end
    return _whole(text, sorted([*formulas, *plain]))


def _whole(text: str, pieces: list[Piece]) -> list[Piece]:
    """Pieces with those in one that are one quantity: hours and minutes, a range, a quotient with its remainder."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and (whole[-1][2] == piece[2]) and _belongs(text, whole[-1], piece):
            whole[-1] = (whole[-1][0], piece[1], piece[2])
        else:
            whole.append(piece)
    return whole


def _belongs(text: str, piece: Piece, following: Piece) -> bool:
    gap = text[piece[1] : following[0]]
    if len(gap) > MAX_GAP:
        return False
    if JOINED.fullmatch(gap):
        is_range = "to" in gap or "through" in gap
        return not (is_range and (FROM.search(text, 0, piece[0]) or ROUNDED.match(text, following[1])))
    if (factor := FACTOR_BEHIND.match(text, piece[1])) and factor.end() == following[0]:
        return True
    unit = UNIT.match(text, piece[1])
    if unit is None or not NEXT_TERM.fullmatch(text, unit.end(), following[0]):
        return False
    smaller = UNIT.match(text, following[1])
    if smaller is None:
        return False
    (kind, size), (other, part) = unit_of(unit), unit_of(smaller)
    return kind == other and part < size


def _plain_pieces(text: str, begin: int, end: int) -> list[Piece]:
    latex = LATEX.finditer(text, begin, end) if "\\" in text else ()
    groups = [_stripped(match) for match in latex if _is_latex(match[0])]
    for match in GROUP.finditer(text, begin, end) if "," in text or "[[" in text else ():
        is_inside = any(start <= match.start() < until for start, until, _ in groups)
        if not is_inside and _is_group(match[0]):
            groups.append((match.start(), match.end(), False))
    pieces: list[Piece] = list(groups)
    for match in PLAIN.finditer(text, begin, end):
        piece = match[0].rstrip(" -/=")
        begins = match.start() + len(piece) - len(piece.lstrip())
        is_inside = any(start <= begins < until for start, until, _ in groups)
        if not is_inside and _has_value(piece):
            pieces.append((begins, match.start() + len(piece), False))
    return sorted(pieces)


def _stripped(match: re.Match[str]) -> Piece:
    lead = len(match[0]) - len(match[0].lstrip(" =,."))
    return match.start() + lead, match.start() + len(match[0].rstrip(" ,.=")), False


def _is_latex(text: str) -> bool:
    return bool(re.search(r"\\[a-zA-Z]", TEXT_ONLY.sub("", text)))


def _is_group(text: str) -> bool:
    return not re.search(r"[A-Za-z]{3,}", text.replace("\\infty", "").replace("sqrt", "").replace("\\frac", ""))


def _run_from_start(text: str, pieces: Sequence[Piece]) -> list[Piece]:
    """The first piece, and further ones separated only by "and", "or" or a comma, up to the end of a clause."""
    run = [pieces[0]]
    for piece in pieces[1:]:
        if not (_linked(text[run[-1][1] : piece[0]]) or NAMED.fullmatch(text, run[-1][1], piece[0])):
            break
        run.append(piece)
    # "5, 3 of which are red" states 5 alone.
    if len(run) > 1 and re.match(r"\s(?:of|more|less|times)\b", text[run[-1][1] :]):
        return run[:1]
    return run


def _run_to_end(text: str, pieces: Sequence[Piece]) -> list[Piece]:
    """The last piece, and earlier ones separated only by "and", "or" or a comma; calculations do not form a list."""
    run = [pieces[-1]]
    for piece in reversed(pieces[:-1]):
        either = (text[piece[0] : piece[1]], text[run[0][0] : run[0][1]])
        is_mixed = piece[2] != run[0][2] and ("=" in either[0]) != ("=" in either[1])  # 3, and $a_n = 3n$
        if not _linked(text[piece[1] : run[0][0]]) or is_mixed or any(map(_is_calculation, either)):
            break
        run.insert(0, piece)
    return run


def _is_calculation(piece: str) -> bool:
    return "=" in piece and VARIABLE.search(piece.partition("=")[0]) is None


def _join(text: str, run: Sequence[Piece]) -> str | None:
    """The text of some pieces as one answer: a chain of equations states its last side."""
    parts = []
    for start, end, is_formula in run:
        part = _formula(text[start:end]) if is_formula else text[start:end].strip().rstrip(".,;:!")
        if not is_formula and text[end - 1] == "!" and FACTORIAL.match(text, end):
            part += "!"
        if not is_formula and (letter := LETTER_UNIT.fullmatch(part)):
            part = f"{letter[1]} {letter[2]}"  # 350g
        if scale := SCALE_WORD.match(text, end) or (SCALE_LETTER.match(text, end) if part[:1] in "$€£¥₹" else None):
            part += " " + scale[0].strip()
        if len(run) == 1 and "," not in part:
            # `14/2=7` states 7; in a list of equations (`x=1, y=2`) every side counts.
            part = r" \approx ".join(stated_values(part)) or part
        if (unit := UNIT.match(text, end)) and _has_unit(part, unit):
            part += f" {unit[0].strip()}"
        if part:
            parts.append(part)
    is_either = any(OR.search(text, one[1], other[0]) for one, other in pairwise(run))
    return (" or " if is_either and any(map(INEQUALITY.search, parts)) else ", ").join(parts) or None


def _has_unit(part: str, unit: re.Match[str]) -> bool:
    """True if the word behind a number is its unit, and not the "in" of "12 in total"."""
    if unit["unit"] == "in" and re.match(r"\s[a-zA-Z]", unit.string[unit.end() :]):
        return False
    if unit["unit"].startswith("rad") and ("π" in part or r"\pi" in part):
        return True
    return read_number(clean(part)) is not None or UNIT.search(part) is not None


def _last_expression(text: str) -> str | None:
    """The last formula or number, whichever ends later, with those in the same list; bold ones take precedence."""
    text = text.rstrip()
    last_line = text.rpartition("\n")[2]
    last_sentence = SENTENCE_START.split(last_line)[-1]
    if bold := _bold(last_line, last_sentence):
        return bold
    if len(last_line) < MAX_CHOICE and CHOICE.match(last_line.strip(" *")):
        return _answer_at(last_line, 0)
    if words := _last_words(last_sentence):
        return words
    is_open = (
        text.endswith("?") or UNFINISHED.search(text.rstrip(" *_")) or (PLAN.search(last_sentence) and "=" not in text)
    )
    pieces = [] if is_open else [piece for piece in _pieces(text) if piece[2] or _has_value(text[piece[0] : piece[1]])]
    pieces = [piece for piece in pieces if not NEGATED.search(text[max(0, piece[0] - MAX_NEGATION) : piece[0]])]
    if not pieces:
        return None if is_open else _complement(last_sentence)
    run = _run_to_end(text, pieces)
    hedge = HEDGE_BEFORE.search(text[max(0, run[0][0] - MAX_NEGATION) : run[0][0]])
    answer = _join(text, run)
    return f"{hedge[0].strip(' *$(')} {answer}" if hedge and answer else answer


def _last_words(sentence: str) -> str | None:
    """The answer in a last sentence that has it in words, such as a date, an option or a number."""
    states = [match for state in STATES.values() if (match := state.search(sentence))]
    words = [match[0] for pattern in (DATE, LAST_WORD) for match in pattern.finditer(sentence)]
    if states or words:
        return states[0][0] if states else words[-1]
    if everything := ALL_LAST.search(sentence):
        return WORKS.sub("", everything[1])
    number = None if _has_value(sentence) else COUNTED.search(sentence)
    return number["number"] if number else None


def _complement(sentence: str) -> str | None:
    """The few words behind the last verb of a sentence that names its result: "So we get Friday."."""
    verbs = list(RESULT.finditer(sentence))
    words = sentence[verbs[-1].end() :].strip(' .!*"。') if verbs else ""
    return words if words and COMPLEMENT.fullmatch(words) and not NO_ANSWER.match(words) else None


def _bold(last_line: str, last_sentence: str) -> str | None:
    """The last bold value of the last line, or the bold words of a last sentence without values."""
    bold = BOLD.findall(last_line)
    for text in reversed(bold):
        pieces = [piece for piece in _pieces(text) if _has_value(text[piece[0] : piece[1]])]
        if pieces:
            return _join(text, _run_to_end(text, pieces))
    words = [] if _has_value(last_sentence) else BOLD.findall(last_sentence)
    return str(words[-1]).strip(" .:") if words else None


def _formula(text: str) -> str:
    match = MATH.fullmatch(text)
    return _content(match) if match else text


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip().rstrip(".,")


def _is_formula(match: re.Match[str]) -> bool:
    """True if `$...$` is a formula, and not the prose between two amounts of dollars."""
    content = _content(match)
    return bool(content) and not is_prose(TEXT_COMMAND.sub("", content))
