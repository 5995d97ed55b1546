r"""Verifiers of mathematical answers, built on math-verify (https://github.com/huggingface/Math-Verify).

Plain numbers, choices, equal texts and lists of them are decided here, without a computer algebra system. Everything
else is parsed by math-verify; numbers are compared by value, exactly unless a decimal is among them, and what is no
number by its `verify`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from regretless.data.records import Verdict
from regretless.labeling.check import Check, processor_limit
from regretless.labeling.extraction import answer_in_gold, answer_in_response, answers_in_response, is_prose
from regretless.labeling.forms import TEXT_COMMAND, read_choice, read_group, stated_values
from regretless.labeling.numerals import APPROXIMATION, clean, equal_numbers, read_number, without_unit

ALGEBRA_SECONDS = 5
"""Limit of parsing and comparing one row (the processor's seconds). It cannot interrupt a long operation inside C code,
such as a power of huge integers: for that the worker's time limit kills the process."""
EXACT_DIGITS = 300
"""Two values without decimals, such as sums of roots, are equal when so many digits of their difference are zero."""
EXPONENT_NOTATION = re.compile(r"(\d\.?)[eE]([-+]?\d+)(?![\w.])")
IMAGINARY_UNIT = re.compile(r"(?<=\d)i(?![a-zA-Z])")
# math-verify takes them for Euler's number and the imaginary unit, whatever their subscript.
WITH_SUBSCRIPT = {"e": r"\varepsilon ", "E": r"\varepsilon ", "I": r"\iota "}
SUBSCRIPT = re.compile(r"(?<![a-zA-Z\\])([eEI])\s?(?=_)")
DECIMAL_POINT = re.compile(r"\d\.\d|(?<!\d)\.\d")
IN_BASE = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
DIGITS = re.compile(r"([-+]?)0*(\d{4000,})")
"""Integers that are compared digit by digit: Python converts no text of more than 4300 digits to an integer."""


class Decision(NamedTuple):
    """A verdict and what was compared."""

    verdict: Verdict
    reason: str


def check(response: str, answer: str) -> Check:
    """Verdict on a response given a gold answer (bare, or a worked solution). Never raises.

    Unknown: the gold answer is empty or cannot be parsed, or the comparison failed or took longer than
    `ALGEBRA_SECONDS`. That limit acts between two operations of Python: one power of huge integers has no end here. The
    verify stage checks in processes that can be killed (`regretless.labeling.pool.Pool`).
    """
    return quick_check(response, answer) or check_by_algebra(response, answer)


def quick_check(response: str, answer: str) -> Check | None:
    """The verdict where no algebra is needed: an answer is missing, both are plain numbers, or the texts are equal."""
    gold, found = answer_in_gold(answer), answer_in_response(response)
    if gold is None:
        return Check(Verdict.UNKNOWN, "gold answer is empty", found)
    if found is None:
        return Check(Verdict.WRONG, "no answer found")
    outcome = _decide(clean(gold), clean(found), None)
    return Check(*outcome, found) if outcome else None


def check_by_algebra(response: str, answer: str) -> Check:
    """The verdict of the computer algebra system on a response and a gold answer that hold an answer. Never raises."""
    return _by_algebra(answer_in_gold(answer) or "", answer_in_response(response) or "")


def check_any(response: str, answer: str) -> Check:
    """As `check`, but one right answer among all that the response gives is enough. Never raises.

    The authors' released code grades so: every box, and everything behind "the answer is", counts.
    """
    quick = quick_check_any(response, answer)
    if quick:
        return quick
    gold = answer_in_gold(answer) or ""
    checks = [_by_algebra(gold, found) for found in answers_in_response(response)]
    order = (Verdict.CORRECT, Verdict.UNKNOWN, Verdict.WRONG)
    return min(checks, key=lambda check: order.index(check.verdict))


def quick_check_any(response: str, answer: str) -> Check | None:
    """As `quick_check`, for `check_any`."""
    gold, answers = answer_in_gold(answer), answers_in_response(response)
    if gold is None:
        return Check(Verdict.UNKNOWN, "gold answer is empty", answers[-1] if answers else None)
    if not answers:
        return Check(Verdict.WRONG, "no answer found")
    outcomes = [_decide(clean(gold), clean(found), None) for found in answers]
    checks = [Check(*outcome, found) for outcome, found in zip(outcomes, answers, strict=True) if outcome]
    correct = [check for check in checks if check.verdict == Verdict.CORRECT]
    if correct:
        return correct[0]
    return checks[-1] if len(checks) == len(answers) else None


def _by_algebra(gold: str, found: str) -> Check:
    try:
        with processor_limit(ALGEBRA_SECONDS):
            outcome = _decide_by_algebra(clean(gold), clean(found))
    except TimeoutError:
        return Check(Verdict.UNKNOWN, "comparison timed out", found)
    except Exception as error:
        return Check(Verdict.UNKNOWN, f"comparison failed: {type(error).__name__}", found)
    return Check(*outcome, found)


def _decide_by_algebra(gold: str, found: str) -> Decision:
    """Of whole expressions where the algebra can read both, else of their parts."""
    outcome = _decide(gold, found, _compare, is_parts_only=True)
    assert outcome is not None
    return outcome


Algebra = Callable[[str, str], Decision]


def _decide(
    gold: str, found: str, algebra: Algebra | None, is_parts_only: bool = False, depth: int = 0
) -> Decision | None:
    """Compare two cleaned answers by their form; what has none is left to `algebra`, or undecided (None) without it.

    With `is_parts_only` even plain numbers and equal texts go to the algebra.
    """
    if not is_parts_only:
        if _bare(gold) == _bare(found):
            return Decision(Verdict.CORRECT, "same text")
        numbers = read_number(gold), read_number(found)
        if numbers[0] and numbers[1]:
            return _verdict(equal_numbers(numbers[0], numbers[1]), "numbers")
        digits = DIGITS.fullmatch(gold), DIGITS.fullmatch(found)
        if digits[0] and digits[1]:
            return _verdict(digits[0].groups() == digits[1].groups(), "numbers")
        if outcome := _decide_bases(gold, found):
            return outcome
    if depth < 3:
        part = lambda one, other: _decide(one, other, algebra, is_parts_only, depth + 1)  # noqa: E731
        for by_form in (_decide_choices, _decide_groups, _decide_sides):
            if outcome := by_form(gold, found, part):
                return outcome
    return algebra(gold, found) if algebra else None


Part = Callable[[str, str], Decision | None]


def _decide_choices(gold: str, found: str, decide: Part) -> Decision | None:
    """`(B)`, `B. 21`, "option B": by their letters, and by what stands behind them where both sides say it."""
    choices = read_choice(gold), read_choice(found)
    if choices[0] and choices[1]:
        same = choices[0].letter == choices[1].letter
        if same and choices[0].value and choices[1].value:
            return decide(choices[0].value, choices[1].value)
        return _verdict(same, "choices")
    if choices[0] and choices[0].value:
        return decide(choices[0].value, found)
    if choices[1] and choices[1].value:
        return decide(gold, choices[1].value)
    return None


def _decide_groups(gold: str, found: str, decide: Part) -> Decision | None:
    """Lists and sets without regard to order, pairs and intervals item by item."""
    groups = read_group(gold), read_group(found)
    if groups[0] is None or groups[1] is None:
        # A list is not one number, and neither is a number a list.
        alone = found if groups[0] else gold
        group = groups[0] or groups[1]
        if group and not group.brackets and read_number(stated_values(alone)[-1]):
            return _verdict(False, "lists") if all(map(_is_plain, group.items)) else None
        return None
    (brackets, items), (other, others) = groups[0], groups[1]
    if brackets != other:
        return None
    if brackets:
        if len(items) != len(others):
            return _verdict(False, "lists")
        return _all([decide(one, another) for one, another in zip(items, others, strict=True)])
    table = [[decide(one, another) for another in others] for one in items]
    columns = [list(column) for column in zip(*table, strict=True)]
    return _all([_any(line) for line in [*table, *columns]])


def _is_plain(item: str) -> bool:
    return any(read_number(value) for value in stated_values(item))


def _all(outcomes: list[Decision | None]) -> Decision | None:
    """Wrong where one item is; undecided or unknown where one is that."""
    wrong = [outcome for outcome in outcomes if outcome and outcome.verdict == Verdict.WRONG]
    if wrong:
        return _verdict(False, "lists")
    if None in outcomes:
        return None
    unknown = [outcome for outcome in outcomes if outcome and outcome.verdict == Verdict.UNKNOWN]
    return unknown[0] if unknown else _verdict(True, "lists")


def _any(outcomes: list[Decision | None]) -> Decision | None:
    """Correct where one item is; else undecided or unknown where one is that."""
    known = [outcome for outcome in outcomes if outcome]
    correct = [outcome for outcome in known if outcome.verdict == Verdict.CORRECT]
    if correct or None in outcomes:
        return correct[0] if correct else None
    return next((outcome for outcome in known if outcome.verdict == Verdict.UNKNOWN), _verdict(False, "lists"))


def _decide_sides(gold: str, found: str, decide: Part) -> Decision | None:
    """`x = 5` and `2 + 3 = 5` by the value that they state."""
    values = stated_values(gold), stated_values(found)
    if values == ([gold], [found]):
        return None
    if (
        gold.partition("=")[0].strip() != found.partition("=")[0].strip()
        and values[0] != [gold]
        and values[1] != [found]
    ):
        return None  # x = 5 and y = 5: the algebra knows what a name is
    outcomes = [decide(one, other) for one in values[0] for other in values[1]]
    return outcomes[0] if len(outcomes) == 1 else _any(outcomes)


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
    text = SUBSCRIPT.sub(lambda match: WITH_SUBSCRIPT[match[1]], text)
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
        return _exact(parsed[0])
    number = read_number(text)  # such as -1./3
    return Rational(number.value) if number else None


def _compare(gold: str, found: str) -> Decision:
    """Compare two cleaned answers as expressions. Raises what math-verify and sympy raise."""
    from math_verify import verify
    from sympy import MatrixBase

    gold, found = without_unit(gold), without_unit(found)
    gold_value = None if is_prose(gold) else parse_answer(gold)
    found_value = parse_answer(found)
    if gold_value is None:
        return Decision(Verdict.UNKNOWN, "gold answer cannot be parsed")
    if found_value is None and DIGITS.search(found):
        return Decision(Verdict.UNKNOWN, "number too long to read")
    if found_value is None:
        return Decision(Verdict.WRONG, "answer cannot be parsed")
    is_approximate = bool(DECIMAL_POINT.search(gold) or DECIMAL_POINT.search(found))
    if _is_number(gold_value) and _is_number(found_value):
        equal = _equal_values(gold_value, found_value, is_approximate)
        if not equal and gold.endswith("%") != found.endswith("%"):  # 25% is met by 25, too
            whole = (100 * gold_value, found_value) if gold.endswith("%") else (gold_value, 100 * found_value)
            equal = _equal_values(*whole, is_approximate)
        return _verdict(equal, "numbers")

    def same(one: Any, other: Any) -> bool:
        if _is_number(one) and _is_number(other):
            return _equal_values(one, other, is_approximate)
        return bool(verify(one, other, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))

    if isinstance(gold_value, MatrixBase) and isinstance(found_value, MatrixBase):
        entries = zip(gold_value.flat(), found_value.flat(), strict=False)
        equal = gold_value.shape == found_value.shape and all(same(one, other) for one, other in entries)
        return _verdict(equal, "expressions")
    return _verdict(same(gold_value, found_value), "expressions")


def _exact(value: Any) -> Any:
    """An expression with each decimal as the fraction that it is printed as: 0.1 is a tenth, and no binary number."""
    from sympy import Float, Rational

    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)})


