r"""Quantities with units, and times of day: `2 hours and 30 minutes`, `5 ft 10 in`, `\$5.50`, `60\text{ km/h}`."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from regretless.labeling.grading.forms import TEXT_COMMAND
from regretless.labeling.grading.numerals import UNDER_100, Numeral, equal_numbers, read_number

POUND, INCH, GALLON = Fraction(45_359_237, 100_000), Fraction(254, 10_000), Fraction(1)
UNITS: Mapping[str, Mapping[str, Fraction]] = {
    "time": {
        "ns nanosecond": Fraction(1, 10**9),
        "µs μs microsecond": Fraction(1, 10**6),
        "ms millisecond": Fraction(1, 1000),
        "s sec second 秒": Fraction(1),
        "min minute 分钟": Fraction(60),
        "h hr hour 小时": Fraction(3600),
        "day 天": Fraction(86_400),
        "week 周 星期": Fraction(604_800),
    },
    "years": {"month": Fraction(1, 12), "year 年": Fraction(1), "decade": Fraction(10), "century": Fraction(100)},
    "length": {
        "pm picometer picometre": Fraction(1, 10**12),
        "Å angstrom": Fraction(1, 10**10),
        "nm nanometer nanometre": Fraction(1, 10**9),
        "µm μm micrometer micrometre micron": Fraction(1, 10**6),
        "mm millimeter millimetre 毫米": Fraction(1, 1000),
        "cm centimeter centimetre 厘米": Fraction(1, 100),
        "m meter metre 米": Fraction(1),
        "km kilometer kilometre 千米 公里": Fraction(1000),
        "in inch inches": INCH,
        "ft foot feet": 12 * INCH,
        "yd yard": 36 * INCH,
        "mi mile": 63_360 * INCH,
    },
    "mass": {
        "mg milligram": Fraction(1, 1000),
        "g gram 克": Fraction(1),
        "kg kilogram kilo 千克 公斤": Fraction(1000),
        "oz ounce": POUND / 16,
        "lb pound": POUND,
    },
    "volume": {
        "ml mL milliliter millilitre 毫升": Fraction(1, 1000),
        "l L liter litre 升": Fraction(1),
    },
    "American volume": {"cup": GALLON / 16, "pint": GALLON / 8, "quart": GALLON / 4, "gallon": GALLON},
    "force": {"N newton": Fraction(1), "kN kilonewton": Fraction(1000)},
    "energy": {"J joule": Fraction(1), "kJ kilojoule": Fraction(1000), "kWh": Fraction(3_600_000)},
    "power": {"W watt": Fraction(1), "kW kilowatt": Fraction(1000), "MW megawatt": Fraction(10**6)},
    "pressure": {"Pa pascal": Fraction(1), "kPa": Fraction(1000), "MPa": Fraction(10**6)},
    "frequency": {"Hz hertz": Fraction(1), "kHz": Fraction(1000), "MHz": Fraction(10**6), "GHz": Fraction(10**9)},
    "dollars": {"cent ¢": Fraction(1, 100), "dollar": Fraction(1)},
    "euros": {"euro €": Fraction(1)},
    "degrees": {"degree °": Fraction(1), "arcminute": Fraction(1, 60)},
    "degrees Celsius": {"°C": Fraction(1)},
    "degrees Fahrenheit": {"°F": Fraction(5, 9)},
    "kelvins": {"K kelvin": Fraction(1)},
    "radians": {"radian rad": Fraction(1)},
}
"""Units of each kind: the names of one, and how many of the kind's base unit it is. A name of three letters or more may
end in s. A name of one letter needs a space before it, because `4m` is a product."""
ZEROS = {"degrees Celsius": Fraction(0), "degrees Fahrenheit": Fraction(-160, 9), "kelvins": Fraction(-27315, 100)}
"""Scales of temperature: their zeros in degrees Celsius."""

_BY_NAME = {
    name: (kind, factor)
    for kind, units in UNITS.items()
    for names, factor in units.items()
    for word in names.split()
    for name in ([word, f"{word}s"] if len(word) > 1 and not word.endswith("s") else [word])
}
_NAME = "|".join(sorted(map(re.escape, _BY_NAME), key=len, reverse=True))
_POWER = r"(?:\s?\^\s?\{?(-?\d)\}?|(?<=[a-z])([23²³])(?!\d)|\s(squared|cubed))?"
_FACTOR = rf"(?:(square|cubic|sq\.?|cu\.?)\s?)?({_NAME})(?![a-zA-Z]){_POWER}"
_PLAIN_FACTOR = re.sub(r"\((?!\?)", "(?:", _FACTOR)
_OVER = r"\s?(?:/|·|\\cdot(?![a-zA-Z])|\bper\b)\s?"
UNIT = re.compile(
    rf"(?P<space>\s?)(?P<unit>{_PLAIN_FACTOR}(?:(?:{_OVER}|\s(?=[a-z]{{1,3}}\s?\^)){_PLAIN_FACTOR}){{0,3}})"
)
_FACTORS = re.compile(rf"({_OVER}|\s)?{_FACTOR}")
_NUMBER = (
    r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d{1,3}|\s?(?:\\times|\\cdot|×|x)\s?10\s?\^\s?\{?-?\d{1,3}\}?)?(?:\s\d+/\d+)?|\d+/\d+|\.\d+|\d*\s?\\[dt]?frac\s?\{\d+\}\s?\{\d+\}"
    rf"|(?i:\b{UNDER_100})(?=[\s-])"
)
_TERM = re.compile(rf"(?P<number>[-+]?(?:{_NUMBER}))-?{UNIT.pattern}")
_SIGNS = {"$": "dollars", "€": "euros", "£": "pounds sterling", "¥": "yuan or yen", "₹": "rupees"}
_MONEY = re.compile(
    r"(?:US|HK)?\\?(?P<sign>[$€£¥₹])\s?(?P<number>\d[\d,]*(?:\.\d+)?)(?:\s(?:and\s)?(?P<cents>\d{1,2})\s(?:cents?|¢))?"
)
_BETWEEN = re.compile(r"(?:,\s?|\s)?(?:(?:and|\\&|&)\s)?")
_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?")
_TEMPERATURE = re.compile(r"(?:°|\bdegrees?)\s?(C(?:elsius)?|F(?:ahrenheit)?)\b")
_SPEED = re.compile(r"(?<![a-zA-Z])(?:([mk])ph|kmh)(?![a-zA-Z])")
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?:\s?o['’]clock)?(?:\s?([ap])\.?\s?m\b\.?)?", re.IGNORECASE)
_MAY_BE = re.compile(
    r"\d\{:\}\d|[a-zA-Z¢²³°}\u4e00-\u9fff]$|[$€£¥₹]\s?\d|[a-zA-Z]\.?\s\d|\d\s?:\s?\d|[a-zA-Z}]\.$|\^\{?-?\d\}?$"
)
MAX_LENGTH = 120
"""Longer texts are not read: no quantity is that long."""


@dataclass(frozen=True)
class Quantity:
    """A number of units: one term, or several of one kind as in hours and minutes."""

    kind: tuple[tuple[str, int], ...]
    """Kinds of the units with their powers: an area is (("length", 2),)."""
    value: Numeral
    """In the kind's base unit."""
    factors: tuple[Fraction, ...]
    """Of each term: how many base units its unit is."""

    @property
    def first(self) -> Numeral:
        """The number of units of the first term."""
        return self.within(self.factors[0])

    def within(self, factor: Fraction) -> Numeral:
        """The number of units that are `factor` base units each."""
        place = None if self.value.place is None else self.value.place / factor
        return Numeral(self.value.value / factor, place)


