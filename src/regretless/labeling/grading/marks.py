r"""What marks an answer in a text: the table of marks in their order of strength, and what takes a mark back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Phrase:
    """A pattern of prose, tried only where one of the words stands that it can begin with: several times as fast."""

    def __init__(self, beginnings: str, pattern: str) -> None:
        self.beginnings, self.compiled = re.compile(beginnings), re.compile(pattern)
        self.pattern = pattern

    def finditer(self, text: str, start: int = 0, end: int | None = None) -> Iterator[re.Match[str]]:
        """As the pattern's own."""
        lowered, end = text.lower(), len(text) if end is None else end
        if len(lowered) != len(text):  # \u0130 is two small letters
            yield from self.compiled.finditer(text, start, end)
            return
        for word in self.beginnings.finditer(lowered, start, end):
            if word.start() >= start and (match := self.compiled.match(text, word.start(), end)):
                start = match.end()
                yield match

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """As the pattern's own."""
        return next(self.finditer(text, start), None)

    def match(self, text: str) -> re.Match[str] | None:
        """As the pattern's own."""
        return self.compiled.match(text)


BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,20}")
TAG = re.compile(r"<answer>([^<]{1,600})(?:</answer>|$)")
HASH = re.compile(r"(?:^[ \t]{0,8}|(?<=[.!?。)\]}$]) )####[ \t]{0,8}(?=\S)", re.MULTILINE)
FOREIGN = "réponse|antwort|ergebnis|lösung|respuesta|resposta|risposta|resultado|résultat|ответ"
"""The word "answer" in other languages."""
LABEL = re.compile(
    rf"(?:^|(?<=[。！])(?=答))[ \t*_#>]{{0,8}}(?:(?:Ans"
    rf"|(?i:(?:(?:the|my) )?(?:final |correct )?(?:answer|result|{FOREIGN}))|【?(?:最终)?答案?】?)"
    r"[*_]{0,2}[ \t]{0,2}(?:[:=]|】|\n)|A[*_]{0,2}[ \t]{0,2}:)[ \t*_]{0,8}",
    re.MULTILINE,
)
# "The result of 3 + 4 is 7" states a step.
STATEMENT = Phrase(
    rf"answer|{FOREIGN}|solution|result|option|choice|selection|答案|结果|选|故选|应选|因此选|所以选",
    rf"(?i:\b(?:answer|{FOREIGN}|"
    r"solution(?:\sset)?|result(?!\sof\s[^.\n]{0,40}\d)|option|choice|selection)s?[\"'*_]{0,3}"
    r"(?:\s(?:to|of|for)\s(?![^.:=\n$]{0,40}\b(?:part|step|first|previous)\b)[^.:=\n$]{1,80}?|\s\(?[a-z]\)?)?"
    r"(?:,?\s{1,4}(?:is|are|will be|would be|should be|must be|comes out to(?: be)?|equals"
    r"|est|ist|es|beträgt|lautet|vaut)\b"
    r"|\s{0,4}[:=]|\sof(?=\s[$\d])))"
    r"|(?:答案|结果|选项)(?:应该|应)?(?:是|为|等于|[:=])|(?:故|应|因此|所以)?选(?:择|项)?(?=\s{0,2}[:(]?\s?[A-J](?![a-z]))",
)
CHOSEN = Phrase(
    "option|choice|answer|choose|select|pick",
    r"(?i:\b(?:option|choice|answer|choose|select|pick))\s{1,2}[*_]{0,2}\(?([A-J])\)?[*_]{0,2}(?=[\s.,;:)]|$)(?!\s?=)",
)
_ITEM = r"\(?(?:[A-J]|I{1,3}|IV|V|VI{1,3})\)?"
ONLY = re.compile(
    rf"\b(?:[Oo]nly|[Bb]oth|[Ss]tatements|[Oo]ptions)\s(?:(?:statement|option|choice|equation|number|line|figure|set|graph)s?\s)?"
    rf"({_ITEM}(?:(?:,|,?\sand)\s{_ITEM})*)\s(?:is|are|works?|holds?|satisf(?:y|ies))\b(?!\s(?:not|false|wrong|incorrect))"
)
"""Those of several that are right."""
BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")


