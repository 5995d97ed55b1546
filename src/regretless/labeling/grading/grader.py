r"""Verifiers of mathematical answers, built on math-verify (https://github.com/huggingface/Math-Verify).

Plain numbers, choices, equal texts and lists of them are decided here, without a computer algebra system. Everything
else is parsed by math-verify. Numbers are compared by value, exactly unless one of them is a decimal; other
expressions are compared by math-verify's `verify`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import TypeVar

from regretless.core.processor_time import processor_limit
from regretless.data.columns import Verdict
from regretless.data.schema import GoldAnswer, gold_text, quoted
from regretless.labeling.base import Check
from regretless.labeling.grading.algebra import DIGITS, Decision, compare, decision
from regretless.labeling.grading.dates import Date, equal_dates, read_date
from regretless.labeling.grading.doubts import doubt
from regretless.labeling.grading.extraction import (
    answer_in_gold,
    answers_in_response,
    final_answer,
    has_decimal_commas,
    last_complement,
    listed_options,
    own_answer,
    parts_in_boxes,
)
from regretless.labeling.grading.forms import (
    AND_OR,
    MAX_STATE,
    TEXT_COMMAND,
    UNIT_VECTOR,
    Brackets,
    by_name,
    connective,
    is_truth,
    read_cases,
    read_chain,
    read_choice,
    read_congruence,
    read_group,
    read_letters,
    read_paired,
    read_state,
    read_vector,
    said,
    sides,
    stated_values,
)
from regretless.labeling.grading.marks import BOX, HEDGED, STATEMENT
from regretless.labeling.grading.notations import DEGREE_SIGN, clean
from regretless.labeling.grading.numerals import CACHED, VARIABLE, Numeral, equal_numbers, read_number
from regretless.labeling.grading.units import (
    Clock,
    Quantity,
    equal_quantities,
    may_be_quantity,
    read_clock,
    read_quantity,
    read_radians,
    states,
)

Outcome = TypeVar("Outcome", Check, Check | None)

ARTICLE = re.compile(r"^(?i:(?:(?:it|this)\sis\s)?(?:an?|the)|(?:it|this)\sis)\s+(?=[a-zA-Z]{2})")
FIRST_WORD = re.compile(r"\s*(?i:yes|no|true|false)\b(?=[,.:!])")
LAST_SENTENCE = re.compile(r"[^.\n]{1,200}\.?$")
GOLD_WORDS = re.compile(r"(?:\\text\s?\{)?[A-Za-z][A-Za-z' -]{2,80}\.?\}?")
"""A gold answer of words alone."""
CONCLUSION = re.compile(r"\b(?:so|thus|hence|therefore|that|then|choose|select|pick|answer|answer\sis)\s$")
RELATION = re.compile(r"[<>=≤≥]|\\[lg]eq?")
OPTION = re.compile("[A-J]")
SPACE = re.compile(rf"[\s{DEGREE_SIGN}]+")
WRONG = decision(False, "lists")
RANKS = (Verdict.WRONG, Verdict.UNKNOWN, None, Verdict.CORRECT)
"""Verdicts, the best one last; what is not decided yet may still be correct."""
MAX_WORD = 12
"""Characters behind "the answer is" in which yes or no stands."""
NOON = 12 * 60
ALGEBRA_SECONDS = 5
"""Limit of parsing and comparing one row (processor seconds). It cannot interrupt a long operation inside C code, such
as a power of huge integers; there the worker's time limit kills the process."""
DEGREES = re.compile(r"°|\\circ|degree")
VECTOR_LETTERS = re.compile(r"(?<![a-zA-Z\\])[jk](?![a-zA-Z])")
HEXADECIMAL = re.compile(r"^0x([\dA-F]+)$")
IN_BASE = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
POINT_OR_COMMA = "comma of a decimal or of thousands"
POINT_OF_THOUSANDS = re.compile(r"(?<=\d)\.(?=\d{3}(?!\d))")
DECIMAL_COMMA = re.compile(r"(-?\d+),(\d+)")
SPACE_IN_DIGITS = re.compile(r"\d,\s+[1-9]\d\d(?!\d)")
"""Two items of a list, but one number without the space; no item begins with 0, as in `10, 000`."""


