r"""Plain numbers as people and models write them: `1,234`, `\$6`, `25\%`, `12\frac{3}{5}`, `4.5e33`, `18 eggs`.

Most answers of school mathematics are plain numbers. Parsed here, exactly and without a computer algebra system, they
are compared in microseconds; anything else goes to `regretless.labeling.grading.grader`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

APPROXIMATION = Fraction(1, 10_000)
"""Relative tolerance of a decimal for a gold value that is not an integer (as in Qwen2.5-Math's evaluation)."""
MAX_LENGTH, MAX_EXPONENT = 300, 400
MAX_CLEANED = 2000
"""Longer texts are not parsed: no answer is that long, and the patterns take quadratic time."""

NO_SPACE = re.compile(r"\\!\s?|(?<=\d)\\,(?=\d{3})")
SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\displaystyle(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])")
DEGREE_SIGN = "°"
DEGREE = re.compile(r"(?:\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degrees?(?![a-zA-Z])|°)")
DEGREES = re.compile(rf"{DEGREE.pattern}(?:\s?[CF](?![a-zA-Z]))?")
SINE = re.compile(r"(?<![a-zA-Z])\\?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])\s?(?:\^\s?(?:\d|\{\s?\d\s?\}))?")
"""A trigonometric function, also with a power; its inverse takes no angle."""
PLAIN_ANGLE = r"(?:\\frac\s?\{\d{1,4}\}\s?\{\d{1,4}\}|\d{1,9}(?:\.\d{1,9})?)"
ANGLE = re.compile(
    rf"(?P<sine>{SINE.pattern}\s?(?:\([^()]{{0,60}}\)|[({{]?\s?[-+]?{PLAIN_ANGLE}\s?{DEGREE.pattern}))|{DEGREES.pattern}"
)
"""The argument of a trigonometric function, in which degrees count, or degrees elsewhere, which do not."""
APPEARANCE = re.compile(
    r"\\(?:(?:textcolor|color)\s?\{[a-zA-Z]{1,20}\}|(?:underline|bm|mathit|large|Large|huge|Huge|small)(?![a-zA-Z]))\s?"
)
LEADING = re.compile(r"^\s*(?:\\approx(?![a-zA-Z])|≈|=)\s*")
CURRENCY = re.compile(
    r"(?:\b(?:US|HK)\s?)?\\?\$|\\\(|\\\)|\\\[|\\\]|€|£|¥|₹|¢|\*\*|`|^(?:USD|EUR|GBP|RMB|CNY|Rs\.?)\s?(?=[\d-])"
)
WHOLLY_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|boldsymbol|mbox|rm|bf)\s?\{([^{}]*)\}"
)
PARTS = "half third quarter fifth sixth seventh eighth ninth tenth fourth twentieth hundredth thousandth millionth"
PARTS_OF = dict(zip(PARTS.split(), (2, 3, 4, 5, 6, 7, 8, 9, 10, 4, 20, 100, 1000, 10**6), strict=True))
# Square meters are also called squared.
FACTOR = re.compile(r"(?i:(?:squared|cubed|factorial)\b(?!\s[a-z]))")
"""Words behind a number that change it and are no units."""
# A single letter in roman type can be a unit (m, s), but also the imaginary unit or a variable, which must stay.
TEXT_UNIT = re.compile(
    r"(?<=[\w})\]%])(?:[\s/]|\\cdot)*(?:\\mu\s?)?\\(?:text|textbf|textrm|textnormal|mathrm|mbox|operatorname)\s?\{"
    rf"(?!\s?[a-fiknx-z]\s?\}})(?!\s?{FACTOR.pattern})[^{{}}]*(?:\{{-?\d+\}}[^{{}}]*){{0,3}}\}}(?:\s?\^\s?(?:\{{-?\d+\}}|\d))?$"
)
SCALE_LETTERS = {"M": "million", "MM": "million", "mn": "million", "B": "billion", "bn": "billion"}
SCALE_LETTERS |= {"K": "thousand", "k": "thousand"}
AMOUNT = re.compile(rf"^\s*\\?[$€£¥₹]\s?(\d[\d.,]*)\s?({'|'.join(SCALE_LETTERS)})[\s.]*$")
"""Money in thousands, millions or billions, as in `$7M`."""
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
CHINESE_SCALE = re.compile(r"(?<=\d)\s?(万亿|[千万亿])")
CHINESE_SCALES = {"千": 3, "万": 4, "亿": 8, "万亿": 12}
CHINESE_UNIT = re.compile(r"(?<=[\d}%)])\s?[\u4e00-\u9fff]{1,12}[²³]?$")
PERCENT = re.compile(r"(?<=[\d.}\])])\s?(?:percent\b|per\scent\b|\\text\s?\{\s?percent\s?\})")
# Words in brackets after a number, which are not a factor.
REMARK = re.compile(
    r"(?<=[\d}%])\s?\((?:(?:[mck]?m|[mk]?g|s|min|h|ft|in|lb|oz|L|ml)(?:\^[23])?|[A-Za-z]{3,20}(?:\s[A-Za-z]{1,20}){0,8}|[\u4e00-\u9fff]{1,20}|\\text\s?\{[^{}()]*\})\)$"
)
FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0xFFE5: "¥",
    0x3000: " ",
    0x00A0: " ",
    0x202F: " ",
    **dict.fromkeys(range(0x2002, 0x200B), " "),  # thin and wide spaces
}
# Signs that look like others and mean the same.
ALIKE = FULL_WIDTH | {ord(sign): other for sign, other in zip("−⋅∗∕⁄✕✖", "-·*//××", strict=True)}
RAISED = {sign: unicodedata.normalize("NFKC", sign).replace("−", "-") for sign in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"}
SUPERSCRIPT = re.compile(rf"(?<=[\d)\]}}])[{''.join(RAISED)}]+")
"""An exponent of a number or a bracket; that of a letter may be a unit's, as in m s⁻¹."""
VULGAR = {sign: unicodedata.normalize("NFKC", sign).split("⁄") for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
VULGAR_FRACTION = re.compile(rf"[{''.join(VULGAR)}](?P<factor>(?=[a-zA-Zπ(\\]))?")
PI = re.compile(r"(?:(?<=[\d)*/^{])|(?<=\d ))pi(?![a-zA-Z])")
"""The number, but not the word, as in digits of pi."""
TAGS = re.compile(
    r"</?(?:b|i|u|p|br|em|strong|span|div|li|ul|ol|code|center|h[1-6])(?:\s[^<>]{0,80})?/?>", re.IGNORECASE
)
STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th|\^\s?\{?\s?\\(?:text|mathrm)\s?\{(?:st|nd|rd|th)\}\s?\}?)$")
ONE_IN = re.compile(r"(\d+)\s(?:in|out\sof)\s(\d+)")
MODULUS = re.compile(r"(?<=[\d\s])\s?\(?\\?(?:p?mod|bmod)\s?\{?\d+\}?\)?$")
PYTHON_POWER = re.compile(r"(?<=[\da-zA-Z)])(?<![a-zA-Z]{2})\*\*(?=[\d(-])(?![^*\n]{0,200}\*\*)")
"""`x**2`, and not the beginning of bold text."""
FEET_AND_INCHES = re.compile(r"(?<![\w.])(\d{1,3})\s?['′]\s?(\d{1,2}(?:\.\d+)?)\s?(?:[\"″”]|'')")
NEGATIVE = re.compile(r"\b(?:[Nn]egative|(?<![\d)}$] )[Mm]inus)\s(?=\$?\d)")
# Both are searched in whole responses. One pattern for both would take twice the time.
SEPARATED = re.compile(r"(?<=\d)(?:\{,\}|,?\\!\s?|\\[,;]\s?)(?=\d{3}(?!\d))")
"""Thousands apart as LaTeX writes them: `9{,}500`, `9\\,500`, `9,\\!500`."""
EUROPEAN = re.compile(r"(?<![\w.,])\d{1,3}(?:\.\d{3})+,\d{1,2}(?![\w]|[.,]\d)")
"""Thousands apart by points, before a decimal comma: `1.234,56`."""
HAS_GROUPS = re.compile(r" (?<=[0-9] )[0-9]{3}"), re.compile(r"[_'](?<=[0-9].)[0-9]{3}")
GROUPED_DIGITS = re.compile(r"(?<![\w.,^/'])\d{1,3}(?:(?:[ _]\d{3}){2,}|(?:'\d{3})+)(?![\w/'-]|[ _]\d|,\d)")
"""Thousands apart by spaces, as in 1 234 567, or by apostrophes or underscores."""
UNIT_LETTERS = "g|m|s|h|L|l|J|N|W|V|A"
SCALE = re.compile(
    rf"(?<=\d)\s*(?:\\(?:text|mathrm|mbox)\{{\s*)?((?:(?:{'|'.join(SCALES)})\b\s*)+)([^{{}},;]*)\}}?",
    re.IGNORECASE,
)
REPLACEMENTS = {
    r"\varnothing": r"\emptyset",
    "∅": r"\emptyset",
    "{,}": ",",
    "{:}": ":",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    r"\%": "%",
    "np.": "\\",
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\langle": "(",
    r"\rangle": ")",
    "\\mathrm{e}": "e",
    "\\mathrm{i}": "i",
}

TIMES = re.compile(r"(?<![\w.])(\d{1,9})\s?x\s?(?=\d)")
DASHED = re.compile(r"^(\$?\d[\d.,]*%?)\s?(?:–|—|--|\\text\{\s?--?\s?\})\s?(\$?\d[\d.,]*%?)$")
"""A range with a dash that is no minus sign."""
NOTHING = re.compile(r"(?i:(?:the\s)?empty\sset|no\s(?:real\s|such\s)?(?:solutions?|values?|numbers?)|none)")
LETTER = re.compile(r"\(?[A-J][).:]?|\\text[a-z]{0,2}\{\([A-J]\)\}")
ROOT = re.compile(r"√\s?(?:(\d{1,9}|[a-z])|\(([^()]{1,40})\)|\{([^{}]{1,40})\})")
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
WORDS = {word: value for value, word in enumerate(f"{ONES} eighteen nineteen".split())}
DECADES = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * value for value, word in enumerate(DECADES.split(), 2)}
UNDER_100 = rf"(?:(?:{'|'.join(TENS)})(?:[-\s](?:{'|'.join(list(WORDS)[1:10])}))?|(?:{'|'.join(WORDS)}))"
UNDER_1000 = rf"(?:{UNDER_100}(?:\shundred(?:\s(?:and\s)?{UNDER_100})?)?)"
LARGE = "|".join(list(SCALES)[1:])
PART = rf"(?:{'|'.join(PARTS_OF)}|halve)s?"
"""Part of a whole: half, thirds, quarters."""
NUMBER_WORDS = re.compile(
    rf"(?P<sign>(?:negative|minus)\s)?(?P<number>{UNDER_1000}(?:\s(?:{LARGE})(?:,?\s(?:and\s)?{UNDER_1000})?){{0,5}})"
    rf"(?:[-\s](?P<part>{PART}))?(?:\s(?P<unit>[a-z]{{3,20}}))?(?:\s?\((?P<digits>[^()]{{1,40}})\))?",
    re.IGNORECASE,
)
"""Also with digits behind, as in `five (5)`."""

GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,5},\d{3}(?!\d)"
"""An integer with commas, also in groups of two, as in 1,00,000."""
DOZENS = re.compile(rf"(?i:(an?|{'|'.join(list(WORDS)[1:13])})\sdozen(?:\s[a-z]{3, 12})?)")
CHINESE_DIGITS = "零一二三四五六七八九"
CHINESE_NUMBER = re.compile(rf"([{CHINESE_DIGITS}十百千万]{{1,12}})[个元只人天年岁块本支件]?")
CHINESE_PART = re.compile(rf"([{CHINESE_DIGITS}十百千万]{{1,6}})分之([{CHINESE_DIGITS}十百千万]{{1,6}})")
DECIMAL = rf"(?:{GROUPED}|\d+)?(?:\.\d*)?"
EXPONENT = r"(?:[eE]([-+]?\d{1,4})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d)))?"
SIMPLE = re.compile(rf"([-+]?)\s*({DECIMAL}){EXPONENT}")
REPEATING = re.compile(r"([-+]?\d{0,40})\.(\d{0,40})\\overline\s?\{(\d{1,40})\}")
HEXADECIMAL = re.compile(r"0x[\da-fA-F]+")
POWER_OF_TEN = re.compile(r"([-+]?)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d))")
RATIO = re.compile(
    rf"([-+]?)\s*(?:(\d+)\s*)?\\frac\s*(?:\{{\s*([-+]?{DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({DECIMAL})\s*\}}|(\d))"
)
SLASH = re.compile(rf"([-+]?)\s*(?:(\d+)\s+)?({DECIMAL})\s*/\s*({DECIMAL})")
UNIT_WORDS = re.compile(
    r"(?<=[\d.})])(?:\s*(?:[mcdkμµn]m|[kmμµ]g|m[lL]|cL|ft|lbs?|oz|yd|mi|hrs?|mins?|ms|secs?|mph|kmh|kph|rpm|[kMGT]B|[kMG]?Hz|[kM]?Pa|kJ|[kM]W|kWh|mol"
    r"|USD|EUR|cents?|dollars?)|\s+(?:in|sq|cu|a(?=\s[a-z]{3})|am|pm|[A-Za-z]{3,}))(?![A-Za-z])"
    rf"(?:(?:\s+|\s?/\s?|-)[A-Za-z]+)*\.?(?:\s?\^\s?\{{?-?[123]\}}?|[²³])?(?:\s?/\s?[a-z]+(?:\s?\^\s?\{{?[23]\}}?|[²³])?)?$"
    rf"|(?<=[\d.}})])\s+(?:{UNIT_LETTERS})(?:\s?\^\s?\{{?[23]\}}?|[²³])?(?:\s?/\s?[a-z]+(?:\s?\^\s?\{{?[23]\}}?|[²³])?)?$"
)
IN_BRACKETS = re.compile(r"\(([^(),]*)\)|\{([^{},]*)\}")
UNIT_NAMES = re.compile(
    r"(?<=[\w})])\s+(?:(?:square|cubic|sq\.?)\s)?(?:units?|[mcdk]m|m|ft|feet|foot|in|inch(?:es)?|yards?|miles?|meters?|metres?"
    r"|(?:centi|milli|kilo)met(?:er|re)s?|k?g|(?:kilo)?grams?|pounds?|lit(?:er|re)s?|m?L|h|hours?|s|seconds?|min|minutes?|days?|weeks?"
    r"|months?|years?|degrees?|radians?|dollars?|cents?|euros?|ways?)(?:\s?\^\s?\{?[23]\}?|[²³])?$"
)
"""Units after an expression that is not a plain number: only known words."""
VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
NOT_UNITS = {"and", "or", "pi", "mod", "times", "over", "sqrt", "sin", "cos", "tan", "log", "exp", "plus", "minus"}


