"""Estimators of the sequential KL: moments by hand, and which of them are unbiased."""

from __future__ import annotations

import math

import numpy as np
import pytest
from theory import END, TokenTree, kl, random_policy, random_tree, sequential_kl
from theory.estimators import ESTIMATORS, Estimator, Moments, estimates, moments, rms_error


def chain() -> tuple[TokenTree, np.ndarray, np.ndarray]:
    """A forced token, then a coin, then the same coin again: μ = (¾, ¼), π = (½, ½) at both."""
    tree = TokenTree(np.array([0, 1, 1, 2, 2, 3, 3]), np.array([1, 2, 3, END, END, END, END]))
    behavior = np.log([1, *[0.75, 0.25] * 3])
    return tree, behavior, np.log([1, *[0.5, 0.5] * 3])


@pytest.mark.parametrize(
    ("estimator", "scale", "variance"),
    [("window mean", 0.5, 0.5), ("sum", 1.0, 2.0), ("sum of exact KL", 1.0, 0.0)],
)
def test_estimator_on_two_coins_has_the_moments_worked_out_by_hand(
    estimator: Estimator, scale: float, variance: float
) -> None:
    tree, behavior, policy = chain()
    one = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    spread = 0.75 * 0.25 * math.log(3) ** 2
    found = moments(tree, behavior, estimates(tree, behavior, policy, estimator))
    assert sequential_kl(tree, behavior, policy, 1.0)[0] == pytest.approx(2 * one, abs=1e-15)
    assert found.mean[0] == pytest.approx(2 * one * scale, abs=1e-15)
    assert found.variance[0] == pytest.approx(variance * spread, abs=1e-15)
    assert found.mean[3:].tolist() == [0.0] * 4


@pytest.mark.parametrize("discount", [0.6, 1.0])
def test_estimators_on_random_trees_are_unbiased_except_the_window_mean(discount: float) -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=50)
    behavior, policy = random_policy(rng, tree), random_policy(rng, tree)
    exact = sequential_kl(tree, behavior, policy, discount)
    found = {name: moments(tree, behavior, estimates(tree, behavior, policy, name, discount)) for name in ESTIMATORS}
    for name in ("sum", "sum of exact KL", "sum of k3"):
        np.testing.assert_allclose(found[name].mean, exact, rtol=0, atol=1e-12)
    assert np.abs(found["window mean"].mean - exact).max() > 0.1
    # Not at every edge: a likely token's log-ratio may offset what its continuation costs.
    assert found["sum of exact KL"].variance.mean() < found["sum of k3"].variance.mean() < found["sum"].variance.mean()
    assert (found["sum of exact KL"].variance > found["sum"].variance + 1e-6).any()
    assert (estimates(tree, behavior, policy, "sum of k3", discount) >= 0).all()


def test_window_mean_with_one_token_ahead_is_the_sum() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=50, depth=2)
    behavior, policy = random_policy(rng, tree), random_policy(rng, tree)
    both = [estimates(tree, behavior, policy, name) for name in ("window mean", "sum")]
    np.testing.assert_array_equal(*both)
    below = tree.at_child(kl(tree, behavior, policy))
    np.testing.assert_allclose(moments(tree, behavior, both[0]).mean, below, rtol=0, atol=1e-12)


def test_rms_error_of_many_continuations_keeps_the_bias_and_shrinks_the_noise() -> None:
    found = Moments(np.array([3.0]), np.array([16.0]))
    assert rms_error(found, np.array([0.0]), 1).tolist() == [5.0]
    assert rms_error(found, np.array([0.0]), 10**12).tolist() == pytest.approx([3.0])
