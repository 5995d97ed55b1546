"""The regret of a response as outcome and waste: by hand, on random problems, and where the sum does not telescope."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import END, Problem, TokenTree, random_policy, random_problem, random_tree, solve
from theory.split import one_sample_waste, split, split_errors


def one_choice(beta: float = 0.1) -> Problem:
    """A forced token, then a right or a wrong one; the reference takes both equally."""
    tree = TokenTree(np.array([0, 1, 1]), np.array([1, END, END]))
    return Problem(tree=tree, reward=np.array([0.0, 1.0, 0.0]), reference=np.log([1.0, 0.5, 0.5]), beta=beta)


def test_split_when_the_writer_is_often_wrong_then_its_right_response_has_more_regret_than_an_able_ones() -> None:
    problem = one_choice()
    best = 0.1 * math.log(0.5 * (1 + math.exp(10)))
    found = {}
    for right in (0.9, 0.2):
        parts = split(problem, np.log([1.0, right, 1 - right]))
        divergence = right * math.log(right / 0.5) + (1 - right) * math.log((1 - right) / 0.5)
        waste = best - (right - 0.1 * divergence)
        assert parts.waste.tolist() == pytest.approx([waste, waste])
        assert parts.regret.tolist() == pytest.approx([best - 1 + waste, best + waste])
        found[right] = parts.regret[0]
    assert found[0.2] > found[0.9] + 0.6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["verifier", "dense"]))
def test_split_on_random_problems_is_the_sum_of_regrets_and_only_pi_star_wastes_nothing(
    seed: int, rewards: str
) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, random_tree(rng, prompts=10), rewards=rewards, discount=1.0)  # type: ignore[arg-type]
    writer = random_policy(rng, problem.tree)
    for name, errors in split_errors(problem, writer).items():
        if rewards == "verifier" or "reward at the end" not in name:
            np.testing.assert_allclose(errors, 0, rtol=0, atol=1e-12, err_msg=name)
    best = solve(problem).policy
    np.testing.assert_allclose(split(problem, best).waste, 0, rtol=0, atol=1e-12)
    assert split(problem, writer).waste.max() > 1e-3
    # The estimate's mean over the writer's responses is the mean waste, and its parts are no divergences.
    weight = np.exp(problem.tree.responses.log_prob(writer))
    estimate = one_sample_waste(problem, writer)
    assert weight @ estimate == pytest.approx(weight @ split(problem, writer).waste, abs=1e-9)


def test_split_when_rewards_are_discounted_then_it_is_refused() -> None:
    problem = Problem(**{**vars(one_choice()), "discount": 0.9})
    with pytest.raises(ValueError, match=r"discount 1, got 0\.9"):
        split(problem, problem.reference)
