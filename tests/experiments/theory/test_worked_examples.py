"""The paper's two illustrations: the rankings that they tell of."""

from __future__ import annotations

import numpy as np
import pytest
from theory import evaluate, solve
from theory.grid_world import Grid, grid_walks, mixture, segment_regret
from theory.two_decisions import (
    REALIZED,
    by_one_sample,
    by_regret,
    by_reward,
    course_of_things,
    two_decisions,
)


def test_grid_paths_by_regret_turn_with_the_continuation_and_by_reward_do_not() -> None:
    walks = grid_walks()
    problem = walks.problem
    coin, goal = walks.segment(["left", "up"]), walks.segment(["right", "right"])
    assert problem.reward[coin].sum() == 1.0
    assert problem.reward[goal].sum() == 0.0
    favorable, pessimistic = walks.favorable(), walks.pessimistic()
    assert segment_regret(problem, favorable, goal) < segment_regret(problem, favorable, coin)
    assert segment_regret(problem, pessimistic, goal) > segment_regret(problem, pessimistic, coin)
    np.testing.assert_allclose(mixture(favorable, pessimistic, 0.0), favorable, rtol=0, atol=1e-12)
    # After the coin nothing can be reached any more, so what is imagined there makes no difference.
    after = problem.tree.child[coin[-1]]
    assert solve(problem).v[after] == pytest.approx(0.0, abs=1e-12)
    assert evaluate(problem, pessimistic).v[after] == pytest.approx(0.0, abs=1e-12)


def test_grid_walks_stay_on_the_grid_and_refuse_a_move_off_it() -> None:
    walks = grid_walks(Grid(rows=1, columns=2, start=(0, 0), horizon=2, coin=(0, 0), goal=(0, 9), pit=(0, 9)))
    assert walks.moves == ("right", "left")
    # The coin pays on entering its cell, not for starting there.
    assert walks.problem.reward.tolist() == [0.0, 1.0]
    with pytest.raises(ValueError, match="'up' cannot follow"):
        walks.segment(["right", "up"])


def test_two_decisions_by_regret_turn_once_counterfactual_outcomes_count() -> None:
    problem = two_decisions()
    assert by_reward(problem).preferred == "A"
    # (1 − p) 3 − 5 p = (1 − p) 2 + 1.5 p at p = 1 / 7.5.
    assert by_regret(problem, course_of_things(1 / 7.5 - 1e-6)).preferred == "A"
    assert by_regret(problem, course_of_things(1 / 7.5 + 1e-6)).preferred == "B"


def test_two_decisions_when_one_outcome_was_luck_then_one_sample_rewards_it_and_regret_does_not() -> None:
    problem, behavior = two_decisions(), course_of_things(0.9, 0.1)
    regrets, estimate = by_regret(problem, behavior), by_one_sample(problem, behavior)
    assert regrets.preferred == "B" and estimate.preferred == "A"
    # Their rewards differ by 1; the rest is β times the log of how much rarer A's outcome is.
    assert estimate.a - estimate.b == pytest.approx(1.0 + np.log(0.9 / 0.1), abs=1e-12)
    assert list(regrets) == pytest.approx([-6.646, -0.496], abs=1e-3)


@pytest.mark.parametrize("counterfactual", [0.0, 0.3, 0.5])
def test_two_decisions_by_one_sample_differ_by_the_realized_rewards_whatever_the_counterfactuals(
    counterfactual: float,
) -> None:
    problem, behavior = two_decisions(), course_of_things(counterfactual)
    score = by_one_sample(problem, behavior)
    assert score.a - score.b == pytest.approx(3.0 - 2.0, abs=1e-12)
    if counterfactual:
        others = by_one_sample(problem, behavior, [edge + 1 for edge in REALIZED])
        mean = [(1 - counterfactual) * x + counterfactual * y for x, y in zip(score, others, strict=True)]
        assert mean == pytest.approx(list(by_regret(problem, behavior)), abs=1e-12)
    else:
        assert list(score) == pytest.approx(list(by_regret(problem, behavior)), abs=1e-12)
