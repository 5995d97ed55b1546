r"""Verifier of mathematical answers, built on math-verify (https://github.com/huggingface/Math-Verify).

Plain numbers and equal texts are decided here, without a computer algebra system. Everything else is parsed by
math-verify and compared by value where both sides are numbers, else by its `verify`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from regretless.labeling.checks import Check, processor_limit
from regretless.labeling.extraction import answer_in_gold, answer_in_response, is_prose
from regretless.labeling.numerals import APPROXIMATION, FLOAT_NOISE, clean, equal_numbers, read_number
from regretless.records import Verdict

ALGEBRA_SECONDS = 5
"""Limit of parsing and comparing one row (the processor's seconds). It cannot interrupt a long operation inside C code,
such as a power of huge integers: for that the worker's time limit kills the process."""
EXPONENT_NOTATION = re.compile(r"(\d\.?)[eE]([-+]?\d+)(?![\w.])")
IMAGINARY_UNIT = re.compile(r"(?<=\d)i(?![a-zA-Z])")
DECIMAL_POINT = re.compile(r"\d\.\d|(?<!\d)\.\d")
IN_BASE = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")


def check(response: str, answer: str) -> Check:
    """Verdict on a response given a gold answer (bare, or a worked solution). Never raises.

    Unknown: the gold answer is empty or cannot be parsed, or the comparison failed or took too long.
    """
    return quick_check(response, answer) or check_by_algebra(response, answer)


def quick_check(response: str, answer: str) -> Check | None:
    """The verdict where no algebra is needed: an answer is missing, both are plain numbers, or the texts are equal."""
    gold, found = answer_in_gold(answer), answer_in_response(response)
    if gold is None:
        return Check(Verdict.UNKNOWN, "gold answer is empty", found)
    if found is None:
        return Check(Verdict.WRONG, "no answer found")
    clean_gold, clean_found = clean(gold), clean(found)
    if _bare(clean_gold) == _bare(clean_found):
        return Check(Verdict.CORRECT, "same text", found)
    gold_number, found_number = read_number(clean_gold), read_number(clean_found)
    if gold_number and found_number:
        return _verdict(equal_numbers(gold_number, found_number), "numbers", found)
    return _check_bases(clean_gold, clean_found, found)


def check_by_algebra(response: str, answer: str) -> Check:
    """The verdict of the computer algebra system on a response and a gold answer that hold an answer. Never raises."""
    gold, found = answer_in_gold(answer) or "", answer_in_response(response) or ""
    try:
        with processor_limit(ALGEBRA_SECONDS):
            outcome = _compare(clean(gold), clean(found), found)
    except TimeoutError:
        return Check(Verdict.UNKNOWN, "comparison timed out", found)
    except Exception as error:
        return Check(Verdict.UNKNOWN, f"comparison failed: {type(error).__name__}", found)
    return outcome


def warm_up() -> None:
    """Load the computer algebra system, and let it build what it builds at first use (about a second)."""
    check_by_algebra(r"\boxed{x^2-1}", "(x-1)(x+1)")


def parse_answer(text: str) -> Any | None:
    """The sympy object that a cleaned answer means, or None when math-verify cannot parse it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Rational  # type: ignore[import-untyped]

    # math-verify strips "units" such as c, t or m from the end of any expression, which turns 4c into 4: `clean` has
    # already removed the units that are marked as text.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    target = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    text = IMAGINARY_UNIT.sub(" i", EXPONENT_NOTATION.sub(r"\1 \\cdot 10^{\2}", text))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off: ours stands around
    parsed = parse(
        rf"\boxed{{{text}}}",
        extraction_config=[target],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    if parsed:
        return parsed[0]
    number = read_number(text)  # such as -1./3
    return Rational(number.value) if number else None


def _compare(gold: str, found: str, extracted: str) -> Check:
    from math_verify import verify

    gold_value = None if is_prose(gold) else parse_answer(gold)
    found_value = parse_answer(found)
    if gold_value is None:
        return Check(Verdict.UNKNOWN, "gold answer cannot be parsed", extracted)
    if found_value is None:
        return Check(Verdict.WRONG, "answer cannot be parsed", extracted)
    numbers = _as_number(gold_value), _as_number(found_value)
    if numbers[0] is not None and numbers[1] is not None:
        is_approximate = bool(DECIMAL_POINT.search(gold) or DECIMAL_POINT.search(found))
        return _verdict(_close(numbers[0], numbers[1], is_approximate), "numbers", extracted)
    same = verify(gold_value, found_value, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    return _verdict(bool(same), "expressions", extracted)


def _as_number(value: Any) -> complex | None:
    """Numeric value of an expression without symbols, or None: sets, relations, infinities, what is too large."""
    from sympy import Expr

    if not isinstance(value, Expr) or value.free_symbols or not value.is_number:
        return None
    try:
        number = complex(value.evalf(20))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _close(gold: complex, found: complex, is_approximate: bool) -> bool:
    """Whether two numbers agree; the same tolerance as for plain numbers, an integer gold is met exactly."""
    is_integer = gold.imag == 0 and gold.real.is_integer()
    tolerance = APPROXIMATION if is_approximate and not is_integer else FLOAT_NOISE
    return abs(gold - found) <= float(tolerance) * abs(gold)


def _check_bases(gold: str, found: str, extracted: str) -> Check | None:
    """Compare numbers written with a base (`1011_2`), which math-verify would drop; a base left out is the gold's."""
    in_base = IN_BASE.fullmatch(gold.replace(" ", ""))
    other = IN_BASE.fullmatch(found.replace(" ", "")) if in_base else None
    if in_base and other:
        return _verdict(in_base.groups() == other.groups(), "numbers", extracted)
    return None


def _bare(text: str) -> str:
    r"""Text for comparing as such: no white space, `\text{}`, brackets of a choice `(C)`, nor capitals in words."""
    bare = re.sub(r"\s+", "", TEXT_COMMAND.sub(r"\1", text))
    if choice := re.fullmatch(r"\(([A-Z])\)", bare):
        return choice[1]
    return bare.lower() if re.fullmatch(r"[a-zA-Z'-]{3,}", bare) else bare


def _verdict(same: bool, compared: str, extracted: str) -> Check:
    if same:
        return Check(Verdict.CORRECT, f"equal {compared}", extracted)
    return Check(Verdict.WRONG, f"different {compared}", extracted)
