from __future__ import annotations

import random
import re

import pytest

from regretless.core.errors import ConfigError
from regretless.world.problems import Arithmetic, Faults, Generator, Operation, Problem, Step, solve

GENERATOR = Generator((2, 4), 9)


def answer_by_reading(prompt: str) -> int:
    """The answer from the story's words alone."""
    value = int(re.match(r"\w+ has (\d+) ", prompt)[1])  # type: ignore[index]
    for sentence in prompt.split(". ")[1:-1]:
        match sentence.split()[1:]:
            case ["buys", amount]:
                value += int(amount)
            case ["gives", amount, "to", _]:
                value -= int(amount)
            case ["doubles"]:
                value += value
            case ["loses", "half"]:
                value -= value // 2
            case words:
                raise AssertionError(words)
    return value


def evaluate_lines(solution: str) -> list[int]:
    """Results of a solution's lines, each checked against Python's own arithmetic; the last one is the boxed answer."""
    *lines, boxed = solution.split("\n")
    values = []
    for line in lines:
        left, _, right = line.partition("=")
        assert eval(left.replace("/", "//")) == int(right), line
        values.append(int(right))
    assert boxed == f"\\boxed{{{values[-1]}}}"
    return values


def test_solution_without_faults_is_arithmetically_right() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        problem = GENERATOR.draw(rng)
        values = evaluate_lines(solve(problem, Faults(), rng))
        assert len(values) == len(problem.steps)
        assert values[-1] == problem.answer == answer_by_reading(problem.prompt)
        assert all(1 <= value <= 99 for value in (problem.start, *values))


def test_solution_of_a_known_problem_reads_as_documented() -> None:
    steps = (Step(Operation.GIVES, 3), Step(Operation.HALVES, 2), Step(Operation.BUYS, 5), Step(Operation.DOUBLES, 2))
    problem = Problem("Tom", "Ann", "apples", 17, steps)
    assert (
        problem.prompt == "Tom has 17 apples. Tom gives 3 to Ann. Tom loses half. Tom buys 5. Tom doubles. How many?\n"
    )
    assert solve(problem, Faults(), random.Random(0)) == "17-3=14\n14/2=7\n7+5=12\n12*2=24\n\\boxed{24}"
    misread = solve(problem, Faults(gives_as_plus=1, forget_third=1), random.Random(0))
    assert misread == "17+3=20\n20/2=10\n10*2=20\n\\boxed{20}"


def test_generator_draws_every_operation_and_number_of_steps() -> None:
    rng = random.Random(0)
    problems = [GENERATOR.draw(rng) for _ in range(500)]
    assert {len(problem.steps) for problem in problems} == {2, 3, 4}
    assert {step.operation for problem in problems for step in problem.steps} == set(Operation)
    assert max(step.amount for problem in problems for step in problem.steps) == 9


def test_faults_occur_at_the_rates_asked_for() -> None:
    rng = random.Random(0)
    faults = Faults(gives_as_plus=0.6, forget_third=0.3, off_by_one=0.05)
    gives = misread = third = forgotten = lines = slips = 0
    for _ in range(6000):
        problem = GENERATOR.draw(rng)
        written = solve(problem, faults, rng).split("\n")[:-1]
        steps = list(problem.steps)
        third += len(steps) >= 3
        if len(written) < len(steps):
            forgotten += 1
            del steps[2]
        for line, step in zip(written, steps, strict=True):
            left, right = line.split("=")
            lines += 1
            slips += abs(max(eval(left.replace("/", "//")), 0) - int(right)) == 1
            if step.operation is Operation.GIVES:
                gives += 1
                misread += "+" in left
    assert misread / gives == pytest.approx(0.6, abs=0.02)
    assert forgotten / third == pytest.approx(0.3, abs=0.02)
    assert slips / lines == pytest.approx(0.05, abs=0.006)


def test_faults_of_style_when_asked_for_then_only_the_end_is_wrong_or_no_work_is_shown() -> None:
    rng = random.Random(0)
    problems = Generator((2, 4), 9).distinct(400, rng)
    ends = 0
    for problem in problems:
        *lines, boxed = solve(problem, Faults(off_at_end=0.6), rng).split("\n")
        *exact, last = solve(problem, Faults(), rng).split("\n")[:-1]
        assert lines[:-1] == exact, "the start is right"
        wrong = int(lines[-1].partition("=")[2]) - problem.answer
        assert boxed == f"\\boxed{{{problem.answer + wrong}}}" and abs(wrong) <= 1
        ends += wrong != 0
        assert solve(problem, Faults(no_work=1.0), rng) == f"\\boxed{{{problem.answer}}}"
        assert last.partition("=")[0] == lines[-1].partition("=")[0]
    assert 200 < ends < 280


def test_distinct_problems_when_there_are_too_few_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no problem of 1 to 1 steps is left besides the \d+ .* ask for fewer"):
        Generator((1, 1), 1).distinct(1000, random.Random(0))


def test_distinct_problems_avoid_each_other_and_those_taken() -> None:
    taken: set[Arithmetic] = {problem.arithmetic for problem in Generator((2, 2), 3).distinct(2000, random.Random(0))}
    found = [problem.arithmetic for problem in Generator((2, 2), 3).distinct(500, random.Random(1), taken)]
    assert len(set(found)) == 500
    assert not taken & set(found)
