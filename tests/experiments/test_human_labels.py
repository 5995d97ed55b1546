"""Which steps the experiment on human labels compares, and what its table says of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from human_labels import Step, auc, labeled_steps, matched, scores_of

from regretless.data.columns import Response
from regretless.data.regret_table import REGRET
from regretless.data.rows import write_parquet, write_records
from regretless.data.steps import joined
from regretless.rollouts.rollout import RESPONSES


def solution(problem: str, steps: list[str], labels: list[int | None]) -> Response:
    text, ends = joined(steps)
    return Response(
        prompt_id=problem, response_id=text, prompt=problem, response=text, step_ends=ends, step_labels=labels
    )


def test_steps_when_chosen_then_they_are_first_ones_with_one_label_and_without_the_answer() -> None:
    rows = [
        solution("p", ["a", "b", "c", "d"], [1, -1, 1, -1]),
        solution("p", ["a", "e", "f"], [1, 0, -1]),
        solution("p", ["a", "g\n\n# Answer\n\n4"], [1, 1]),
        solution("q", ["a", "b"], [1, 1]),
        solution("q", ["a", "b"], [-1, None]),
    ]
    found = labeled_steps(rows)
    assert found[-1] == {"p": [Step("p", "a\n", "b", 1), Step("p", "a\ne\n", "f", 2)]}
    assert found[1] == {"p": [Step("p", "", "a", 0)]}


def test_steps_when_matched_then_each_negative_one_has_the_nearest_of_its_problem_and_problems_take_turns() -> None:
    def steps(problem: str, *places: int) -> list[Step]:
        return [Step(problem, "", f"{place}", place) for place in places]

    known = {
        -1: {"p": steps("p", 1, 6), "q": steps("q", 3), "without": steps("without", 1)},
        1: {"p": steps("p", 0, 7), "q": steps("q", 3, 9)},
    }
    pairs = list(matched(known, 3))
    assert {bad.problem for bad, _ in pairs[:2]} == {"p", "q"}
    assert sorted((bad.problem, bad.place, good.place) for bad, good in pairs) == [
        ("p", 1, 0),
        ("p", 6, 7),
        ("q", 3, 3),
    ]
    with pytest.raises(ValueError, match="expected 4 negative steps with a positive one of their problem, found 3"):
        list(matched(known, 4))


def test_auc_when_scores_tie_then_they_count_half_and_one_kind_alone_has_none() -> None:
    good = np.array([True, True, False, False])
    assert auc(np.array([3.0, 1.0, 1.0, 0.0]), good) == 3.5 / 4
    assert auc(np.array([0.0, 0.0, 1.0, 1.0]), good) == 0
    assert math.isnan(auc(np.array([1.0, 2.0]), good[:2]))


def test_scores_when_read_then_they_are_of_the_step_and_not_of_the_end_behind_it(tmp_path: Path) -> None:
    rows = [
        Response(
            prompt_id=name,
            response_id=name,
            prompt="p",
            response="ab",
            token_ids=[1, 2, 0],
            logps=[-1.0, -2.0, -50.0],
            step_ends=[2],
            step_labels=[label],
        )
        for name, label in (("x", 1), ("y", -1))
    ]
    write_records(tmp_path / RESPONSES, rows)
    values = {"x": (0.2, 0.5, 0.75), "y": (0.6, 0.25, 0.0)}
    table = [
        {"response_id": name, "unit": unit, "end": 2 + unit, "alpha": alpha}
        | dict(zip(("regret", "v_mu", "q"), (alpha * regret, v, q), strict=True))
        for name, (regret, v, q) in values.items()
        for alpha in (1.0, 0.5)
        for unit in (0, 1)
    ]
    write_parquet(tmp_path / REGRET, pa.Table.from_pylist(table))
    scores, good, problems = scores_of(tmp_path)
    assert (good.tolist(), problems) == ([True, False], ["x", "y"])
    assert {name: of.tolist() for name, of in scores.items()} == {
        "-Reg, α = 1": [-0.2, -0.6],
        "-Reg, α = 0.5": [-0.1, -0.3],
        "Q": [0.75, 0.0],
        "Q - V^μ": [0.25, -0.25],
        "mean log-probability": [-1.5, -1.5],
        "log-probability": [-3.0, -3.0],
    }