@dataclass(frozen=True)
class Numeral:
    """A number and its notation."""

    value: Fraction
    place: Fraction | None = None
    """Value of one unit in the last digit of a decimal; None for integers and fractions, which are exact."""
    percent: bool = False
    """True if a percent sign followed it; `value` is the number before the sign."""


def plain_text(text: str) -> str:
    """Text with ASCII digits and punctuation in place of other forms of them: full-width ones, superscripts, `½`."""
    if not text.isascii():
        text = SUPERSCRIPT.sub(
            lambda match: f"^{{{''.join(RAISED[sign] for sign in match[0])}}}", text.translate(ALIKE)
        )
        text = VULGAR_FRACTION.sub(_vulgar_fraction, text)
    if "~~" in text:
        text = STRUCK.sub(" ", text)
    if "<" in text:
        text = TAGS.sub(" ", text)
    if "**" in text:
        text = PYTHON_POWER.sub("^", text)
    if "'" in text or "′" in text:
        text = FEET_AND_INCHES.sub(r"\1 feet \2 inches", text)
    if "egative " in text or "inus " in text:
        text = NEGATIVE.sub("-", text)
    if "pi" in text:
        text = PI.sub("π", text)
    return re.sub(r"(?<=\d) π", "π", text) if "π" in text else text


