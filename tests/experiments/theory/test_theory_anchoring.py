"""Which scores of partial responses change with shaping, and what abstaining anchors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from theory import Problem, normalize, random_policy, random_problem, random_tree, shape, solve
from theory.anchoring import (
    REWARD_SCORES,
    Group,
    abstention,
    leave_one_out,
    regret_scores,
    sample_group,
    standardize,
)
from theory.tree import FloatArray


@pytest.fixture(scope="module")
def setting() -> tuple[Problem, Problem, FloatArray]:
    """A problem with an "I don't know" in every context, the same shaped, and a behavior policy."""
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=50, stop=0.1, abstain=True)
    problem = random_problem(rng, tree, beta=0.7, discount=0.9)
    shaped = shape(tree, problem.reward, rng.standard_normal(tree.contexts), problem.discount)
    behavior = normalize(tree, random_policy(rng, tree) - 3.0 * np.isin(np.arange(tree.edges), tree.first))
    return problem, replace(problem, reward=shaped), behavior


def _largest_change(group: Group, name: str, problem: Problem, shaped: Problem) -> float:
    """Of the difference of two scores within a group."""
    before, after = (REWARD_SCORES[name](group, each.reward, each.discount) for each in (problem, shaped))
    return float(np.abs(np.diff(after - before, axis=1)).max())


@pytest.mark.parametrize("partial", [False, True])
def test_scores_of_one_prompts_group_when_the_reward_is_shaped(
    setting: tuple[Problem, Problem, FloatArray], partial: bool
) -> None:
    problem, shaped, behavior = setting
    group = sample_group(np.random.default_rng(1), problem.tree, behavior, 6, partial=partial)
    assert group.edges.shape[:2] == (50, 6)
    assert (group.mask.sum(axis=2) >= 1).all()
    np.testing.assert_allclose(
        regret_scores(group, shaped, behavior), regret_scores(group, problem, behavior), rtol=0, atol=1e-12
    )
    changes = {name: _largest_change(group, name, problem, shaped) for name in REWARD_SCORES}
    assert changes.pop("abstention telescoped") < 1e-12
    for name in ("return", "RLOO of returns", "GRPO of returns"):
        change = changes.pop(name)
        assert (change > 0.1) if partial else (change < 1e-12), name
    assert sorted(changes) == ["GRPO of steps", "RLOO of steps", "abstention subtracted"]
    assert min(changes.values()) > 0.1


def test_abstention_telescoped_is_the_only_member_of_the_class_in_which_abstaining_is_worth_nothing(
    setting: tuple[Problem, Problem, FloatArray],
) -> None:
    problem, shaped, _ = setting
    tree = problem.tree
    anchored = [abstention(tree, each.reward, telescoped=True, discount=each.discount) for each in (problem, shaped)]
    np.testing.assert_allclose(*anchored, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(anchored[0][tree.first], 0.0)
    best = solve(problem).policy
    np.testing.assert_allclose(solve(replace(problem, reward=anchored[0])).policy, best, rtol=0, atol=1e-12)
    # Its potential is −β log π*/π_ref of abstaining: abstaining is what the scale is measured from.
    value = solve(replace(problem, reward=anchored[0])).v
    np.testing.assert_allclose(value, -problem.beta * (best - problem.reference)[tree.first], rtol=0, atol=1e-12)
    subtracted = abstention(tree, problem.reward, telescoped=False, discount=problem.discount)
    np.testing.assert_array_equal(subtracted[tree.first], 0.0)
    assert np.abs(solve(replace(problem, reward=subtracted)).policy - best).max() > 0.1


def test_leave_one_out_and_standardize_give_the_values_worked_out_by_hand() -> None:
    values = np.array([[1.0, 2.0, 6.0, 99.0], [5.0, 99.0, 99.0, 99.0], [3.0, 3.0, 99.0, 99.0]])
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    assert leave_one_out(values, mask).tolist() == [[-3.0, -1.5, 4.5, 0.0], [5.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    deviation = (14 / 3) ** 0.5
    assert standardize(values, mask)[0].tolist() == pytest.approx([-2 / deviation, -1 / deviation, 3 / deviation, 0])
    assert not standardize(values, mask)[1:].any()