def gold_problem(answer: GoldAnswer) -> str | None:
    """Why these verifiers cannot grade for a gold answer, or None."""
    items = answer if isinstance(answer, list) else [answer]
    if all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        return None
    return f"expected a text or a number, or a list of these of which any is right, got {quoted(answer)}"


def _for_any_gold(check: Callable[[str, str], Outcome]) -> Callable[[str, GoldAnswer], Outcome]:
    """The check for a list of gold answers, too, of which any is right: the best verdict counts."""

    @wraps(check)
    def for_any(response: str, answer: GoldAnswer) -> Outcome:
        if isinstance(answer, str):
            return check(response, answer)
        if problem := gold_problem(answer):
            raise ValueError(problem)
        return max((check(response, gold_text(gold)) for gold in answer), key=_rank)

    return for_any


def _rank(outcome: Check | None) -> int:
    return RANKS.index(outcome and outcome.verdict)


@_for_any_gold
def grade(response: str, answer: str) -> Check:
    """Verdict on a response for a gold answer (bare, or a worked solution), or a list of which any is right.

    Raises nothing but ValueError for another gold answer (`gold_problem`).

    Unknown: the gold answer is empty or cannot be parsed, or the comparison failed or took longer than
    `ALGEBRA_SECONDS`. That limit applies between two operations of Python: one power of huge integers is not limited
    here. The verify stage runs checks in processes that can be killed (`regretless.labeling.worker_pool.Pool`).
    """
    return quick_grade(response, answer) or grade_by_algebra(response, answer)


@_for_any_gold
def quick_grade(response: str, answer: str) -> Check | None:
    """The verdict if no algebra is needed: an answer is missing, both are plain numbers, or the texts are equal."""
    response, gold = own_answer(response), answer_in_gold(answer)
    extracted = _answer_for(response, gold or "")
    if gold is None:
        return Check(Verdict.UNKNOWN, "gold answer is empty", extracted)
    if is_truth(gold) and BOX.search(response) is None:
        return _grade_truth(bool(said(gold)), extracted or response, response)
    if extracted is None:
        return Check(Verdict.WRONG, "no answer found")
    outcome = (
        _decide_options(response, gold, extracted)
        or _decide_points(response, gold, extracted)
        or _decide_quickly(gold, extracted)
    )
    return _doubted(response, gold, Check(*outcome, extracted)) if outcome else None


def _answer_for(response: str, gold: str) -> str | None:
    """The answer of a response, read for what the gold answer is: several parts, a word, a sentence, a decimal."""
    extracted = final_answer(response)
    if BOX.search(response):
        parts = parts_in_boxes(response)
        group = read_group(clean(gold)) if parts else None
        is_whole = group and len(group.items) == len(parts) and (group.brackets != "()" or "=" in parts[0])
        return ", ".join(parts) if is_whole else extracted
    if (comma := DECIMAL_COMMA.fullmatch(gold)) and extracted and ".".join(comma.groups()) in extracted:
        return extracted.replace(".", ",") if gold in response and has_decimal_commas(response) else extracted
    if GOLD_WORDS.fullmatch(gold):
        sentence = LAST_SENTENCE.search(response.rstrip())
        if " " in gold and sentence and _is_said(gold, sentence[0]):
            return gold
        return extracted if read_state(gold) else last_complement(response) or extracted
    return extracted


def _is_said(gold: str, sentence: str) -> bool:
    """True if a sentence is the gold one, or ends with it behind "so" or "therefore"."""
    texts = [" ".join(re.findall(r"[\w']+", text.lower())) for text in (gold, sentence)]
    before = texts[1].removesuffix(texts[0])
    return before != texts[1] and (not before or CONCLUSION.search(before) is not None)


def _decide_options(response: str, gold: str, extracted: str) -> Decision | None:
    """Compare a letter with a value by the options that the response lists; None without such a list."""
    gold, extracted = clean(gold), clean(extracted)
    choices = read_choice(gold), read_choice(extracted)
    if (choices[0] is None) == (choices[1] is None) or not (options := listed_options(response)):
        return None
    if choices[0] and not choices[0].value:
        outcomes = {letter: _decide_quickly(value, extracted) for letter, value in options.items()}
        letters = [letter for letter, outcome in outcomes.items() if outcome and outcome.verdict == Verdict.CORRECT]
        return decision(letters[0] == choices[0].letter, "choices") if len(letters) == 1 else None
    if choices[1] and not choices[1].value and choices[1].letter in options:
        return _decide_quickly(gold, options[choices[1].letter])
    return None