def join_digits(text: str) -> str:
    """Text with numbers such as `12 500` and `12{,}500` in one piece."""
    if "\\" in text or "{,}" in text:
        text = SEPARATED.sub(",", text)
    if "," in text and "." in text:
        text = EUROPEAN.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)
    if any(pattern.search(text) for pattern in HAS_GROUPS):
        return GROUPED_DIGITS.sub(lambda match: re.sub("[ _']", "", match[0]), text)
    return text


def _vulgar_fraction(match: re.Match[str]) -> str:
    above, below = VULGAR[match[0]]
    if match["factor"] is not None:
        return rf"\frac{{{above}}}{{{below}}}"
    before = match.string[match.start() - 1 : match.start()]
    return f"{{{above}/{below}}}" if before == "^" else f"{' ' if before.isdigit() else ''}{above}/{below}"


def clean(text: str) -> str:
    """Answer without parts that carry no value: spacing, currency, degrees, units in `\\text{}`, full stops.

    Degrees remain, as `°`, where a trigonometric function takes them.
    """
    if len(text) > MAX_CLEANED:
        return text.strip()
    text = join_digits(plain_text(text))
    text = TIMES.sub(r"\1 \\times ", text)
    text = DASHED.sub(r"\1 to \2", text)
    if portion := ONE_IN.fullmatch(text):
        text = f"{portion[1]}/{portion[2]}"
    for old, new in REPLACEMENTS.items():
        text = text.replace(old, new)
    text = PERCENT.sub("%", APPEARANCE.sub("", text))
    text = AMOUNT.sub(lambda match: f"{match[1]} {SCALE_LETTERS[match[2]]}", text)
    text = CURRENCY.sub("", SPACING.sub(" ", NO_SPACE.sub("", text)))
    text = ANGLE.sub(lambda match: DEGREE.sub(DEGREE_SIGN, match[0]) if match["sine"] else "", text)
    text = CHINESE_SCALE.sub(lambda match: rf" \times 10^{{{CHINESE_SCALES[match[1]]}}}", text)
    text = LEADING.sub("", SCALE.sub(_power, text)).strip().strip("\"'").rstrip(" .,;:。、\\")
    text = MODULUS.sub("", ORDINAL.sub("", text)) if "equiv" not in text else text
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2] or match[3]}}}", text)
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


