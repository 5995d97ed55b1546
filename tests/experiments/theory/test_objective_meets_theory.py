"""RePO's score, as trained with, against the exact regret of the theory: every response of small trees enumerated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from theory import (
    Problem,
    TokenTree,
    deterministic_policy,
    log_ratio,
    random_policy,
    random_tree,
    regret,
    reward_of,
)
from theory.estimators import estimates, moments
from theory.tree import FloatArray

from regretless.objectives import Logps, build

BETA = 0.7


def _logps(tree: TokenTree, *policies: FloatArray) -> Logps:
    """All responses of a tree under (policy, reference, behavior)."""
    # A behavior policy that never writes a token has −inf there; what such responses score is not looked at.
    policy, reference, behavior = (torch.from_numpy(np.maximum(tree.responses.gather(each), -1e3)) for each in policies)
    return Logps(policy, mask=torch.from_numpy(tree.responses.mask), reference=reference, behavior=behavior)


def _scores(name: str, logps: Logps, **options: Any) -> FloatArray:
    """Scores of all responses, (R,)."""
    scores = build(name, beta=BETA, **options)(logps, torch.tensor([[0, 1]])).scores
    assert scores is not None
    return scores.numpy()


def _problem(rng: np.random.Generator, tree: TokenTree, discount: float) -> tuple[Problem, FloatArray]:
    """A problem whose optimal policy is a random one, and that policy: the theorem then speaks about any policy."""
    policy, reference = random_policy(rng, tree), random_policy(rng, tree)
    potential = rng.standard_normal(tree.contexts)
    reward = reward_of(tree, policy, reference, potential, beta=BETA, discount=discount)
    return Problem(tree=tree, reward=reward, reference=reference, beta=BETA, discount=discount), policy


def _prompt_means(tree: TokenTree, behavior: FloatArray, values: FloatArray) -> FloatArray:
    """Mean of `values` (R,) over the responses that the behavior policy gives to each prompt."""
    return np.bincount(tree.responses.prompt, np.exp(tree.responses.log_prob(behavior)) * values)


@pytest.mark.parametrize("discount", [0.0, 0.6, 1.0])
def test_repo_score_with_the_theorems_discount_is_in_the_mean_the_exact_negative_regret(discount: float) -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=100)
    problem, policy = _problem(rng, tree, discount)
    behavior = random_policy(rng, tree)
    scores = _scores("repo", _logps(tree, policy, problem.reference, behavior), discount=discount)
    exact = -tree.responses.gather(regret(problem, behavior)).sum(axis=1)
    found, wanted = (_prompt_means(tree, behavior, each) for each in (scores, exact))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_repo_score_with_the_papers_window_is_in_the_mean_what_the_window_mean_estimates() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=100)
    problem, policy = _problem(rng, tree, 1.0)
    behavior = random_policy(rng, tree)
    scores = _scores("repo", _logps(tree, policy, problem.reference, behavior))
    window = moments(tree, behavior, estimates(tree, behavior, policy, "window mean")).mean
    per_token = BETA * (log_ratio(policy, problem.reference) - window)
    wanted = _prompt_means(tree, behavior, tree.responses.gather(per_token).sum(axis=1))
    np.testing.assert_allclose(_prompt_means(tree, behavior, scores), wanted, rtol=0, atol=1e-12)
    exact = -tree.responses.gather(regret(problem, behavior)).sum(axis=1)
    assert np.abs(_prompt_means(tree, behavior, exact) - wanted).max() > 0.1


@pytest.mark.parametrize("discount", [0.6, 1.0])
def test_repo_det_score_of_a_deterministic_writers_response_is_its_exact_negative_regret(discount: float) -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=100)
    problem, policy = _problem(rng, tree, discount)
    behavior = deterministic_policy(rng, tree)
    written = tree.responses.log_prob(behavior) == 0
    assert written.sum() == tree.prompts
    scores = _scores("repo_det", _logps(tree, policy, problem.reference, behavior), discount=discount)
    exact = -tree.responses.gather(regret(problem, behavior)).sum(axis=1)
    np.testing.assert_allclose(scores[written], exact[written], rtol=0, atol=1e-12)


def test_dpo_reward_is_the_exact_negative_regret_when_the_trained_policy_itself_wrote() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=100)
    problem, policy = _problem(rng, tree, 1.0)
    exact = -tree.responses.gather(regret(problem, policy)).sum(axis=1)
    rewards = build("dpo", beta=BETA)(_logps(tree, policy, problem.reference, policy), torch.tensor([[0, 1]])).rewards
    assert rewards is not None
    np.testing.assert_allclose(rewards.numpy(), exact, rtol=0, atol=1e-12)