def _plain(text: str) -> str:
    """An answer without LaTeX's commands for words, degrees and spaces."""
    text = _DEGREES.sub("°", _SPACE.sub(" ", TEXT_COMMAND.sub(r" \1 ", text)))
    text = _TEMPERATURE.sub(lambda match: f"°{match[1][0]}", text)
    text = _SPEED.sub(lambda match: "mi/h" if match[1] == "m" else "km/h", text)
    return " ".join(text.split()).strip(" .,")


def may_be_quantity(text: str) -> bool:
    """False for texts that are surely neither a quantity nor a time of day: a quick test."""
    return len(text) <= MAX_LENGTH and _MAY_BE.search(text) is not None


def read_quantity(text: str) -> Quantity | None:
    r"""The quantity that an answer states, before its units are cleaned away; None if it is anything else."""
    if not may_be_quantity(text):
        return None
    text = _plain(text.replace("²", "^2").replace("³", "^3"))
    if money := _MONEY.fullmatch(text):
        number, kind = read_number(money["number"]), ((_SIGNS[money["sign"]], 1),)
        if number is None:
            return None
        if money["cents"] is None:
            return Quantity(kind, number, (Fraction(1),))
        return Quantity(kind, Numeral(number.value + Fraction(int(money["cents"]), 100)), (Fraction(1),) * 2)
    terms, position = [], 0
    while term := _TERM.match(text, position):
        terms.append(term)
        if term.end() == len(text):
            return _total(terms)
        position = _BETWEEN.match(text, term.end()).end()  # type: ignore[union-attr]  # it matches everything
    return None


def _total(terms: list[re.Match[str]]) -> Quantity | None:
    """The sum of terms that have one kind and ever smaller units."""
    kinds, factors, numbers = set(), [], []
    for term in terms:
        number = read_number(term["number"])
        if number is None or (len(terms) == 1 and _is_product(term)):
            return None
        kind, factor = unit_of(term)
        kinds.add(kind)
        factors.append(factor)
        numbers.append(number)
    if len(kinds) > 1 or any(one <= other for one, other in pairwise(factors)):
        return None
    value = sum((number.value * factor for number, factor in zip(numbers, factors, strict=True)), Fraction(0))
    place = numbers[-1].place
    return Quantity(kinds.pop(), Numeral(value, None if place is None else place * factors[-1]), tuple(factors))