def without_unit(text: str) -> str:
    """A cleaned expression such as `12 \\sqrt{3} feet` without its unit; unchanged if letters may be variables."""
    unit = UNIT_NAMES.search(text)
    return text[: unit.start()] if unit and not VARIABLE.search(text[: unit.start()]) else text


def _power(match: re.Match[str]) -> str:
    unit = match[2].strip()
    if re.search(r"^[-+*/=^]|(?<!\^)\d", unit) or NUMBER_WORDS.match(unit):
        return match[0]  # 2 thousand 500
    exponent = sum(SCALES[word] for word in match[1].lower().split())
    return rf" \times 10^{{{exponent}}}" + (rf"\text{{{unit}}}" if unit else "")


def read_number(text: str) -> Numeral | None:
    """The plain number that a cleaned text states, without units; None if it is anything else."""
    if len(text) > MAX_LENGTH:
        return None
    if text[:1].isalpha() and (number := _read_in_words(text)):
        return number
    unit = UNIT_WORDS.search(text)
    if unit and not NOT_UNITS & set(re.findall(r"[a-z]+", unit[0].lower())) and not FACTOR.match(unit[0].strip()):
        text = text[: unit.start()]
    if brackets := IN_BRACKETS.fullmatch(text):
        text = brackets[1] or brackets[2]
    percent = text.endswith("%")
    text = text.rstrip("% ")
    if repeating := REPEATING.fullmatch(text):
        whole, fixed, period = repeating.groups()
        value = Fraction(int(fixed + period) - int(fixed or 0), (10 ** len(period) - 1) * 10 ** len(fixed))
        value += abs(int(whole)) if whole.strip("+-") else 0
        return Numeral(-value if whole.startswith("-") else value, percent=percent)
    if HEXADECIMAL.fullmatch(text):  # for algebra it would be a product with 0
        return Numeral(Fraction(int(text, 16)))
    plain = _read_simple(text) or _read_ratio(text)
    return Numeral(plain.value, plain.place, percent) if plain else None


