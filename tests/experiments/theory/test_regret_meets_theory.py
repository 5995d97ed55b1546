"""The package's measure of regret on trees, where regret is known."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy import stats
from theory import Problem, evaluate, random_policy, random_problem, random_tree, regret, sequential_kl, solve
from theory.tree import FloatArray

from regretless.core.regret_values import (
    Counts,
    Posterior,
    best_value,
    best_value_of_returns,
    estimated_best_value,
    rate_interval,
    split,
    writer_value,
)


@cache
def posed(alpha: float) -> tuple[Problem, FloatArray]:
    """A forest whose verifier accepts every second response, and a writer."""
    rng = np.random.default_rng(4)
    problem = random_problem(rng, random_tree(rng, prompts=60), rewards="verifier", beta=alpha, discount=1.0)
    return problem, random_policy(rng, problem.tree)


def enumerated(problem: Problem, policy: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean return and KL-to-go (nats) of all of a policy's continuations of every context, (N,) each."""
    tree, responses = problem.tree, problem.tree.responses
    returns = np.where(responses.mask, responses.gather(problem.reward).sum(axis=1)[:, None], 0.0)
    log_ratios = responses.gather(policy - problem.reference)
    ahead = log_ratios + responses.future(log_ratios)
    weights = np.exp(policy)
    # Behind each edge, then over the edges of each context.
    means = [tree.whole.sum(weights * responses.mean_given_edge(policy, values)) for values in (returns, ahead)]
    return means[0], means[1]


@pytest.mark.parametrize("alpha", [1.0, 0.1, 0.01])
def test_values_and_regret_when_every_continuation_is_counted_then_they_are_exact(alpha: float) -> None:
    problem, writer = posed(alpha)
    tree, responses = problem.tree, problem.tree.responses
    best = best_value(np.clip(enumerated(problem, problem.reference)[0], 0, 1), alpha)
    value = writer_value(*enumerated(problem, writer), alpha)
    np.testing.assert_allclose(best, solve(problem).v, rtol=0, atol=1e-12)
    np.testing.assert_allclose(value, evaluate(problem, writer).v, rtol=0, atol=1e-12)
    exact, later = regret(problem, writer), sequential_kl(tree, writer, solve(problem).policy, 1.0)
    for edges, length, outcome in zip(
        responses.edges, responses.lengths, responses.gather(problem.reward).sum(axis=1), strict=True
    ):
        path = edges[:length]
        contexts = tree.source[path]
        found = split([*best[contexts], outcome], [*value[contexts], outcome])
        np.testing.assert_allclose(found.regret, exact[path], rtol=0, atol=1e-12)
        np.testing.assert_allclose(
            found.local, -alpha * (solve(problem).policy - problem.reference)[path], rtol=0, atol=1e-12
        )
        np.testing.assert_allclose(found.future, alpha * later[path], rtol=0, atol=1e-12)


def test_graded_returns_when_each_continuation_is_as_likely_then_v_star_is_exact() -> None:
    rng = np.random.default_rng(0)
    problem, _ = posed(0.1)
    reward = np.where(problem.reward > 0, rng.random(problem.tree.edges), 0.0)
    graded = Problem(tree=problem.tree, reward=reward, reference=problem.reference, beta=0.1)
    responses = graded.tree.responses
    first = responses.prompt == 0
    shares = np.exp(responses.log_prob(graded.reference)[first])
    returns = responses.gather(reward).sum(axis=1)[first]
    drawn = rng.choice(returns, 200_000, p=shares / shares.sum())
    assert best_value_of_returns(drawn, 0.1) == pytest.approx(float(solve(graded).v[0]), abs=2e-3)


@pytest.mark.parametrize("count", [16, 64])
def test_intervals_of_rates_on_the_trees_contexts_then_they_cover_92_percent_in_each_bin(count: int) -> None:
    problem, _ = posed(1.0)
    rates = enumerated(problem, problem.reference)[0]
    intervals = [rate_interval(Counts(x, count)) for x in range(count + 1)]
    covers = np.array([[one.low <= rate <= one.high for one in intervals] for rate in rates])
    covered = (covers * stats.binom.pmf(np.arange(count + 1), count, rates[:, None])).sum(axis=1)
    bins = np.digitize(rates, [0.001, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.999])
    found = {number: float(covered[bins == number].mean()) for number in np.unique(bins)}
    assert len(found) == 10 and min(found.values()) >= 0.92, found


def counts_of(rng: np.random.Generator, rates: FloatArray, count: int) -> list[Counts]:
    return [Counts(int(right), count) for right in rng.binomial(count, rates)]


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_intervals_of_regret_when_the_reference_writes_then_they_cover_92_percent(alpha: float) -> None:
    problem, _ = posed(alpha)
    tree = problem.tree
    rates = np.clip(enumerated(problem, problem.reference)[0], 0, 1)
    exact = regret(problem, problem.reference)
    rng = np.random.default_rng(1)
    inner = np.flatnonzero(tree.child >= 0)[:600]
    hits = {"regret": 0, "local": 0, "future": 0}
    for edge in inner:
        start, behind = (
            Posterior(counts, rng) for counts in counts_of(rng, rates[[tree.source[edge], tree.child[edge]]], 16)
        )
        best = best_value(rates[[tree.source[edge], tree.child[edge]]], alpha)
        found = {
            "regret": (start.best(alpha).minus(behind.writer(alpha)), exact[edge]),
            "local": (start.best(alpha).minus(behind.best(alpha)), best[0] - best[1]),
            "future": (behind.best(alpha).minus(behind.writer(alpha)), best[1] - rates[tree.child[edge]]),
        }
        for name, (draws, truth) in found.items():
            low, high = draws.interval()
            hits[name] += low - 1e-9 <= truth <= high + 1e-9
    assert min(hits.values()) >= 0.92 * len(inner), hits


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_v_star_when_estimated_on_trees_then_its_bias_is_that_of_enumeration_and_its_error_falls_like_a_mean(
    alpha: float,
) -> None:
    problem, _ = posed(alpha)
    rates = enumerated(problem, problem.reference)[0]
    rates = rates[(rates > 0.05) & (rates < 0.95)][:200]
    rng = np.random.default_rng(2)

    def errors(count: int, rounds: int, rates: FloatArray) -> FloatArray:
        right = rng.binomial(count, rates, (rounds, len(rates)))
        values = {x: estimated_best_value(Counts(x, count), alpha) for x in np.unique(right).tolist()}
        return np.asarray(np.vectorize(values.__getitem__)(right) - best_value(rates, alpha))

    values = np.array([estimated_best_value(Counts(x, 16), alpha) for x in range(17)])
    exact = stats.binom.pmf(np.arange(17), 16, rates[:, None]) @ values - best_value(rates, alpha)
    drawn = errors(16, 2000, rates)
    far = np.abs(drawn.mean(axis=0) - exact) / (drawn.std(axis=0) / np.sqrt(2000))
    assert far.max() < 4.5, "in standard errors"
    sizes = np.array([64, 512, 4096])
    rms = [np.sqrt((errors(int(size), 100, rates[:12]) ** 2).mean()) for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(rms), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.05)