def _decide_points(response: str, gold: str, extracted: str) -> Decision | None:
    """Unknown for `5.600`, in a language that writes decimals with a comma, against 5600; else None."""
    if not POINT_OF_THOUSANDS.search(extracted) or not has_decimal_commas(response):
        return None
    number = read_number(clean(POINT_OF_THOUSANDS.sub("", extracted)))
    return Decision(Verdict.UNKNOWN, POINT_OR_COMMA) if number and number == read_number(clean(gold)) else None


def _grade_truth(gold: bool, extracted: str, response: str) -> Check:
    """Compare yes or no, true or false: with the answer, else with the word that the response begins with."""
    first, last = FIRST_WORD.match(response), LAST_SENTENCE.search(response.rstrip())
    texts = [extracted, *(match[0] for match in (first, last) if match)]
    answer, extracted = next(((said(text), text) for text in texts if said(text) is not None), (None, extracted))
    stated = {
        said(response[match.end() : match.end() + MAX_WORD].partition(".")[0]) for match in STATEMENT.finditer(response)
    }
    if {True, False} <= stated:
        return Check(Verdict.UNKNOWN, "two answers", extracted)
    if answer is None:
        return Check(Verdict.WRONG, "neither yes nor no", extracted)
    return Check(*decision(answer == gold, "truth values"), extracted)


def _doubted(response: str, gold: str, check: Check, *, any_counts: bool = False) -> Check:
    """A check that says correct as one that says unknown, if the response's answer can be read in another way."""
    if check.verdict != Verdict.CORRECT or check.extracted is None:
        return check
    reason = doubt(response, gold, check.extracted, any_counts=any_counts)
    return check if reason is None else Check(Verdict.UNKNOWN, reason, check.extracted)


@lru_cache(CACHED)
def _decide_quickly(gold: str, extracted: str) -> Decision | None:
    extracted = _unhedged(extracted)
    return _decide_named(gold, extracted) or _decide(clean(gold), clean(extracted), None)


def _unhedged(extracted: str) -> str:
    """An answer without the words before its value that the doubts ask for."""
    hedge = HEDGED.match(extracted)
    return extracted[hedge.end() :] if hedge else extracted


def grade_by_algebra(response: str, answer: str) -> Check:
    """The verdict of the computer algebra system on a response and a gold text, both with an answer. Never raises."""
    response, gold = own_answer(response), answer_in_gold(answer) or ""
    return _doubted(response, gold, _by_algebra(gold, _answer_for(response, gold) or ""))


@_for_any_gold
def grade_any(response: str, answer: str) -> Check:
    """As `grade`, but one correct answer among all in the response is enough. Never raises.

    The authors' released code grades this way: every box, and every text after "the answer is", counts.
    """
    quick = quick_grade_any(response, answer)
    if quick:
        return quick
    gold = answer_in_gold(answer) or ""
    return _best(
        _doubted(own_answer(response), gold, _by_algebra(gold, extracted), any_counts=True)
        for extracted in answers_in_response(response)
    )


def _best(checks: Iterable[Check]) -> Check:
    """The last of the checks with the best verdict."""
    return max(reversed(list(checks)), key=_rank)


@_for_any_gold
def quick_grade_any(response: str, answer: str) -> Check | None:
    """As `quick_grade`, for `grade_any`."""
    gold, answers = answer_in_gold(answer), answers_in_response(response)
    if gold is None:
        return Check(Verdict.UNKNOWN, "gold answer is empty", answers[-1] if answers else None)
    if not answers:
        return Check(Verdict.WRONG, "no answer found")
    outcomes = [_decide_quickly(gold, extracted) for extracted in answers]
    checks = [
        _doubted(own_answer(response), gold, Check(*outcome, extracted), any_counts=True)
        for outcome, extracted in zip(outcomes, answers, strict=True)
        if outcome
    ]
    is_decided = len(checks) == len(answers) or any(check.verdict == Verdict.CORRECT for check in checks)
    return _best(checks) if is_decided else None


