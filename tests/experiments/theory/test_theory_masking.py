"""The masking lemma (6.1): a counterexample by hand, the sign that its proof drops, and the corrected condition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import END, Problem, TokenTree, random_policy, random_problem, random_tree, solve
from theory.masking import masking_cases


def test_masking_lemma_when_the_optimal_policy_writes_and_the_last_token_is_forced_fails() -> None:
    # A good and a bad first token, then an end-of-sequence token that every policy writes.
    tree = TokenTree(np.array([0, 0, 1, 2]), np.array([1, 2, END, END]))
    reward = np.array([0.0, 0.0, 1.0, 0.0])
    problem = Problem(tree=tree, reward=reward, reference=np.log([0.5, 0.5, 1.0, 1.0]))
    best = solve(problem).policy
    cases = masking_cases(problem, best, np.array([False, False, True, False]))
    good = math.e / (1 + math.e)
    divergence = good * math.log(2 * good) + (1 - good) * math.log(2 * (1 - good))
    assert cases.epsilon.tolist() == pytest.approx([divergence, 0.0], abs=1e-15)
    assert cases.later.tolist() == [0.0, 0.0]
    assert cases.complete.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)
    assert cases.cut.tolist() == pytest.approx([-divergence, 0.0], abs=1e-15)
    assert cases.assumed.tolist() == [True, True]
    assert cases.corrected.tolist() == [False, True]
    assert cases.fails.tolist() == [True, False]


def test_masking_lemma_when_the_reference_writes_fails_by_the_printed_estimator_and_not_by_exact_regret() -> None:
    # A forced token, then a good course with one more forced token or a bad one with three: the mean over the tokens
    # ahead counts the bad one, which has more of them, for less.
    tree = TokenTree(np.array([0, 1, 1, 2, 3, 4, 5]), np.array([1, 2, 3, END, 4, 5, END]))
    reward = np.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    problem = Problem(tree=tree, reward=reward, reference=np.log([1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]))
    cases = masking_cases(problem, problem.reference, reward == 1)
    good, bad = (math.log(0.5 * (1 + math.e) / weight) for weight in (math.e, 1.0))
    assert cases.complete.tolist() == pytest.approx([0.0] * 3, abs=1e-15)
    assert cases.cut[0] == pytest.approx((good + bad) / 2) and cases.cut[0] > 0
    # After the choice nothing is left to estimate; before it, two tokens are ahead on the good course, four on the bad.
    assert cases.cut_estimated.tolist() == pytest.approx([(good / 2 + bad / 4) / 2, (good + bad) / 2, 0.0], abs=1e-15)
    assert cases.assumed.tolist() == [True, False, True]
    assert cases.fails.tolist() == [False, False, False]
    assert cases.fails_estimated.tolist() == [True, False, False]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_masking_cases_on_random_problems_have_the_corrected_sign_and_never_fail_under_the_corrected_condition(
    seed: int, verifier: bool, optimal: bool
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, prompts=20)
    problem = random_problem(rng, tree, rewards="verifier" if verifier else "dense")
    best = solve(problem).policy
    behavior = best if optimal else random_policy(rng, tree)
    accepted = (tree.child == END) & ((problem.reward == 1) if verifier else (best >= problem.reference))
    cases = masking_cases(problem, behavior, accepted)
    assert len(cases.cut) == tree.responses.lengths[accepted[tree.ends]].sum()
    np.testing.assert_allclose(cases.cut, problem.beta * (cases.later - cases.epsilon), rtol=0, atol=1e-12)
    # A verifier's reward makes the proof's other assumption, π* ≥ π_ref at the accepted token, hold by itself.
    assert (cases.complete <= 1e-12).all()
    assert not (cases.corrected & cases.fails).any()
    if optimal:  # nothing is left to estimate when π* itself writes
        np.testing.assert_allclose(cases.cut_estimated, cases.cut, rtol=0, atol=1e-12)


def test_masking_lemma_on_random_problems_with_the_optimal_writer_fails_often_as_printed() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=200)
    problem = random_problem(rng, tree, rewards="verifier", discount=1.0)
    cases = masking_cases(problem, solve(problem).policy, problem.reward == 1)
    assert cases.assumed.all()
    assert 0.1 < cases.fails.mean() < 0.5