def _is_product(term: re.Match[str]) -> bool:
    return term["unit"].isalpha() and len(term["unit"]) == 1 and not term["space"]


def unit_of(match: re.Match[str]) -> tuple[tuple[tuple[str, int], ...], Fraction]:
    """Kinds with their powers, and factor, of a match of UNIT, or of a pattern that ends with it."""
    powers: dict[str, int] = {}
    size = Fraction(1)
    for over, shape, name, digit, behind, word in _FACTORS.findall(match["unit"]):
        kind, factor = _BY_NAME[name]
        named = {"s": 2, "c": 3}.get((word or shape)[:1], 1)
        power = (
            unicodedata.digit(digit[-1:] or behind or str(named))
            * (-1 if digit[:1] == "-" else 1)
            * (-1 if over.strip() in ("/", "per") else 1)
        )
        powers[kind] = powers.get(kind, 0) + power
        size *= factor**power
    return tuple(sorted(powers.items())), size


def equal_quantities(gold: Quantity, other: Quantity) -> bool | None:
    """True or False for units of one kind; None for units that cannot be converted into each other.

    Degrees without a scale are those of the other side's scale.
    """
    if gold.kind == other.kind:
        return equal_numbers(gold.first, other.within(gold.factors[0]))
    if _is_scale(gold) and _is_scale(other):
        zeros = ZEROS[gold.kind[0][0]], ZEROS[other.kind[0][0]]
        moved = Quantity(gold.kind, Numeral(other.value.value + zeros[1] - zeros[0], other.value.place), other.factors)
        return equal_numbers(gold.first, moved.within(gold.factors[0]))
    degrees = (("degrees", 1),)
    if (gold.kind == degrees and _is_scale(other)) or (other.kind == degrees and _is_scale(gold)):
        return equal_numbers(gold.first, other.first)
    return None


def _is_scale(quantity: Quantity) -> bool:
    return len(quantity.kind) == 1 and quantity.kind[0][1] == 1 and quantity.kind[0][0] in ZEROS


def states(quantity: Quantity, number: Numeral, factor: Fraction, *, is_gold: bool) -> bool:
    """True if a quantity is that number of the unit that is `factor` base units.

    `is_gold`: the quantity is the gold answer, else the number is.
    """
    value = quantity.within(factor)
    return equal_numbers(value, number) if is_gold else equal_numbers(number, value)


@dataclass(frozen=True)
class Clock:
    """A time of day."""

    minutes: int
    """Since midnight, or since midnight or noon if it is not said which."""
    is_half_known: bool


def read_clock(text: str) -> Clock | None:
    """The time of day that an answer states, such as `3:15 P.M.` or `15:15`; None if it is anything else."""
    text = _plain(text.replace("{:}", ":")) if len(text) <= MAX_LENGTH else ""
    if text.lower() in ("noon", "midnight"):
        return Clock(12 * 60 * (text.lower() == "noon"), is_half_known=True)
    match = _CLOCK.fullmatch(text)
    if match is None or (match[2] is None and match[3] is None) or int(match[1]) > 23 or int(match[2] or 0) > 59:
        return None
    hours, half = int(match[1]), (match[3] or "").lower()
    if half and hours <= 12:
        hours = hours % 12 + 12 * (half == "p")
    is_of_day = bool(half) or hours > 12 or match[1].startswith("0")
    return Clock(60 * hours + int(match[2] or 0), is_of_day)


PI_MULTIPLE = re.compile(
    r"(?P<sign>-?)\s?(?:\\frac\s?\{\s?(?P<above>\d{0,6})\s?\\pi\s?\}\s?\{\s?(?P<below>\d{1,6})\s?\}"
    r"|(?:\\frac\s?\{(?P<over>\d{1,6})\}\s?\{(?P<under>\d{1,6})\}|(?P<times>\d{0,6}))\s?(?:\\cdot\s?)?\\pi"
    r"(?:\s?/\s?(?P<part>\d{1,6}))?)"
)
RADIANS = re.compile(r"\s?\(?(?:radians?|rad)\)?$")


def read_radians(text: str) -> tuple[Fraction, bool] | None:
    r"""Degrees of a multiple of π such as `\frac{5\pi}{6}`, and whether it says that it is radians; None for others."""
    text = _plain(text.replace("π", r"\pi ").replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    text, is_said = RADIANS.subn("", text)
    match = PI_MULTIPLE.fullmatch(text.strip(" $"))
    if match is None:
        return None
    above = int(match["above"] or match["over"] or match["times"] or 1)
    below = int(match["below"] or match["under"] or 1) * int(match["part"] or 1)
    return (Fraction(180 * above, below) * (-1 if match["sign"] else 1), bool(is_said)) if below else None