def _by_algebra(gold: str, extracted: str) -> Check:
    value = _unhedged(extracted)
    try:
        with processor_limit(ALGEBRA_SECONDS):
            outcome = _decide_named(gold, value) or _decide_by_algebra(clean(gold), clean(value))
    except TimeoutError:
        return Check(Verdict.UNKNOWN, "comparison timed out", extracted)
    except Exception as error:
        return Check(Verdict.UNKNOWN, f"comparison failed: {type(error).__name__}", extracted)
    return Check(*outcome, extracted)


def _decide_named(gold: str, extracted: str) -> Decision | None:
    """Compare answers by their words and units, before these are cleaned away."""
    if gold.isdecimal():
        return _decide_quantities(gold, extracted)
    if len(gold) <= MAX_STATE and (state := read_state(gold)) and (other := read_state(extracted)):
        return decision(state == other, "statements")
    dates = [read_date(TEXT_COMMAND.sub(r"\1", text)) for text in (gold, extracted)]
    if dates[0] and dates[1]:
        return _decide_dates(dates[0], dates[1])
    return _decide_quantities(gold, extracted) or _decide_angles(gold, extracted)


def _decide_dates(gold: Date, extracted: Date) -> Decision:
    same = equal_dates(gold, extracted)
    return Decision(Verdict.UNKNOWN, "a date without a part") if same is None else decision(same, "dates")


def _decide_angles(gold: str, extracted: str) -> Decision | None:
    """Compare degrees with a multiple of π; for a gold answer in degrees, the response says that it has radians."""
    if not (DEGREES.search(gold) or DEGREES.search(extracted)):
        return None
    for text, other in ((gold, extracted), (extracted, gold)):
        radians, degrees = read_radians(text), read_quantity(other)
        if radians and degrees and degrees.kind == (("degrees", 1),):
            same = degrees.first.value == radians[0]
            if same and text is extracted and not radians[1]:
                return Decision(Verdict.UNKNOWN, "radians or a number")
            return decision(same, "angles")
    return None


def _decide_quantities(gold: str, extracted: str) -> Decision | None:
    """Compare times of day, and quantities by their units; None unless both have units, or one has several terms."""
    if not (may_be_quantity(gold) or may_be_quantity(extracted)):
        return None
    clocks = read_clock(gold), read_clock(extracted)
    if (
        clocks[0]
        and clocks[1]
        and (outcome := _decide_clocks(clocks[0], clocks[1], is_clock="clock" in gold + extracted))
    ):
        return outcome
    quantities = read_quantity(gold), read_quantity(extracted)
    if quantities[0] and quantities[1]:
        same = equal_quantities(quantities[0], quantities[1])
        if same is None and equal_numbers(quantities[0].first, quantities[1].first):
            return Decision(Verdict.UNKNOWN, "units of different kinds")
        return decision(bool(same), "quantities")
    for quantity, other in ((quantities[0], extracted), (quantities[1], gold)):
        if quantity and len(quantity.factors) > 1 and (number := read_number(clean(other))):
            return _decide_terms(quantity, number, is_gold=other is extracted)
    return None


def _decide_terms(quantity: Quantity, number: Numeral, *, is_gold: bool) -> Decision:
    """Hours and minutes against a number without a unit: of hours it is the same, of minutes it may be."""
    is_stated = [states(quantity, number, factor, is_gold=is_gold) for factor in quantity.factors]
    if any(is_stated[1:]) and not is_stated[0]:
        return Decision(Verdict.UNKNOWN, "a number without its unit")
    return decision(is_stated[0], "quantities")


def _decide_clocks(gold: Clock, extracted: Clock, *, is_clock: bool) -> Decision | None:
    """A response may say more than the gold answer, as 3:15 P.M. to 3:15, but not less."""
    if extracted.is_half_known and gold.is_half_known:
        return decision(gold == extracted, "times")
    if not (extracted.is_half_known or gold.is_half_known):
        return decision(gold == extracted, "times") if is_clock else None  # 3:15 may also be a ratio
    if gold.minutes % NOON != extracted.minutes % NOON:
        return decision(False, "times")
    return decision(True, "times") if extracted.is_half_known else Decision(Verdict.UNKNOWN, "morning or afternoon")