def _is_number(value: Any) -> bool:
    """Whether an expression has a value: no symbols, sets, relations or infinities."""
    from sympy import Expr

    return isinstance(value, Expr) and not value.free_symbols and bool(value.is_number) and value.is_finite is not False


def _equal_values(gold: Any, found: Any, is_approximate: bool) -> bool:
    """Whether two numbers agree: exactly, unless a decimal stands for a gold number that is no integer.

    The difference is evaluated with up to EXACT_DIGITS digits, more as more of them cancel.
    """
    gold = gold.doit()
    difference = gold - found.doit()
    if difference.is_Rational:
        error: Any = abs(difference)
    else:
        parts = difference.evalf(2, maxn=EXACT_DIGITS).as_real_imag()
        # A part without any certain digit is zero as far as EXACT_DIGITS digits say.
        error = abs(sum(abs(part) for part in parts if not (part.is_Float and part._prec == 1)))
    if error == 0:
        return True
    if not is_approximate or gold.is_Integer:
        return False
    return bool(error <= abs(gold).evalf(20) * APPROXIMATION.numerator / APPROXIMATION.denominator)


def _decide_bases(gold: str, found: str) -> Decision | None:
    """Compare numbers written with a base (`1011_2`), which math-verify would drop; a base left out is the gold's."""
    in_base = IN_BASE.fullmatch(gold.replace(" ", ""))
    other = IN_BASE.fullmatch(found.replace(" ", "")) if in_base else None
    if in_base and other:
        return _verdict(in_base.groups() == other.groups(), "numbers")
    return None


def _bare(text: str) -> str:
    r"""Text for comparing as such: no white space, `\text{}`, brackets of a choice `(C)`, nor capitals in words."""
    bare = re.sub(r"\s+", "", TEXT_COMMAND.sub(r"\1", text))
    if choice := re.fullmatch(r"\(([A-Z])\)", bare):
        return choice[1]
    return bare.lower() if re.fullmatch(r"[a-zA-Z'-]{3,}", bare) else bare


def _verdict(same: bool, compared: str) -> Decision:
    return Decision(Verdict.CORRECT, f"equal {compared}") if same else Decision(Verdict.WRONG, f"different {compared}")
