r"""Dates and days: `14 March`, `March 14th, 2025`, `2025-03-14`, `3月14日`, `Wed.`, `星期三`."""

from __future__ import annotations

import re
from typing import NamedTuple

MONTHS = [
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
]
WEEKDAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_MONTH = "|".join(f"{name}|{name[:3]}" for name in MONTHS).replace("|may|may", "|may") + "|sept"
_WEEKDAY = "|".join(f"{name}|{name[:3]}" for name in WEEKDAYS) + "|tues|thurs?|weds"
_CHINESE_WEEK = "一二三四五六日天"
_DAY = r"(?P<day{n}>\d{{1,2}})(?:st|nd|rd|th)?"
_YEAR = r"(?:,?\s(?P<year{n}>\d{{4}}))?"
DATE = re.compile(
    rf"(?i:\b(?:(?P<name>{_WEEKDAY})\.?,?\s)?(?:(?P<month1>{_MONTH})\.?\s{_DAY.format(n=1)}(?!\d){_YEAR.format(n=1)}"
    rf"|(?:the\s)?{_DAY.format(n=2)}\s(?:of\s)?(?P<month2>{_MONTH})\b\.?{_YEAR.format(n=2)})(?![\w]))"
    r"|(?P<year3>\d{4})-(?P<month3>\d\d)-(?P<day3>\d\d)(?!\d)"
    r"|(?:(?P<year4>\d{4})年)?(?P<month4>\d{1,2})月(?P<day4>\d{1,2})[日号]"
)
_NAME = re.compile(
    rf"(?i:(?:on\s)?(?:a\s)?(?P<name>{_WEEKDAY})|(?:in\s)?(?P<month>{_MONTH}))\.?|(?:星期|周|礼拜)(?P<chinese>[{_CHINESE_WEEK}])"
)
MAX_LENGTH = 40


class Date(NamedTuple):
    """A day, or a part of its date; None for what is not said."""

    weekday: int | None
    day: int | None
    month: int | None
    year: int | None


def _number(names: list[str], name: str) -> int:
    return next(number for number, full in enumerate(names, 1) if full.startswith(name.lower()[:3]))


def read_date(text: str) -> Date | None:
    """The date, day of the week or month that an answer states without LaTeX; None if it is anything else."""
    text = text.strip(" .,*$")
    if len(text) > MAX_LENGTH or not text:
        return None
    if match := _NAME.fullmatch(text):
        weekday = _number(WEEKDAYS, match["name"]) if match["name"] else None
        if match["chinese"]:
            weekday = min(_CHINESE_WEEK.index(match["chinese"]) + 1, 7)
        return Date(weekday, None, _number(MONTHS, match["month"]) if match["month"] else None, None)
    match = DATE.fullmatch(text)
    if match is None:
        return None
    day, month, year = (
        next((text for n in range(1, 5) if (text := str(match[f"{part}{n}"] or ""))), "")
        for part in ("day", "month", "year")
    )
    number = int(month) if month.isdigit() else _number(MONTHS, month)
    weekday = _number(WEEKDAYS, match["name"]) if match["name"] else None
    if not (1 <= int(day) <= 31 and 1 <= number <= 12):
        return None
    return Date(weekday, int(day), number, int(year) if year else None)


def equal_dates(gold: Date, other: Date) -> bool | None:
    """True or False; None if the other leaves out what the gold one says, but for the day of the week of a date."""
    pairs = list(zip(gold, other, strict=True))
    if any(one is not None and another is not None and one != another for one, another in pairs):
        return False
    common = any(one is not None and another is not None for one, another in pairs)
    is_whole = gold.day is not None and other.day is not None
    left_out = any(one is not None and another is None for one, another in pairs[1 if is_whole else 0 :])
    return True if common and not left_out else None