@lru_cache(CACHED)
def _decide_by_algebra(gold: str, extracted: str) -> Decision:
    """Compares whole expressions if the algebra system can parse both, else their parts."""
    outcome = _decide(gold, extracted, compare, is_parts_only=True)
    assert outcome is not None
    return outcome


Algebra = Callable[[str, str], Decision]


def _decide(
    gold: str, extracted: str, algebra: Algebra | None, is_parts_only: bool = False, depth: int = 0
) -> Decision | None:
    """Compare two cleaned answers by their form; other forms go to `algebra`, or stay undecided (None) without it.

    With `is_parts_only`, even plain numbers and equal texts go to the algebra system.
    """
    if not is_parts_only:
        if _same_text(gold, extracted):
            return Decision(Verdict.CORRECT, "same text")
        numbers = read_number(gold), read_number(extracted)
        if numbers[0] and numbers[1]:
            return decision(equal_numbers(numbers[0], numbers[1]), "numbers")
        digits = DIGITS.fullmatch(gold), DIGITS.fullmatch(extracted)
        if digits[0] and digits[1]:
            return decision(digits[0].groups() == digits[1].groups(), "numbers")
        if outcome := _decide_bases(gold, extracted) or _decide_relations(gold, extracted):
            return outcome
    if depth < 3:
        part = lambda one, other: _decide(one, other, algebra, is_parts_only, depth + 1)  # noqa: E731
        for by_form in (_decide_choices, _decide_pairs, _decide_cases, _decide_vectors, _decide_groups, _decide_sides):
            if outcome := by_form(gold, extracted, part):
                return outcome
    return algebra(gold, extracted) if algebra else None


Part = Callable[[str, str], Decision | None]


def _decide_choices(gold: str, extracted: str, decide: Part) -> Decision | None:
    """`(B)`, `B. 21`, "option B": by their letters, and by the text after them if both sides have it."""
    choices = read_choice(gold), read_choice(extracted)
    if choices[0] and choices[1]:
        same = choices[0].letter == choices[1].letter
        if same and choices[0].value and choices[1].value:
            return decide(choices[0].value, choices[1].value)
        return decision(same, "choices")
    if choices[0] and choices[0].value:
        return decide(choices[0].value, extracted)
    if choices[1] and choices[1].value:
        return decide(gold, choices[1].value)
    return None


def _decide_relations(gold: str, extracted: str) -> Decision | None:
    """Compare signs, several options, remainders, and chains of inequalities."""
    if RELATION.fullmatch(gold):
        signs = set(RELATION.findall(extracted))
        return decision(signs == {gold}, "signs") if len(signs) == 1 else None
    for read, name in ((read_letters, "choices"), (read_congruence, "remainders")):
        if (one := read(gold)) and (other := read(extracted)) and (name == "remainders" or len(gold) != len(extracted)):
            return decision(one == other or (name == "choices" and sorted(one) == sorted(other)), name)
    if (number := read_number(gold)) and (congruence := read_congruence(extracted)):
        return decision(number.value == congruence[1], "remainders")
    chains = read_chain(gold), read_chain(extracted)
    return Decision(Verdict.CORRECT, "equal chains") if chains[0] and chains[0] == chains[1] else None


def _decide_cases(gold: str, extracted: str, decide: Part) -> Decision | None:
    r"""`\begin{cases}` case by case, in any order."""
    cases = read_cases(gold), read_cases(extracted)
    if cases[0] is None or cases[1] is None:
        return None
    if len(cases[0]) != len(cases[1]):
        return decision(False, "cases")
    table = [[_all([decide(*pair) for pair in zip(one, other, strict=True)]) for other in cases[1]] for one in cases[0]]
    return _all([_any(row) for row in table])


def _decide_pairs(gold: str, extracted: str, decide: Part) -> Decision | None:
    """`10 to 15`, `5 remainder 2` and `3:4` number by number; none of them is a single number."""
    pairs = read_paired(gold), read_paired(extracted)
    if pairs[0] and pairs[1] and (pairs[0][0] == pairs[1][0] or {pairs[0][0], pairs[1][0]} == {"range", "ratio"}):
        if pairs[0][0] == pairs[1][0] == "ratio":
            products = pairs[0][1].value * pairs[1][2].value, pairs[0][2].value * pairs[1][1].value
            return decision(products[0] == products[1], "pairs")
        both = zip(pairs[0][1:], pairs[1][1:], strict=True)
        return decision(all(equal_numbers(one, other) for one, other in both), "pairs")
    for pair, text, other in ((pairs[0], gold, extracted), (pairs[1], extracted, gold)):
        if pair and pair[0] != "ratio" and "-" not in text and read_number(other):  # 10 - 5 is 5
            return decision(False, "pairs")
    return None


