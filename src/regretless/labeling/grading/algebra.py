"""Expressions: parsed by math-verify, compared by value or by its `verify`, without the errors that it has."""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

from regretless.data.columns import Verdict
from regretless.labeling.grading.extraction import is_prose
from regretless.labeling.grading.notations import DEGREE_SIGN, PLAIN_ANGLE, SINE
from regretless.labeling.grading.numerals import APPROXIMATION, VARIABLE, read_number, without_unit
from regretless.labeling.grading.sets import SIGN, equal_sets, read_set

EXACT_DIGITS = 300
"""Two values without decimals, such as sums of roots, are equal if this many digits of their difference are zero."""
EXPONENT_NOTATION = re.compile(r"(\d\.?)[eE]([-+]?\d+)(?![\w.])")
IMAGINARY_UNIT = re.compile(r"(?<=\d)i(?![a-zA-Z])")
# math-verify reads them as Euler's number and the imaginary unit, whatever their subscript.
WITH_SUBSCRIPT = {"e": r"\varepsilon ", "E": r"\varepsilon ", "I": r"\iota "}
SUBSCRIPT = re.compile(r"(?<![a-zA-Z\\])([eEI])\s?(?=_)")
# math-verify adds the factors of 2(3) and (2)(3), as it does those of a mixed number.
WORD = re.compile(r"[A-Z]{2,}|[A-Za-z][a-z]{2,}")
PRODUCT = re.compile(
    r"(?<=[\d)])\s?(?=\()|(?<=\))\s?(?=[\d\\])(?!\\(?:cdot|times|div|cup|cap|in|[lg]?eq?|[lg]t|ne|pm|mid|to|l?or|l?and|vee|wedge|right|,|;|\\))"
)
FUNCTION = re.compile(r"(?<![\\a-zA-Z])(exp|sin|cos|tan|cot|sec|csc|ln|log|arcsin|arccos|arctan)(?=\s?[\d(\\^_])")
"""Functions without the backslash, without which math-verify reads a product of letters."""
# math-verify takes a complex root of a negative number.
ODD_ROOT = re.compile(r"\\sqrt\s?\[\s?([3579])\s?\]\s?\{\s?-\s?(\d{1,40}(?:\.\d{1,40})?)\s?\}")
NATURAL_LOGARITHM = re.compile(r"\\log\s?_\s?(?:e(?![a-zA-Z])|\{\s?e\s?\})")
DECIMAL_POINT = re.compile(r"\d\.\d|(?<!\d)\.\d")
IN_DEGREES = re.compile(rf"({PLAIN_ANGLE}|\\[a-zA-Z]{{2,10}}|(?<![\\a-zA-Z])[a-zA-Z])\s?{DEGREE_SIGN}")
DIGITS = re.compile(r"([-+]?)0*(\d{4000,})")
"""Integers that are compared digit by digit: Python refuses to convert texts of more than 4300 digits to an integer."""


class Decision(NamedTuple):
    """A verdict and the kind of comparison."""

    verdict: Verdict
    reason: str


def decision(same: bool, compared: str) -> Decision:
    """The decision that two answers are the same or not, with what was compared, such as "numbers"."""
    return Decision(Verdict.CORRECT, f"equal {compared}") if same else Decision(Verdict.WRONG, f"different {compared}")


def compare(gold: str, extracted: str) -> Decision:
    """Compare two cleaned answers as expressions. Raises what math-verify and sympy raise."""
    outcome = _compare_expressions(gold, extracted)
    if outcome.verdict == Verdict.WRONG and (DEGREE_SIGN in gold) != (DEGREE_SIGN in extracted):
        other = extracted if DEGREE_SIGN in gold else gold
        if SINE.search(other):  # it may leave out the sign: cos 36 for the cosine of 36 degrees
            return _compare_expressions(gold.replace(DEGREE_SIGN, ""), extracted.replace(DEGREE_SIGN, ""))
    return outcome