class Mark(NamedTuple):
    """One way to mark an answer."""

    example: str
    reason: str
    """Why it has its place in the order."""


MARKS = (
    Mark(r"`\boxed{12}`, `\fbox{12}`", "the convention of benchmarks: the last box that is not empty"),
    Mark("`<answer>12</answer>`", "the convention of reasoning models"),
    Mark(
        "`#### 12`, `Answer: 12`, `A: 12`, `答：12`",
        "a line for the answer alone; before the last line only plain numbers count, because `####` also starts "
        "headings and `A:` options",
    ),
    Mark(
        '"the answer is 12", "the solutions are 3 and 5", "our selection is option B", `答案是12`, `故选B`',
        "the last such sentence; the result of a step (`the result of 3 + 4 is 7`), the answer to a part, and a bound "
        '("the answer is less than 12") are none',
    ),
    Mark('"option B", "choose (C)"', "an option by its letter"),
    Mark("`**12**`", "bold in the last line"),
    Mark("the last formula or number", "unless the text ends in a question, a plan, or in mid-sentence"),
)
"""In their order of strength: the first that a text has counts."""

NEXT_PROBLEM = re.compile(
    r"\n[ \t*_#]{0,6}(?:(?:next\s|another\s|new\s)?(?:question|problem|exercise)|Q|user|human|instruction|input)"
    r"[ \t*_]{0,4}\d{0,3}[ \t*_]{0,4}[::]",
    re.IGNORECASE,
)
"""Where a base model goes on with a problem of its own: an answer before it is the last."""
END_OF_TURN = re.compile(r"<\|(?:im_end|im_start|eot_id|end|endoftext)\|>|</s>")
HEDGES = (
    r"(?i:(?:less|more|greater|fewer|larger|smaller|higher|lower|bigger|other)\sthan(?:\sor\sequal\sto)?"
    r"|at\s(?:least|most)|up\sto|no\s(?:more|less|fewer)\sthan|maybe|perhaps|between)"
)
"""Words before a value that make it another answer, or a doubtful one."""
HEDGE_BEFORE = re.compile(rf"\b{HEDGES}[\s*$\\(]{{1,4}}$")
HEDGED = re.compile(rf"[\s*_]{{0,4}}{HEDGES}[\s*_]{{1,4}}")
NO_VALUE = Phrase(
    "can|could not|impossible|no|not enough|insufficient",
    r"(?i:\b(?:can\s?not|can['’]t|could\snot|impossible\sto)\s(?:be\s)?(?:determined?|answered?|solved?|known?|found|say)"
    r"|\bno\s(?:real\s|such\s)?(?:solutions?|values?)\b"
    r"|\bnot\senough\sinformation|\binsufficient\s(?:information|data))",
)
PLAN = re.compile(
    r"(?i:\b(?:need|have|want|going)\sto\s(?:find|add|subtract|multiply|divide|calculate|compute|determine|know|solve)\b)"
)
UNFINISHED = re.compile(r"(?:\b(?:the|an?|so|and|of|is|are|to|we|that|then|by|with|for)|[=+*/(,])\s*$", re.IGNORECASE)
CORRECTED = re.compile(r"^[ \t*_]{0,4}(?i:correction|wait|oops|actually|sorry|no,)", re.MULTILINE)
"""A line behind an answer that takes it back: a later sentence states the answer."""
CORRECTION = re.compile(
    r"(?i:\s?(?:[—–,;:?]|\.{1,3}|\s-)\s?(?:no|wait|sorry|oops|actually|i\smean|correction|or\srather|make\sthat)\b[^.\n]{0,80})"
)
