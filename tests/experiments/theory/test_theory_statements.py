"""The paper's lemmas as properties of random problems, to 1e-12, and its claims that do not hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import Problem, random_problem, random_tree, shape, solve
from theory.random_problems import full_tree
from theory.statements import claims, identities

TOLERANCE = 1e-12


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.random.Generator, Problem]:
    """A seed and twenty trees of one shape with rewards of one kind, one β and one γ: the ends of their ranges too."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tree = random_tree(
        rng,
        prompts=20,
        depth=draw(st.integers(1, 6)),
        branching=draw(st.integers(1, 5)),
        stop=draw(st.sampled_from([0.0, 0.3, 0.7])),
    )
    problem = random_problem(
        rng,
        tree,
        rewards=draw(st.sampled_from(["dense", "verifier"])),
        beta=draw(st.floats(0.1, 5.0)),
        discount=draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))),
    )
    return rng, problem


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_statements_on_random_problems_hold_to_1e_12(drawn: tuple[np.random.Generator, Problem]) -> None:
    rng, problem = drawn
    errors = {name: float(np.abs(each).max()) for name, each in identities(rng, problem).items()}
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


def test_claims_made_in_passing_when_checked_fail_and_the_corrected_one_holds() -> None:
    rng = np.random.default_rng(0)
    errors = claims(rng, random_problem(rng, random_tree(rng), discount=0.9))
    largest = {name: float(each.max()) for name, each in errors.items()}
    assert largest.pop("(it is temperature α·σ)") < TOLERANCE
    assert len(largest) == 5
    assert min(largest.values()) > 0.1, largest


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_reward_translation_when_all_responses_are_equally_long_keeps_the_optimal_policy(discount: float) -> None:
    rng = np.random.default_rng(0)
    problem = random_problem(rng, full_tree(prompts=20, depth=4, branching=3), discount=discount)
    moved = solve(replace(problem, reward=problem.reward + 1.0))
    np.testing.assert_allclose(moved.policy, solve(problem).policy, rtol=0, atol=TOLERANCE)


def test_shaping_over_a_whole_response_when_undiscounted_adds_the_prompts_potential_only() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=20)
    potential = rng.standard_normal(tree.contexts)
    added = tree.responses.gather(shape(tree, np.zeros(tree.edges), potential, 1.0)).sum(axis=1)
    np.testing.assert_allclose(added, potential[tree.responses.prompt], rtol=0, atol=TOLERANCE)