def _compare_expressions(gold: str, extracted: str) -> Decision:
    gold, extracted = without_unit(gold), without_unit(extracted)
    if _are_words(gold, extracted):
        return Decision(Verdict.UNKNOWN, "words of the same letters")
    if outcome := _compare_sets(gold, extracted):
        return outcome
    values = [None if is_prose(gold) else parse_answer(gold), parse_answer(extracted)]
    if values[0] is None:
        return Decision(Verdict.UNKNOWN, "gold answer cannot be parsed")
    if values[1] is None:
        too_long = Decision(Verdict.UNKNOWN, "number too long to read")
        return too_long if DIGITS.search(extracted) else Decision(Verdict.WRONG, "answer cannot be parsed")
    values = _real_logarithms(*_complex(*values))
    if any(_is_identity(value) for value in values):
        return Decision(Verdict.UNKNOWN, "an identity states no value")
    return _compare_values(gold, extracted, *values)


def _compare_sets(gold: str, extracted: str) -> Decision | None:
    """Compare two sets of real numbers; None for others, and for inequalities in different letters."""
    letters = set(VARIABLE.findall(gold)), set(VARIABLE.findall(extracted))
    if not (SIGN.search(gold) or SIGN.search(extracted)) or (all(letters) and letters[0] != letters[1]):
        return None
    sets = read_set(gold, parse_answer), read_set(extracted, parse_answer)
    return None if None in sets else decision(equal_sets(*sets), "sets")


def _compare_values(gold: str, extracted: str, gold_value: Any, extracted_value: Any) -> Decision:
    """Compare two parsed answers; their texts say whether they are decimals or percent."""
    from math_verify import verify
    from sympy import Interval, Matrix, MatrixBase, Tuple  # type: ignore[import-untyped]

    is_approximate = bool(DECIMAL_POINT.search(gold) or DECIMAL_POINT.search(extracted))
    if _is_number(gold_value) and _is_number(extracted_value):
        equal = _equal_values(gold_value, extracted_value, is_approximate)
        if not equal and gold.endswith("%") != extracted.endswith("%"):  # 25% is met by 25, too
            whole = (100 * gold_value, extracted_value) if gold.endswith("%") else (gold_value, 100 * extracted_value)
            equal = _equal_values(*whole, is_approximate)
        return decision(equal, "numbers")

    def same(one: Any, other: Any) -> bool:
        if _is_number(one) and _is_number(other):
            return _equal_values(one, other, is_approximate)
        if _is_half_equation(one, other):
            return False
        return bool(verify(one, other, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))

    if isinstance(gold_value, MatrixBase) and isinstance(extracted_value, Tuple):
        extracted_value = Matrix(extracted_value)  # a vector in a line
    if isinstance(extracted_value, MatrixBase) and isinstance(gold_value, Tuple):
        gold_value = Matrix(gold_value)
    if isinstance(extracted_value, MatrixBase) and isinstance(gold_value, Interval) and gold.startswith("("):
        gold_value = Matrix([gold_value.start, gold_value.end])  # math-verify reads a pair as an interval
    if isinstance(gold_value, MatrixBase) and isinstance(extracted_value, MatrixBase):
        entries = zip(gold_value.flat(), extracted_value.flat(), strict=False)
        equal = gold_value.shape == extracted_value.shape and all(same(one, other) for one, other in entries)
        return decision(equal, "expressions")
    return decision(same(gold_value, extracted_value), "expressions")