def _decide_vectors(gold: str, extracted: str, decide: Part) -> Decision | None:
    r"""`2\mathbf{i} - \mathbf{j}` by its components; `2i - j` only against brackets, because i may be complex."""
    for text, other in ((gold, extracted), (extracted, gold)):
        if UNIT_VECTOR.search(text) or (other[:1] in "([" and VECTOR_LETTERS.search(text)) or "matrix" in other:
            row = read_vector(text)
            group = read_group(other)
            components = read_vector(other) or other
            if row is None:
                continue
            if group and group.brackets and len(group.items) == 2 and row.endswith(", 0)"):
                row = row.removesuffix(", 0)") + ")"
            return decide(row, components) if text is gold else decide(components, row)
    return None


def _decide_groups(gold: str, extracted: str, decide: Part) -> Decision | None:
    """Lists and sets in any order, pairs and intervals item by item."""
    groups = read_group(gold), read_group(extracted)
    if groups[0] is None or groups[1] is None:
        return _decide_single(gold, extracted, groups, decide)
    one, other = groups[0], groups[1]
    if one.brackets == "()" and (values := by_name(other)):
        other = Brackets("()", values)  # x = 3, y = 4
    elif other.brackets == "()" and (values := by_name(one)):
        one = Brackets("()", values)
    if one.brackets != other.brackets:
        return None
    if one.brackets:
        same_size = len(one.items) == len(other.items)
        return _all([decide(*pair) for pair in zip(one.items, other.items, strict=True)] if same_size else [WRONG])
    joined = connective(gold), connective(extracted)
    if all(joined) and joined[0] != joined[1]:  # x > 1 and x < 3 is not x > 1 or x < 3
        return decision(False, "lists")
    is_set = one.is_set or other.is_set
    if not is_set and _is_ranking(one.items, other.items) and not (AND_OR.search(gold) or AND_OR.search(extracted)):
        return Decision(Verdict.UNKNOWN, "letters in another order")
    return _decide_unordered(one, other, decide)


def _is_ranking(gold: list[str], extracted: list[str]) -> bool:
    """True for the same letters of options in another order: the order may be the answer."""
    return gold != extracted and sorted(gold) == sorted(extracted) and all(map(OPTION.fullmatch, gold))


def _decide_unordered(gold: Brackets, extracted: Brackets, decide: Part) -> Decision | None:
    table = [[decide(one, another) for another in extracted.items] for one in gold.items]
    columns = [list(column) for column in zip(*table, strict=True)]
    outcome = _all([_any(line) for line in [*table, *columns]])
    if outcome and outcome.verdict == Verdict.CORRECT and not (gold.is_set or extracted.is_set):
        # Each of the gold's repeated items, as the ones in 1, 1, 2, needs an item of its own.
        equals = Counter(tuple(cell is not None and cell.verdict == Verdict.CORRECT for cell in line) for line in table)
        return decision(all(sum(line) >= count for line, count in equals.items()), "lists")
    return outcome


def _decide_single(
    gold: str, extracted: str, groups: tuple[Brackets | None, Brackets | None], decide: Part
) -> Decision | None:
    """A list against a single value. They are equal if each item of the list is a form of the value."""
    if groups[1] and not groups[1].brackets:
        outcome = _decide_forms(gold, groups[1].items, decide)
        if outcome is None or outcome.verdict == Verdict.CORRECT:
            return outcome
    alone = extracted if groups[0] else gold
    group = groups[0] or groups[1]
    if group and not group.brackets and (number := read_number(stated_values(alone)[-1])):
        if (
            alone is gold
            and (comma := DECIMAL_COMMA.fullmatch(extracted))
            and read_number(".".join(comma.groups())) == number
        ):
            return Decision(Verdict.UNKNOWN, "comma of a list or of a decimal")
        return decision(False, "lists") if all(map(_is_plain, group.items)) else None
    return None


