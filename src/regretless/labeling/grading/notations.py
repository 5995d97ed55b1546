r"""How people and models write one thing in several ways: the table of notations, and `clean`, which applies it.

Each notation has one form in which the rest of the package reads it: `½` is `1/2`, `\dfrac` is `\frac`, `9{,}500` is
`9,500`. docs/verification.md lists the table.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from regretless.labeling.grading.numerals import CACHED, FACTOR, NUMBER_WORDS, PARTS_OF, SCALES, WORDS

MAX_CLEANED = 2000
"""Longer texts are not parsed: no answer is that long, and the patterns take quadratic time."""
DEGREE_SIGN = "°"
DEGREE = re.compile(r"(?:\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degrees?(?![a-zA-Z])|°)")
SINE = re.compile(r"(?<![a-zA-Z])\\?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])\s?(?:\^\s?(?:\d|\{\s?\d\s?\}))?")
"""A trigonometric function, also with a power; its inverse takes no angle."""
PLAIN_ANGLE = r"(?:\\frac\s?\{\d{1,4}\}\s?\{\d{1,4}\}|\d{1,9}(?:\.\d{1,9})?)"
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|boldsymbol|mbox|rm|bf)\s?"
WHOLLY_TEXT = re.compile(rf"{TEXT}\{{([^{{}}]*)\}}")
# A single letter in roman type can be a unit (m, s), but also the imaginary unit or a variable, which must stay.
TEXT_UNIT = re.compile(
    r"(?<=[\w})\]%])(?:[\s/]|\\cdot)*(?:\\mu\s?)?\\(?:text|textbf|textrm|textnormal|mathrm|mbox|operatorname)\s?\{"
    rf"(?!\s?[a-fiknx-z]\s?\}})(?!\s?{FACTOR.pattern})[^{{}}]*(?:\{{-?\d+\}}[^{{}}]*){{0,3}}\}}(?:\s?\^\s?(?:\{{-?\d+\}}|\d))?$"
)
CHINESE_UNIT = re.compile(r"(?<=[\d}%)])\s?[\u4e00-\u9fff]{1,12}[²³]?$")
# Words in brackets after a number, which are not a factor.
REMARK = re.compile(
    r"(?<=[\d}%])\s?\((?:(?:[mck]?m|[mk]?g|s|min|h|ft|in|lb|oz|L|ml)(?:\^[23])?|[A-Za-z]{3,20}(?:\s[A-Za-z]{1,20}){0,8}|[\u4e00-\u9fff]{1,20}|\\text\s?\{[^{}()]*\})\)$"
)
LETTER = re.compile(r"\(?[A-J][).:]?|\\text[a-z]{0,2}\{\([A-J]\)\}")
NOTHING = re.compile(r"(?i:(?:the\s)?empty\sset|no\s(?:real\s|such\s)?(?:solutions?|values?|numbers?)|none)")
SCALE_LETTERS = {"M": "million", "MM": "million", "mn": "million", "B": "billion", "bn": "billion"}
SCALE_LETTERS |= {"K": "thousand", "k": "thousand"}
CHINESE_SCALES = {"千": 3, "万": 4, "亿": 8, "万亿": 12}
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0xFFE5: "¥",
    0x3000: " ",
    0x00A0: " ",
    0x202F: " ",
    **dict.fromkeys(range(0x2002, 0x200B), " "),  # thin and wide spaces
}
ALIKE = FULL_WIDTH | {
    ord(sign): other for sign, other in zip("−⋅∗∕⁄✕✖两\u212b′‘’″“”", "-·*//××二Å'''\"\"\"", strict=True)
}
RAISED = {sign: unicodedata.normalize("NFKC", sign).replace("−", "-") for sign in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"}
VULGAR = {sign: unicodedata.normalize("NFKC", sign).split("⁄") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
BASES = {"binary": "2", "two": "2", "octal": "8", "eight": "8", "decimal": "10", "hexadecimal": "16", "sixteen": "16"}
BASES |= {word: str(value) for word, value in WORDS.items() if 2 <= value <= 16}


Read = str | Callable[[re.Match[str]], str]
Step = tuple[str, Callable[[Read, str], str] | None, Read]


class Notation(NamedTuple):
    """One way to write something, and the way in which it is read."""

    written: str
    read: str
    """What becomes of `written`."""
    reason: str
    pattern: re.Pattern[str] | None = None
    """None: `written` itself is replaced, wherever it stands."""
    replacement: str | Callable[[re.Match[str]], str] | None = None
    """None: `read`."""
    sign: str = ""
    """A text without it has nothing that is replaced: a quick test."""

    @property
    def step(self) -> Step:
        """Sign, substitution (None: of the sign itself) and what is read."""
        if self.pattern is None:
            return self.written, None, self.read
        return self.sign, self.pattern.sub, self.read if self.replacement is None else self.replacement

    def apply(self, text: str) -> str:
        """The text with what is read in place of what is written."""
        return _applied(text, [self.step])


def _vulgar_fraction(match: re.Match[str]) -> str:
    above, below = VULGAR[match[0]]
    if match["factor"] is not None:
        return rf"\frac{{{above}}}{{{below}}}"
    before = match.string[match.start() - 1 : match.start()]
    return f"{{{above}/{below}}}" if before == "^" else f"{' ' if before.isdigit() else ''}{above}/{below}"


def _in_base(match: re.Match[str]) -> str:
    return f"{match['digits']}_{{{BASES.get(match['base'].lower(), match['base'])}}}"


def _power(match: re.Match[str]) -> str:
    unit = match[2].strip()
    if re.search(r"^[-+*/=^]|(?<!\^)\d", unit) or NUMBER_WORDS.match(unit):
        return match[0]  # 2 thousand 500
    exponent = sum(SCALES[word] for word in match[1].lower().split())
    return rf" \times 10^{{{exponent}}}" + (rf"\text{{{unit}}}" if unit else "")


def _time(match: re.Match[str]) -> str:
    word, minutes = match[3].lower(), 30 if match[1].lower() == "half" else 15
    hour = int(word) if word.isdigit() else WORDS[word]
    if match[2].lower() == "to":
        hour, minutes = (hour - 2) % 12 + 1, 60 - minutes
    return f"{hour}:{minutes}"


def _chinese_time(match: re.Match[str]) -> str:
    minutes = 30 if match[4] else int(match[3] or 0)
    half = {"上午": " a.m.", "早上": " a.m.", "下午": " p.m.", "晚上": " p.m."}.get(match[1] or "", "")
    return f"{match[2]}:{minutes:02}{half}"


def _matrix(match: re.Match[str]) -> str:
    rows = [re.sub(r",\s?", " & ", row) for row in match.groups() if row]
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


def _mixed(match: re.Match[str]) -> str:
    word = match[1].lower()
    return f"{word if word.isdigit() else WORDS[word]} 1/{PARTS_OF[match[2].lower()]}"


def _without(signs: str) -> Callable[[re.Match[str]], str]:
    return lambda match: re.sub(f"[{signs}]", "", match[0])


IN_TEXTS: tuple[Notation, ...] = (
    Notation(
        "10⁻³",
        "10^{-3}",
        "exponents in single signs, unless they may be those of a unit",
        re.compile(
            rf"[{''.join(RAISED)}](?:(?<=[\d)\]}}].)|(?<=[a-zA-Zπ].)(?<!\s[gmsh].)(?<![²³]))[{''.join(RAISED)}]*"
        ),
        lambda match: f"^{{{''.join(RAISED[sign] for sign in match[0])}}}",
    ),
    Notation(
        "2½",
        "2 1/2",
        "fractions in single signs",
        re.compile(rf"[{''.join(VULGAR)}](?P<factor>(?=[a-zA-Zπ(\\]))?"),
        _vulgar_fraction,
    ),
    Notation("~~56~~ 28", "  28", "what is struck out does not count", re.compile(r"~~[^~\n]{1,200}~~"), " ", "~~"),
    Notation(
        "<b>12</b>",
        " 12 ",
        "tags of HTML carry no value",
        re.compile(
            r"</?(?:b|i|u|p|br|em|strong|span|div|li|ul|ol|code|center|h[1-6])(?:\s[^<>]{0,80})?/?>", re.IGNORECASE
        ),
        " ",
        "<",
    ),
    Notation(
        "x**2",
        "x^2",
        "a power in Python, and not the beginning of bold text",
        re.compile(r"(?<=[\da-zA-Z)])(?<![a-zA-Z]{2})\*\*(?=[\d(-])(?![^*\n]{0,200}\*\*)"),
        "^",
        "**",
    ),
    Notation(
        "36^\\circ 30'",
        "36 degrees 30 arcminutes",
        "sixtieths of a degree",
        re.compile(rf"(\d{{1,4}})\s?{DEGREE.pattern}\s?(\d{{1,2}})\s?'(?![\w'])"),
        r"\1 degrees \2 arcminutes",
        "'",
    ),
    Notation(
        "5' 10\"",
        "5 feet 10 inches",
        "signs of feet and inches",
        re.compile(r"(\d(?<![\w.]\d)\d{0,2})\s?'\s?(\d{1,2}(?:\.\d+)?)\s?(?:\"|'')"),
        r"\1 feet \2 inches",
        "'",
    ),
    Notation("negative 5", "-5", "the sign as a word", re.compile(r"\b[Nn]egative\s(?=\$?\d)"), "-", "egative "),
    Notation(
        "minus 5",
        "-5",
        "the sign as a word, and not as in 7 minus 5",
        re.compile(r"\b(?<![\d)}$] )[Mm]inus\s(?=\$?\d)"),
        "-",
        "inus ",
    ),
    Notation(
        "5 degrees below zero",
        "-5 degrees",
        "the sign behind its number",
        re.compile(
            rf"(?<![\w.,-])(\d{{1,4}}(?:\.\d{{1,4}})?)(\s?\$?(?:{DEGREE.pattern}|degrees?)?\$?\s?(?:[CF]\b|Celsius|Fahrenheit)?)"
            r"\sbelow\s(?:zero|0)\b"
        ),
        r"-\1\2",
        " below ",
    ),
    Notation(
        "1h30",
        "1 hours 30 minutes",
        "hours and minutes in one word",
        re.compile(r"(\d(?<![\w.,]\d)\d?)\s?h\s?(\d{1,2})\s?(?:m|min)?(?!\w|\.\d)"),
        r"\1 hours \2 minutes",
        "h",
    ),
    *(
        Notation(
            written,
            read,
            "times of day in words",
            re.compile(rf"(?i:\b(?:a\s)?({part})\s(past|to)\s(\d{{1,2}}|{'|'.join(list(WORDS)[1:13])}))\b"),
            _time,
            part[1:],
        )
        for written, read, part in (("half past three", "3:30", "half"), ("quarter to four", "3:45", "quarter"))
    ),
    Notation(
        "3:15 in the morning",
        "3:15 a.m.",
        "the half of the day in words",
        re.compile(r"(\d(?<![\w.]\d)\d?(?::\d\d)?)(?:\so'clock)?\sin\sthe\smorning\b"),
        r"\1 a.m.",
        " morning",
    ),
    Notation(
        "3 o'clock in the afternoon",
        "3 p.m.",
        "the half of the day in words",
        re.compile(r"(\d(?<![\w.]\d)\d?(?::\d\d)?)(?:\so'clock)?\sin\sthe\s(?:afternoon|evening)\b"),
        r"\1 p.m.",
        " in the ",
    ),
    Notation(
        "下午3点15分",
        "3:15 p.m.",
        "times of day in Chinese",
        re.compile(r"(上午|早上|下午|晚上)?(\d{1,2})点(?:(\d{1,2})分|(半)|整)?"),
        _chinese_time,
        "点",
    ),
    Notation(
        "a hundred",
        "one hundred",
        "one of them",
        re.compile(r"[Aa](?<!\w[Aa])\s(?=(?:hundred|thousand|million|half|third|quarter)\b(?!\s(?:to|past)))"),
        "one ",
        "a ",
    ),
    Notation(
        "5 and 1/2",
        "5 1/2",
        "a mixed number",
        re.compile(r"(\d(?<![\w.,/]\d)\d{0,5})\sand\s(\d{1,3}/\d{1,3}\b)"),
        r"\1 \2",
        " and ",
    ),
    *(
        Notation(
            f"five and a {part}",
            f"5 1/{PARTS_OF[part]}",
            "a mixed number in words",
            re.compile(rf"(?i:(?<![\w.,/])(\d{{1,6}}|{'|'.join(list(WORDS)[1:21])})\sand\s(?:an?|one)[\s-]({part})\b)"),
            _mixed,
            part,
        )
        for part in ("half", "third", "quarter")
    ),
    Notation("12 (not 13)", "12 ", "what is denied", re.compile(r"\(not\s[^()\n]{1,40}\)"), "", "(not "),
    Notation(
        "√2 (approximately 1.414)",
        "√2 ",
        "an approximation behind the value",
        re.compile(r"\((?:approximately|approx\.?|about|roughly|≈|\\approx)\s?\$?\d[^()\n]{0,20}\)"),
        "",
        "(",
    ),
    Notation("零下5度", "-5度", "the sign in Chinese", re.compile(r"(?:零下|负)\s?(?=\d)"), "-"),
    Notation(
        "2516 in base eight",
        "2516_{8}",
        "the base in words",
        re.compile(
            rf"(?<![\w.])\(?(?P<digits>(?=[A-F]{{0,9}}\d)[\dA-F]{{1,40}})\)?\s?(?:\s|\(|\\text\s?\{{\s?)(?:in\s)?base[\s-]?"
            rf"(?P<base>\d{{1,2}}|{'|'.join(BASES)})\b[)}}]?"
        ),
        _in_base,
        "base",
    ),
    *(
        Notation(
            f"1011 in {name}",
            f"1011_{{{BASES[name]}}}",
            "the base by its name",
            re.compile(rf"(?<![\w.])(?P<digits>\d[\dA-F]{{0,40}})\s\(?(?:in\s)?(?P<base>{name})\b\)?"),
            _in_base,
            name,
        )
        for name in ("binary", "octal", "hexadecimal")
    ),
    Notation(
        "(2516)_{\\text{eight}}",
        "2516_{8}",
        "the base as a word or in brackets",
        re.compile(
            rf"(?<![\w.}}\\])(?:\((?P<bare>[\dA-F]{{2,40}})\)_|(?P<digits>[\dA-F]{{1,40}})_(?=\{{[\s(\\a-z]))\{{?\s?\(?"
            rf"(?:\\text\s?\{{)?(?:base\s)?(?P<base>\d{{1,2}}|{'|'.join(BASES)})\}}?\)?\s?\}}?"
        ),
        lambda match: f"{match['bare'] or match['digits']}_{{{BASES.get(match['base'], match['base'])}}}",
        "_",
    ),
    Notation(
        "2pi",
        "2π",
        "the number, and not the word, as in digits of pi",
        re.compile(r"(?:(?<=[\d)*/^{])|(?<=\d) |(?<![a-zA-Z\\])(?=pi\s?/\s?\d))pi(?![a-zA-Z])"),
        "π",
        "pi",
    ),
    Notation("2 π", "2π", "a product", re.compile(r"(?<=\d) π"), "π", "π"),
)
"""Read so in whole texts."""

NUMBER_GROUPS: tuple[Notation, ...] = (
    Notation(
        "9{,}500",
        "9,500",
        r"thousands apart as LaTeX writes them; also `9\,500` and `9,\!500`",
        re.compile(r"[{,\\~](?<=\d.)(?:(?<=\{),\}|(?<=,)\\!\s?|(?<=\\)[!,; ]\s?|(?<=~))(?=\d{3}(?!\d))"),
        ",",
    ),
    Notation(
        "1.234,56",
        "1234.56",
        "thousands apart by points, before a decimal comma",
        re.compile(r"\d(?<![\w.,]\d)\d{0,2}(?:\.\d{3})+,\d{1,2}(?![\w]|[.,]\d)"),
        lambda match: match[0].replace(".", "").replace(",", "."),
        ",",
    ),
    Notation(
        "1 234 567",
        "1234567",
        "thousands apart by spaces",
        re.compile(r"[0-9](?<![\w.,^/'].)[0-9]{0,2}(?: [0-9]{3}){2,}(?![\w/'-]|[ _][0-9]|,[0-9])"),
        _without(" "),
        " ",
    ),
    Notation(
        "12 500.",
        "12500.",
        "thousands apart by a space, if no word follows that 500 may count",
        re.compile(
            r"[1-9](?<![\w.,^/'}].)(?<!\d .)[0-9]{0,2} "
            r"(?:000(?![\w/'-]|[ _.,][0-9])|[0-9]{3}(?=[.,;:!?]?(?:\s*$|\s*\n|\$|\*|\})))"
        ),
        _without(" "),
        " ",
    ),
    Notation(
        "1'234",
        "1234",
        "thousands apart by apostrophes",
        re.compile(r"(?<![\w.,^/'])[0-9]{1,3}(?:'[0-9]{3})+(?![\w/'-]|[ _][0-9]|,[0-9])"),
        _without("'"),
        "'",
    ),
    Notation(
        "1_234_567",
        "1234567",
        "thousands apart by underscores",
        re.compile(r"(?<![\w.,^/'])[0-9]{1,3}(?:_[0-9]{3}){2,}(?![\w/'-]|[ _][0-9]|,[0-9])"),
        _without("_"),
        "_",
    ),
)
"""Numbers in one piece: read so outside of boxes, and in answers."""

IN_ANSWERS: tuple[Notation, ...] = (
    Notation(
        "3 x 4", r"3 \times 4", "a product", re.compile(r"(?<![\w.])(?!0x)(\d{1,9})\s?x\s?(?=\d)"), r"\1 \\times ", "x"
    ),
    Notation(
        "10–15",
        "10 to 15",
        "a range with a dash that is no minus sign",
        re.compile(r"^(\$?\d[\d.,]*%?)\s?(?:–|—|--|\\text\{\s?--?\s?\})\s?(\$?\d[\d.,]*%?)$"),
        r"\1 to \2",
    ),
    Notation("1 in 6", "1/6", "a share; also `1 out of 6`", re.compile(r"^(\d+)\s(?:in|out\sof)\s(\d+)$"), r"\1/\2"),
    Notation(r"\varnothing", r"\emptyset", "two signs of the empty set"),
    Notation("∅", r"\emptyset", "single sign"),
    Notation(" o'clock", "", "a time without its minutes"),
    Notation("{,}", ",", "a comma without the space behind it"),
    Notation("{:}", ":", "a colon without the space behind it"),
    Notation("–", "-", "a dash as a minus sign"),
    Notation("×", r"\times ", "single sign"),
    Notation("·", r"\cdot ", "single sign"),
    Notation("÷", "/", "single sign"),
    Notation("π", r"\pi ", "single sign"),
    Notation("∞", r"\infty ", "single sign"),
    Notation("∪", r"\cup ", "single sign"),
    Notation("∩", r"\cap ", "single sign"),
    Notation("∖", r"\setminus ", "single sign"),
    Notation("∈", r"\in ", "single sign"),
    Notation("ℝ", r"\mathbb{R}", "single sign"),
    Notation("≤", r"\le ", "single sign"),
    Notation("≥", r"\ge ", "single sign"),
    Notation("≠", r"\ne ", "single sign"),
    Notation(r"\%", "%", "LaTeX's percent sign"),
    Notation("infinity", r"\infty", "in words"),
    Notation(
        "C(10, 3)",
        r"\binom{10}{3}",
        "combinations",
        re.compile(r"\bC\((\d{1,4}),\s?(\d{1,4})\)"),
        r"\\binom{\1}{\2}",
        "C(",
    ),
    Notation(
        "[[1, 2], [3, 4]]",
        r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}",
        "a matrix by its rows",
        re.compile(r"^\[\[([^\[\]]{1,60})\](?:,\s?\[([^\[\]]{1,60})\])(?:,\s?\[([^\[\]]{1,60})\])?\]$"),
        _matrix,
        "[[",
    ),
    Notation(r"\pounds", "£", "LaTeX's pound sign"),
    Notation(r"\AA", "Å", "LaTeX's sign of the angstrom"),
    Notation("np.", "\\", "functions of NumPy"),
    Notation(r"\dfrac", r"\frac", "a fraction of another size"),
    Notation(r"\tfrac", r"\frac", "a fraction of another size"),
    Notation(r"\cfrac", r"\frac", "a fraction of another size"),
    Notation(r"\langle", "(", "brackets of a vector"),
    Notation(r"\rangle", ")", "brackets of a vector"),
    Notation(r"\mathrm{e}", "e", "Euler's number upright"),
    Notation(r"\mathrm{i}", "i", "the imaginary unit upright"),
    Notation(
        r"\textcolor{red}{7}",
        "{7}",
        "looks carry no value",
        re.compile(
            r"\\(?:(?:textcolor|color)\s?\{[a-zA-Z]{1,20}\}"
            r"|(?:underline|bm|mathit|large|Large|huge|Huge|small)(?![a-zA-Z]))\s?"
        ),
        "",
        "\\",
    ),
    Notation(
        "25 percent",
        "25%",
        "the sign as a word",
        re.compile(r"(?<=[\d.}\])])\s?(?:percent\b|per\scent\b|\\text\s?\{\s?percent\s?\})"),
        "%",
        "cent",
    ),
    Notation(
        "$7M",
        "7 million",
        "money in thousands, millions or billions",
        re.compile(rf"^\s*\\?[$€£¥₹]\s?(\d[\d.,]*)\s?({'|'.join(SCALE_LETTERS)})[\s.]*$"),
        lambda match: f"{match[1]} {SCALE_LETTERS[match[2]]}",
    ),
    Notation(r"2\! x", "2x", "no space", re.compile(r"\\!\s?"), "", r"\!"),
    Notation(
        r"2\quad 3",
        "2  3",
        "spaces and sizes",
        re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\displaystyle(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])"),
        " ",
    ),
    Notation(
        r"\$12",
        "12",
        "signs of currencies, formulas and bold text carry no value",
        re.compile(
            r"(?:\b(?:US|HK)\s?)?\\?\$|\\\(|\\\)|\\\[|\\\]|€|£|¥|₹|¢|\*\*|`|^(?:USD|EUR|GBP|RMB|CNY|Rs\.?)\s?(?=[\d-])"
        ),
        "",
    ),
    Notation(
        r"48^\circ",
        "48",
        r"degrees count in the argument of a trigonometric function alone",
        re.compile(
            rf"(?P<sine>{SINE.pattern}\s?(?:\([^()]{{0,60}}\)|[({{]?\s?[-+]?{PLAIN_ANGLE}\s?{DEGREE.pattern}))"
            rf"|{DEGREE.pattern}(?:\s?[CF](?![a-zA-Z]))?"
        ),
        lambda match: DEGREE.sub(DEGREE_SIGN, match[0]) if match["sine"] else "",
    ),
    Notation(
        "3万",
        r"3 \times 10^{4}",
        "Chinese scales",
        re.compile(r"(?<=\d)\s?(万亿|[千万亿])"),
        lambda match: rf" \times 10^{{{CHINESE_SCALES[match[1]]}}}",
    ),
    Notation(
        "3 million",
        r"3 \times 10^{6}",
        "scales in words",
        re.compile(
            rf"(?<=\d)\s*(?:\\(?:text|mathrm|mbox)\{{\s*)?((?:(?:{'|'.join(SCALES)})\b\s*)+)([^{{}},;]*)\}}?",
            re.IGNORECASE,
        ),
        _power,
    ),
    Notation(r"\approx 5", "5", "a sign before the value", re.compile(r"^\s*(?:\\approx(?![a-zA-Z])|≈|=)\s*"), ""),
)
"""Read so in answers."""

IN_BARE_ANSWERS: tuple[Notation, ...] = (
    Notation(
        "21st",
        "21",
        "ordinal numbers",
        re.compile(r"(?<=\d)(?:st|nd|rd|th|\^\s?\{?\s?\\(?:text|mathrm)\s?\{(?:st|nd|rd|th)\}\s?\}?)$"),
        "",
    ),
    Notation(
        r"2 \pmod{5}",
        "2",
        "the modulus of a remainder, unless the answer is a congruence",
        re.compile(r"(?<=[\d\s])\s?\(?\\?(?:p?mod|bmod)\s?\{?\d+\}?\)?$"),
        lambda match: match[0] if "equiv" in match.string else "",
        "mod",
    ),
    Notation(
        "√2",
        r"\sqrt{2}",
        "the root's single sign",
        re.compile(r"√\s?(?:(\d{1,9}|[a-z])|\(([^()]{1,40})\)|\{([^{}]{1,40})\})"),
        lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}",
        "√",
    ),
)
"""Read so at the end, without quotation marks and full stops."""

NOTATIONS: Mapping[str, tuple[Notation, ...]] = {
    "text": IN_TEXTS,
    "number": NUMBER_GROUPS,
    "answer": IN_ANSWERS,
    "bare answer": IN_BARE_ANSWERS,
}
"""By where they are read so, in the order in which they are applied."""
_ASCII = {"ascii text": tuple(one for one in IN_TEXTS if one.written.isascii())}
_STEPS = {where: [one.step for one in table] for where, table in {**NOTATIONS, **_ASCII}.items()}


def _applied(text: str, steps: list[Step]) -> str:
    """A text with some notations read. It has no calls but those that change it: every answer comes through here."""
    for sign, sub, read in steps:
        if sign in text:
            text = sub(read, text) if sub else text.replace(sign, read)  # type: ignore[arg-type]
    return text


def plain_text(text: str) -> str:
    """Text with ASCII digits and punctuation in place of other forms of them, and with the notations of texts read."""
    is_ascii = text.isascii()
    if not is_ascii:
        text = text.translate(ALIKE)
    return _applied(text, _STEPS["ascii text" if is_ascii else "text"])


def join_digits(text: str) -> str:
    """Text with numbers such as `12 500` and `12{,}500` in one piece."""
    return _applied(text, _STEPS["number"])


@lru_cache(CACHED)
def clean(text: str) -> str:
    """Answer without parts that carry no value: spacing, currency, degrees, units in `\\text{}`, full stops.

    Degrees remain, as `°`, where a trigonometric function takes them.
    """
    if len(text) > MAX_CLEANED:
        return text.strip()
    text = join_digits(plain_text(text))
    text = _applied(text, _STEPS["answer"])
    text = text.strip().strip("\"'").rstrip(" .,;:。、\\")
    text = _applied(text, _STEPS["bare answer"])
    if whole := WHOLLY_TEXT.fullmatch(text):
        text = whole[1].strip(" .")
        return r"\emptyset" if NOTHING.fullmatch(text) else text
    if NOTHING.fullmatch(text):
        return r"\emptyset"
    while (shorter := REMARK.sub("", CHINESE_UNIT.sub("", TEXT_UNIT.sub("", text))).rstrip()) != text:
        if LETTER.fullmatch(shorter):  # `(B) \\text{east}` is a choice, not a quantity
            break
        text = shorter
    return text
