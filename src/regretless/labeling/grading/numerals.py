r"""Plain numbers as people and models write them: `1,234`, `\$6`, `25\%`, `12\frac{3}{5}`, `4.5e33`, `18 eggs`.

Most answers of school mathematics are plain numbers. Parsed here, exactly and without a computer algebra system, they
are compared in microseconds; anything else goes to `regretless.labeling.grading.grader`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

CACHED = 4096
"""Texts whose reading is kept: responses to a prompt have one gold answer, and most of them few different answers."""
APPROXIMATION = Fraction(1, 10_000)
"""Relative tolerance of a decimal for a gold value that is not an integer (as in Qwen2.5-Math's evaluation)."""
MAX_LENGTH, MAX_EXPONENT = 300, 400

PARTS = "half third quarter fifth sixth seventh eighth ninth tenth fourth twentieth hundredth thousandth millionth"
PARTS_OF = dict(zip(PARTS.split(), (2, 3, 4, 5, 6, 7, 8, 9, 10, 4, 20, 100, 1000, 10**6), strict=True))
# Square meters are also called squared.
FACTOR = re.compile(r"(?i:(?:squared|cubed|factorial)\b(?!\s[a-z]))")
"""Words behind a number that change it and are no units."""
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNIT_LETTERS = "g|m|s|h|L|l|J|N|W|V|A"

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
DOZENS = re.compile(rf"(?i:(an?|{'|'.join(list(WORDS)[1:13])})\sdozen(?:\s[a-z]{{3,12}})?)")
CHINESE_DIGITS = "零一二三四五六七八九"
CHINESE_NUMBER = re.compile(
    rf"([{CHINESE_DIGITS}十百千万]{{1,12}})(?:[个元只人天年岁块本支件次种条张台辆名米]|小时|分钟|厘米|千米|公里|平方米)?"
)
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
    r"(?<=[\d.})])(?:\s*(?:[mcdkμµnp]m|Å|[kmμµ]g|m[lL]|cL|ft|lbs?|oz|yd|mi|hrs?|mins?|ms|secs?|mph|kmh|kph|rpm|[kMGT]B|[kMG]?Hz|[kM]?Pa|kJ|[kM]W|kWh|mol"
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


def without_unit(text: str) -> str:
    """A cleaned expression such as `12 \\sqrt{3} feet` without its unit; unchanged if letters may be variables."""
    unit = UNIT_NAMES.search(text)
    return text[: unit.start()] if unit and not VARIABLE.search(text[: unit.start()]) else text


@lru_cache(CACHED)
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