def _decide_forms(gold: str, items: list[str], decide: Part) -> Decision | None:
    r"""A list such as `\frac{1}{2}, 0.5` that states one value in several forms: correct if each form is the gold's.

    Otherwise the outcome of the first item that is not, because other items can change nothing.
    """
    for item in items:
        outcome = decide(gold, item)
        if outcome is None or outcome.verdict != Verdict.CORRECT:
            return outcome
    return decision(True, "lists")


def _is_plain(item: str) -> bool:
    return any(read_number(value) for value in stated_values(item))


def _all(outcomes: list[Decision | None]) -> Decision | None:
    """Wrong if one item is wrong; else undecided or unknown if one item is."""
    wrong = [outcome for outcome in outcomes if outcome and outcome.verdict == Verdict.WRONG]
    if wrong:
        return decision(False, "lists")
    if None in outcomes:
        return None
    unknown = [outcome for outcome in outcomes if outcome and outcome.verdict == Verdict.UNKNOWN]
    return unknown[0] if unknown else decision(True, "lists")


def _any(outcomes: list[Decision | None]) -> Decision | None:
    """Correct if one item is correct; else undecided or unknown if one item is."""
    known = [outcome for outcome in outcomes if outcome]
    correct = [outcome for outcome in known if outcome.verdict == Verdict.CORRECT]
    if correct or None in outcomes:
        return correct[0] if correct else None
    return next((outcome for outcome in known if outcome.verdict == Verdict.UNKNOWN), decision(False, "lists"))


def _decide_sides(gold: str, extracted: str, decide: Part) -> Decision | None:
    """`x = 5` and `2 + 3 = 5` by the value that they state."""
    values = stated_values(gold), stated_values(extracted)
    if values == ([gold], [extracted]):
        return None
    if (
        gold.partition("=")[0].strip() != extracted.partition("=")[0].strip()
        and values[0] != [gold]
        and values[1] != [extracted]
    ):
        return None  # x = 5 and y = 5: the algebra system distinguishes the names
    outcomes = [decide(one, other) for one in values[0] for other in values[1]]
    outcome = outcomes[0] if len(outcomes) == 1 else _any(outcomes)
    if outcome and outcome.verdict == Verdict.WRONG and _is_equation(gold) and _is_equation(extracted):
        return None  # y = 2x + 1 and 2x - y + 1 = 0: the algebra system compares them as equations
    return outcome


def _is_equation(text: str) -> bool:
    return len(sides(text)) == 2 and "=" in text and all(sides(text)) and VARIABLE.search(text) is not None


def warm_up() -> None:
    """Load the computer algebra system, including what it builds at first use (about a second)."""
    grade_by_algebra(r"\boxed{x^2-1}", "(x-1)(x+1)")


def _decide_bases(gold: str, extracted: str) -> Decision | None:
    """Compare numbers with a base (`1011_2`), which math-verify would drop; an omitted base is the gold number's."""
    gold, extracted = (HEXADECIMAL.sub(r"\1_16", text) for text in (gold, extracted))
    in_base = IN_BASE.fullmatch(gold.replace(" ", ""))
    other = IN_BASE.fullmatch(extracted.replace(" ", "")) if in_base else None
    if in_base and other:
        return decision(
            [one.lstrip("0") for one in in_base.groups()] == [one.lstrip("0") for one in other.groups()], "numbers"
        )
    return None


def _same_text(gold: str, extracted: str) -> bool:
    """True if the texts are equal, except for white space.

    Not for a response with the list `1, 500` to the number `1,500`. The reverse is the same text: a list is often
    written without spaces, and the gold answer says that it is one.
    """
    if _bare(gold) != _bare(extracted):
        return False
    return not (SPACE_IN_DIGITS.search(extracted) and _count(extracted) > _count(gold))


def _count(text: str) -> int:
    group = read_group(text)
    return len(group.items) if group else 1


def _bare(text: str) -> str:
    r"""Text for literal comparison: no white space, `\text{}`, degrees, brackets of a choice, capitals in words."""
    bare = SPACE.sub("", ARTICLE.sub("", TEXT_COMMAND.sub(r"\1", text)))
    if choice := re.fullmatch(r"\(([A-Z])\)", bare):
        return choice[1]
    return bare.lower() if re.fullmatch(r"[a-zA-Z'-]{3,}", bare) else bare