def _read_in_words(text: str) -> Numeral | None:
    if dozens := DOZENS.fullmatch(text):
        return Numeral(Fraction(12 * WORDS.get(dozens[1].lower(), 1)))
    if words := NUMBER_WORDS.fullmatch(text):
        return _read_words(words)
    if part := CHINESE_PART.fullmatch(text):
        return Numeral(Fraction(_read_chinese(part[2]), _read_chinese(part[1]) or 1))
    chinese = CHINESE_NUMBER.fullmatch(text)
    return Numeral(Fraction(_read_chinese(chinese[1]))) if chinese else None


def _read_chinese(text: str) -> int:
    total = section = digit = 0
    for sign in text:
        if sign in CHINESE_DIGITS:
            digit = CHINESE_DIGITS.index(sign)
        elif sign == "万":
            total, section, digit = (section + digit) * 10_000, 0, 0
        else:
            section, digit = section + (digit or 1) * {"十": 10, "百": 100, "千": 1000}[sign], 0
    return total + section + digit


def _read_words(words: re.Match[str]) -> Numeral | None:
    total = group = 0
    for word in re.findall("[a-z]+", words["number"].lower()):
        if word == "hundred":
            group *= 100
        elif word in SCALES:
            total, group = total + group * 10 ** SCALES[word], 0
        else:
            group += WORDS.get(word, TENS.get(word, 0))
    value = Fraction(total + group)
    unit = (words["unit"] or "").lower()
    if unit in NOT_UNITS | SCALES.keys() or NUMBER_WORDS.fullmatch(unit) or FACTOR.fullmatch(unit):
        return None
    if words["part"]:
        part = words["part"].lower().replace("halve", "half")
        if (value == 1) == part.endswith("s"):  # twenty third is an ordinal number
            return None
        size = PARTS_OF[part.removesuffix("s")]
        value /= 1 if size == 4 and value >= size else size  # ten quarters are coins
    value *= -1 if words["sign"] else 1
    numeral = Numeral(value, percent=unit == "percent")
    if words["digits"] and ((digits := read_number(words["digits"])) is None or digits.value != value):
        return None
    return numeral