def parse_answer(text: str) -> Any | None:
    """The sympy object of a cleaned answer, or None if math-verify cannot parse it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Rational

    # math-verify strips "units" such as c, t or m from the end of any expression, which turns 4c into 4: `clean` has
    # already removed the units that are marked as text.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    target = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    text = text.replace("²", "^2").replace("³", "^3")
    text = PRODUCT.sub(r"\\cdot ", FUNCTION.sub(r"\\\1", text))
    text = NATURAL_LOGARITHM.sub(r"\\ln ", _in_radians(text))
    text = ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", text)
    text = SUBSCRIPT.sub(lambda match: WITH_SUBSCRIPT[match[1]], text)
    text = IMAGINARY_UNIT.sub(" i", EXPONENT_NOTATION.sub(r"\1 \\cdot 10^{\2}", text))
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its own timeouts are off: this package's limit applies
    parsed = parse(
        rf"\boxed{{{text}}}",
        extraction_config=[target],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    if parsed:
        return _exact(parsed[0])
    number = read_number(text)  # such as -1./3
    return Rational(number.value) if number else None


def _in_radians(text: str) -> str:
    r"""A cleaned expression with its degrees as multiples of π, and a backslash before the functions that take them."""
    if DEGREE_SIGN not in text:
        return text
    text = SINE.sub(lambda match: "\\" + match[0].lstrip("\\"), text)
    text = IN_DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    return text.replace(DEGREE_SIGN, r"\cdot\frac{\pi}{180}")


def _are_words(*texts: str) -> bool:
    """True for different words of the same letters: as products of letters, XIV and XVI would be equal."""
    same_letters = len({tuple(sorted(text)) for text in texts}) == 1
    return same_letters and len(set(texts)) > 1 and all(WORD.fullmatch(text) for text in texts)


def _complex(*values: Any) -> list[Any]:
    """Expressions with `i` as the imaginary unit, if it is the only letter in them."""
    from sympy import Basic, I

    letters = {one for value in values if isinstance(value, Basic) for one in value.free_symbols}
    if {str(letter) for letter in letters} != {"i"}:
        return list(values)
    return [value.xreplace(dict.fromkeys(letters, I)) for value in values]


def _real_logarithms(*values: Any) -> list[Any]:
    """Expressions with the logarithm of |f| as half of that of f squared, if one has such a logarithm; letters real."""
    from sympy import Abs, Basic, Pow, Symbol, log

    if not any(isinstance(value, Basic) and any(one.args[0].has(Abs) for one in value.atoms(log)) for value in values):
        return list(values)

    def squared(value: Any, *base: Any) -> Any:
        if isinstance(value, Abs):
            return log(value.args[0] ** 2) / 2
        if isinstance(value, Pow) and value.exp.is_Integer and value.exp % 2 == 0:
            return value.exp / 2 * log(value.base**2)
        return log(value)

    letters = {one: Symbol(one.name, real=True) for value in values for one in value.free_symbols}
    return [value.xreplace(letters).replace(log, squared) for value in values]


def _is_identity(value: Any) -> bool:
    """True for a statement that holds or fails for all values of its letters: 2 + 3 = 5, a + b = b + a."""
    from sympy import Equality, simplify
    from sympy.core.relational import Relational  # type: ignore[import-untyped]
    from sympy.logic.boolalg import BooleanAtom  # type: ignore[import-untyped]

    if isinstance(value, BooleanAtom | bool):
        return True
    if isinstance(value, Equality):
        return not value.free_symbols or simplify(value.lhs - value.rhs) == 0
    return isinstance(value, Relational) and not value.free_symbols


def _is_half_equation(one: Any, other: Any) -> bool:
    """True for an expression and an equation whose left side is a calculation: 2x = 5 states neither of its sides."""
    from sympy import Equality, Function, Symbol

    equations = [value for value in (one, other) if isinstance(value, Equality)]
    return len(equations) == 1 and not isinstance(equations[0].lhs, Symbol | Function)


def _exact(value: Any) -> Any:
    """An expression with each decimal as an exact fraction: 0.1 is a tenth, and not a binary number."""
    from sympy import Float, Rational

    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})


def _is_number(value: Any) -> bool:
    """True if an expression has a value: no symbols, sets, relations or infinities."""
    from sympy import Expr

    return isinstance(value, Expr) and not value.free_symbols and bool(value.is_number) and value.is_finite is not False


def _equal_values(gold: Any, extracted: Any, is_approximate: bool) -> bool:
    """True if two numbers agree: exactly, unless one is a decimal and the gold number is not an integer.

    The difference is evaluated with up to EXACT_DIGITS digits, depending on how many of them cancel.
    """
    gold = gold.doit()
    difference = gold - extracted.doit()
    if difference.is_Rational:
        error: Any = abs(difference)
    else:
        parts = difference.evalf(2, maxn=EXACT_DIGITS).as_real_imag()
        # A part without any certain digit is zero within EXACT_DIGITS digits.
        error = abs(sum(abs(part) for part in parts if not (part.is_Float and part._prec == 1)))
    if error == 0:
        return True
    if not is_approximate or gold.is_Integer:
        return False
    return bool(error <= abs(gold).evalf(20) * APPROXIMATION.numerator / APPROXIMATION.denominator)
