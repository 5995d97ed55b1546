"""The math verifier: where it finds answers, what it takes for equal, and how it does on published labels."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regretless.data.columns import Verdict
from regretless.labeling.grading import grader
from regretless.labeling.grading.extraction import answer_in_gold, answer_in_response
from regretless.labeling.grading.grader import grade, grade_any, grade_by_algebra, quick_grade

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
SAMPLES = "sampled_outputs/qwen2.5_math_cot.jsonl"
DISAGREEMENTS = {(SAMPLES, 37, "response 7", "label wrong, here correct")}
"""Explained in docs/verification.md."""


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"First \boxed{3}, then we get \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$x=\boxed{3}$ or $x = \boxed{5}$", "3, 5"),
        (r"\boxed{10}$.  - OR -  We note that it is \boxed{10}", "10"),
        (r"\fbox{7} and nothing else", "7"),
        (r"The set is \boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"It is \boxed 5$.", "5"),
        (r"so \boxed{7", "7"),
        (r"I put it in \boxed{}. The answer is 5.", "5"),
        ("9 * 2 = $<<9*2=18>>18\n#### 18", "18"),
        ("9 * 2 = 18\nA: 1,018", "1,018"),
        ("#### Step 1: add\n2+2=4\n#### Step 2\nSo it is $4$.", "4"),
        ("**Answer:** 18", "18"),
        ("The final answer is $\\frac{1}{2}$. I hope it is correct.", r"\frac{1}{2}"),
        ("The answer is that she makes $18 a day.", "$18"),
        ("17-3=14\n14/2=7", "7"),
        (r"Hence \(x = 2y+1\).", "2y+1"),
        ("She has $5 and pays $3, so she has $2 left.", "$2"),
        ("No idea.", None),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_answer_in_response_when_written_in_some_convention_then_found(response: str, answer: str | None) -> None:
    assert answer_in_response(response) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        (r"We get \boxed{3}, so $a+b = \boxed{161}$.", "161"),
        (" 27.0 ", "27.0"),
        ("Adding both, the answer is 5.", "5"),
        (r"Therefore there are $\boxed{}$ primes in that range.", None),
    ],
)
def test_answer_in_gold_when_bare_or_a_worked_solution_then_found(gold: str, answer: str | None) -> None:
    assert answer_in_gold(gold) == answer


EQUAL = [
    ("27.0", "27"),
    ("18", r"\$18.00"),
    ("18", "18 eggs per day"),
    ("10{,}000", r"10,\!000"),
    (r"48^\circ", "48"),
    (r"25\%", "25"),
    ("25%", "0.25"),
    ("3000000", r"3 \text{ million dollars}"),
    (r"12\frac{3}{5}", "12.6"),
    ("1/3", "0.33333"),
    ("57.6", "57.599999999999994"),
    ("4.5e33", r"4.5\times10^{33} \mathrm{~ergs/s}"),
    ("1011_2", "1011"),
    ("(C)", r"\text{C}"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt 3}"),
    (r"\pi", "3.14159"),
    ("x^2+2x+1", "(x+1)^2"),
    ("6-5i", "-5i + 6"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("3,5", "x=5 or x=3"),
    ("[2,5)", r"2 \le x < 5"),
    (r"x \in [-2,7]", "[-2,7]"),
    ("y=2x+3", "2x+3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}"),
]
DIFFERENT = [
    ("10000", "9999"),
    ("27.0", "27.0001"),
    ("25%", r"2500\%"),
    ("1234.56", "1234.50"),
    ("1/3", "0.33"),
    (r"\pi", "3.14"),
    # The next four are equal for math-verify as it comes: it rounds to six decimals, strips c and t as units, and drops
    # the base.
    (r"5.3\times 10^{-9}", "0.0000001"),
    ("4c", "4"),
    (r"\frac{1}{m} t", r"\frac{1}{m}"),
    ("1011_2", "1011_3"),
    ("5.3e-9", "0"),
    (r"2\sqrt{3}\times 10^{-9}", "0"),
    (r"2+3\mathrm{i}", "2+3"),
    ("3,5", "3"),
    ("(1,2)", "(2,1)"),
    ("[2,5)", "(2,5)"),
    ("5", r"\{"),
    # Exact numbers are met exactly, however large, alone or as parts.
    ("11,111,111,100", "11,111,111,111"),
    ("2^{31}-1", "2147483648"),
    (r"10000000000\%", r"9999999999\%"),
    ("10000000000", r"1.0000000001\times10^{10}"),
    (r"1000000000\frac{1}{3}", r"1000000000\frac{1}{2}"),
    (r"10^{12}\pi+1", r"10^{12}\pi"),
    ("2^{100}", "2^{100}+1"),
    ("[0,10000000001)", "[0,10000000000)"),
    (r"\{10000000001, 1\}", r"\{1, 10000000000\}"),
    ("x>10000000001", "x>10000000000"),
    ("0", "10^{-20}"),
    (r"\begin{pmatrix} 1 \\ 0 \end{pmatrix}", r"\begin{pmatrix} 0 \\ 1 \end{pmatrix}"),
]


@pytest.mark.parametrize(("gold", "found"), EQUAL)
def test_check_when_two_forms_mean_the_same_then_correct(gold: str, found: str) -> None:
    assert grade(rf"So it is \boxed{{{found}}}.", gold).verdict == Verdict.CORRECT


@pytest.mark.parametrize(("gold", "found"), DIFFERENT)
def test_check_when_answers_differ_then_wrong(gold: str, found: str) -> None:
    assert grade(rf"So it is \boxed{{{found}}}.", gold).verdict == Verdict.WRONG


@pytest.mark.parametrize(
    ("response", "gold", "verdict", "reason"),
    [
        ("No idea.", "5", Verdict.WRONG, "no answer found"),
        (r"\boxed{5}", "", Verdict.UNKNOWN, "gold answer is empty"),
        (r"\boxed{5}", r"{{{\frac", Verdict.UNKNOWN, "gold answer cannot be parsed"),
        (r"\boxed{5}", "all real numbers", Verdict.UNKNOWN, "gold answer cannot be parsed"),
        (r"\boxed{{{}", "5", Verdict.WRONG, "answer cannot be parsed"),
    ],
)
def test_check_when_a_side_is_unusable_then_reason_says_which(
    response: str, gold: str, verdict: Verdict, reason: str
) -> None:
    outcome = grade(response, gold)
    assert (outcome.verdict, outcome.reason) == (verdict, reason)


def test_check_when_algebra_takes_too_long_then_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    # Many small operations, over a second of them: a limit within the process acts between two operations only.
    monkeypatch.setattr(grader, "ALGEBRA_SECONDS", 0.01)
    outcome = grade(r"\boxed{(a+b+c+d+e+f+g)^{40}}", "x+1")
    assert (outcome.verdict, outcome.reason) == (Verdict.UNKNOWN, "comparison timed out")


@pytest.mark.parametrize(
    "piece",
    [
        "1 1/2 ",
        "(1,",
        "答案是",
        "B, ",
        "answer to x ",
        "x+",
        "**1** and ",
        r"\frac1",
        "5 (apples) ",
        "1,",
        "$",
        r"\boxed{",
        r"\(a ",
        "#### ",
        "A: x\n",
        "the answer is ",
        r"\text{cm} ",
        r"\cdot",
        " ",
        "12 eggs ",
        "1 234 ",
        "2½²",
    ],
)
def test_quick_grade_when_text_is_hostile_then_work_grows_with_its_length_and_not_faster(piece: str) -> None:
    def work(length: int) -> float:
        """Seconds of the processor, the least of three."""
        times = []
        for _ in range(3):
            start = time.process_time()
            quick_grade(piece * length, "5")
            quick_grade(rf"\boxed{{5{piece * length}}}", "5")
            times.append(time.process_time() - start)
        return min(times)

    # A pattern that backtracks takes 16 times as long for 4 times the text, or far longer.
    assert work(8_000) < 10 * work(2_000) + 0.01


def test_check_when_integers_are_longer_than_python_reads_then_digits_decide_or_verdict_is_unknown() -> None:
    long = "9" * 4301
    assert grade(rf"\boxed{{{long}}}", long).verdict == Verdict.CORRECT
    assert grade(f"The answer is {long}.", "9" * 4302).verdict == Verdict.WRONG
    assert grade(rf"\boxed{{1{'0' * 4301}}}", "10^{4301}").reason == "number too long to read"
    assert grade(rf"\boxed{{\frac{{{long}}}{{7}}}}", rf"\frac{{{long[1:]}8}}{{7}}").verdict == Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("response", "gold", "last", "one_of_all"),
    [
        (r"It is \boxed{5}. Next problem: \boxed{7}", "5", Verdict.WRONG, Verdict.CORRECT),
        (r"It is \boxed{5}. Next problem: \boxed{7}", "6", Verdict.WRONG, Verdict.WRONG),
        (r"The answer is: 5 \boxed{7}", "5", Verdict.WRONG, Verdict.CORRECT),
        (r"\boxed{(x+1)^2} then \boxed{7}", "x^2+2x+1", Verdict.WRONG, Verdict.CORRECT),
        (r"\boxed{3} and $\boxed{5}$", "3, 5", Verdict.CORRECT, Verdict.CORRECT),
        ("2 + 3 = 5", "5", Verdict.CORRECT, Verdict.WRONG),
        (r"\boxed{5}", "", Verdict.UNKNOWN, Verdict.UNKNOWN),
        ("The answer is less than 12.", "12", Verdict.UNKNOWN, Verdict.WRONG),
        ("The answer is 12, but I am not sure.", "12", Verdict.UNKNOWN, Verdict.UNKNOWN),
        (r"\boxed{5} and so on \boxed{6", "5", Verdict.WRONG, Verdict.CORRECT),
        (r"\boxed{5}. Wait, maybe not. I am not sure. \boxed{6}", "5", Verdict.WRONG, Verdict.UNKNOWN),
    ],
)
def test_grade_any_when_a_response_has_several_answers_then_one_right_one_is_enough(
    response: str, gold: str, last: Verdict, one_of_all: Verdict
) -> None:
    assert (grade(response, gold).verdict, grade_any(response, gold).verdict) == (last, one_of_all)


REASONING = [
    ("<think>So \\boxed{5}. No wait, recompute.</think>\nThe answer is **12**.", "12"),
    ("<think>The answer is 5, \\boxed{5}</think>\n\nThe final answer is 12.", "12"),
    # Where the prompt ends with <think>, the response begins inside the block.
    ("It is \\boxed{5}.\n</think>\n#### 12", "12"),
    ("<think>\\boxed{5}</think> \\boxed{6}? <think>No.</think> So it is \\boxed{12}.", "12"),
    ("<think>\n\n</think>\n\n\\boxed{12}", "12"),
    # No answer: the reasoning is cut, or nothing follows it.
    ("<think>The answer is 5, \\boxed{5}", None),
    ("\n<think>\\boxed{5}", None),
    ("<think>\\boxed{5}</think>", None),
    ("\\boxed{5}</think>\n", None),
    ("<think>\\boxed{5}</think>\n<think>\\boxed{5}", None),
    ("<think>\\boxed{5}</think> I could not find it.", None),
]


@pytest.mark.parametrize(("response", "answer"), REASONING)
def test_check_when_a_response_has_reasoning_then_only_what_follows_it_counts(
    response: str, answer: str | None
) -> None:
    for one in (grade, grade_any):
        for gold in ("5", "12"):
            outcome = one(response, gold)
            assert (outcome.verdict, outcome.extracted) == (
                Verdict.CORRECT if gold == answer else Verdict.WRONG,
                answer,
            )
        if answer is None:
            assert outcome.reason == "no answer found"


def test_answer_in_gold_when_it_has_reasoning_then_only_what_follows_it_counts() -> None:
    assert answer_in_gold("<think>\\boxed{5}?</think> So it is 12.\n#### 12") == "12"
    assert answer_in_gold("<think>\\boxed{5}") is None


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        (r"\frac{639}{40}", r"\boxed{15\frac{39}{40}, \frac{639}{40}}", Verdict.CORRECT),
        (r"\frac12", r"\boxed{\frac{1}{2}, 0.5}", Verdict.CORRECT),
        (r"\frac{\sqrt2}{2}", r"\boxed{\frac{1}{\sqrt2} \text{ or } \frac{\sqrt2}{2}}", Verdict.CORRECT),
        (r"\frac12", r"\boxed{0.5, \frac13}", Verdict.WRONG),
        (r"\frac{\sqrt2}{2}", r"\boxed{\frac{1}{\sqrt2}, \sqrt2}", Verdict.WRONG),
        ("1,500", r"\boxed{1, 500}", Verdict.WRONG),
        ("1, 2", r"\boxed{1, 1}", Verdict.WRONG),
    ],
)
def test_check_when_a_list_states_one_value_in_several_forms_then_it_is_that_value(
    gold: str, response: str, verdict: Verdict
) -> None:
    assert grade(response, gold).verdict == verdict


def test_check_when_the_logarithm_has_the_base_e_then_it_is_the_natural_one() -> None:
    for gold, response in ((r"\log_e 2", r"\ln 2"), (r"\ln 2", r"\log_{e}(2)")):
        assert grade(rf"\boxed{{{response}}}", gold).verdict == Verdict.CORRECT
    assert grade(r"\boxed{\ln 3}", r"\log_{e} 2").verdict == Verdict.WRONG


def labeled(shared: Path) -> Iterator[tuple[tuple[str, int, str], str, str, bool]]:
    """Place (file, line, which), response, gold and published label of every labeled response."""
    file = "gsm8k/example_model_solutions.jsonl"
    for number, line in enumerate((shared / "data" / file).open(encoding="utf-8"), 1):
        row = json.loads(line)
        for model in MODELS:
            yield (file, number, model), row[model]["solution"], row["ground_truth"], row[model]["is_correct"]
    for number, line in enumerate((shared / "data" / SAMPLES).open(encoding="utf-8"), 1):
        row = json.loads(line)
        for position, (response, label) in enumerate(zip(row["response"], row["score"], strict=True)):
            yield (SAMPLES, number, f"response {position}"), response, row["solution"], label


def test_check_when_labels_are_published_then_agrees_but_for_the_listed(shared: Path) -> None:
    total, disagreements = 0, set()
    for place, response, gold, label in labeled(shared):
        verdict = grade(response, gold).verdict
        total += 1
        if verdict != (Verdict.CORRECT if label else Verdict.WRONG):
            disagreements.add((*place, f"label {'correct' if label else 'wrong'}, here {verdict}"))
    assert total == 660 * 4 + 50 * 8
    assert disagreements == DISAGREEMENTS


def test_quick_grade_when_it_decides_real_rows_then_algebra_agrees(shared: Path) -> None:
    decided = 0
    for place, response, gold, _ in labeled(shared):
        quick = quick_grade(response, gold)
        if quick is not None:
            decided += 1
            assert grade_by_algebra(response, gold).verdict == quick.verdict, place
    assert decided == 3034