def _read_simple(text: str) -> Numeral | None:
    if match := POWER_OF_TEN.fullmatch(text):
        sign, digits, exponent = match[1], "1", match[2] or match[3]
    elif (match := SIMPLE.fullmatch(text)) and any(character.isdigit() for character in match[2]):
        sign, digits, exponent = match[1], match[2].replace(",", ""), match[3] or match[4] or match[5] or "0"
    else:
        return None
    if abs(int(exponent)) > MAX_EXPONENT:
        return None
    whole, point, decimals = digits.partition(".")
    place = Fraction(10) ** (int(exponent) - len(decimals))
    value = int(whole + decimals) * place
    # `2 \times 10^5` is an exact integer; `2e5` and `2.0 \times 10^5` are notations of measured values.
    is_decimal = bool(point) or "e" in text.lower()
    return Numeral(-value if sign == "-" else value, place if is_decimal else None)


def _read_ratio(text: str) -> Numeral | None:
    if match := RATIO.fullmatch(text):
        sign, whole, above, below = match[1], match[2], match[3] or match[4], match[5] or match[6]
    elif match := SLASH.fullmatch(text):
        sign, whole, above, below = match[1], match[2], match[3], match[4]
    else:
        return None
    numerator, denominator = _read_simple(above or ""), _read_simple(below or "")
    if numerator is None or denominator is None or denominator.value == 0:
        return None
    value = numerator.value / denominator.value + int(whole or 0)
    return Numeral(-value if sign == "-" else value)


def equal_numbers(gold: Numeral, extracted: Numeral) -> bool:
    """True if `extracted` states the gold number.

    Integers and fractions must agree exactly; `27.0` is also an integer. If either number is a decimal, a gold value
    that is not an integer has a relative tolerance of 1e-4, but at most half a unit of the gold's last digit. `25%`
    equals 25, 25 % and 0.25; below 1, the sign cannot be left out.
    """
    if gold.percent == extracted.percent:
        return _close(gold, extracted.value, extracted.place)
    whole, share = (
        (extracted.value, extracted.value / 100) if extracted.percent else (extracted.value, extracted.value * 100)
    )
    if _close(gold, share, extracted.place):
        return True
    return abs(gold.value) >= 1 and _close(gold, whole, extracted.place)  # 0.5 % is not a half


def _close(gold: Numeral, value: Fraction, place: Fraction | None) -> bool:
    is_integer = gold.value.denominator == 1 and (gold.place is None or gold.place < 1)
    if is_integer or (gold.place is None and place is None):
        return value == gold.value
    tolerance = abs(gold.value) * APPROXIMATION
    if gold.place is not None:
        tolerance = min(tolerance, gold.place / 2)
    return abs(value - gold.value) <= tolerance
