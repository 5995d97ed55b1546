"""The statements of the paper's §5 and appendices A and C, each as errors that are zero where it holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from theory.random_problems import deterministic_policy, random_policy
from theory.regularized import (
    Problem,
    behavior_operator,
    evaluate,
    expectation,
    improve,
    kl,
    log_ratio,
    regret,
    reward_of,
    sequential_kl,
    shape,
    solve,
)
from theory.tree import FloatArray


def identities(rng: np.random.Generator, problem: Problem) -> dict[str, FloatArray]:
    """Both sides' difference in every statement that holds: an array over edges or contexts each.

    The two sides are computed in different ways: dynamic programming backwards on one, enumeration of all responses or
    another problem on the other. The random parts are a policy, a deterministic policy and a potential.
    """
    tree, beta, discount, reference = problem.tree, problem.beta, problem.discount, problem.reference
    best, responses = solve(problem), tree.responses
    mu, fixed = random_policy(rng, tree), deterministic_policy(rng, tree)
    potential = 3 * rng.standard_normal(tree.contexts)
    value = evaluate(problem, mu)
    later = sequential_kl(tree, mu, best.policy, discount)

    net = responses.gather(problem.reward) - beta * responses.gather(kl(tree, mu, reference)[tree.source])
    by_definition = problem.reward + responses.mean_given_edge(mu, responses.future(net, discount))
    divergences = responses.gather(kl(tree, mu, best.policy)[tree.source])
    enumerated = responses.mean_given_edge(mu, responses.future(divergences, discount))

    shaped = replace(problem, reward=shape(tree, problem.reward, potential, discount))
    designed = reward_of(tree, mu, reference, potential, beta=beta, discount=discount)
    reached = solve(replace(problem, reward=designed))
    iterated = reference
    for _ in tree.levels:
        iterated = improve(problem, iterated)
    regrets = regret(problem, mu)

    local = responses.gather(beta * log_ratio(best.policy, reference))
    one_sample = local - beta * responses.future(responses.gather(log_ratio(mu, best.policy)), discount)
    likelihood = responses.future(responses.gather(log_ratio(mu, reference)), discount)
    rewards = responses.gather(problem.reward)
    to_go = rewards + responses.future(rewards, discount) - responses.gather(best.v[tree.source])
    return {
        "5.1 V* = β log E_ref exp(Q*/β) is the value of π*": evaluate(problem, best.policy).v - best.v,
        "5.1 no other policy is worth more": np.maximum(value.v - best.v, 0),
        "5.1 Q^μ by Bellman = Q^μ by its definition": value.q - by_definition,
        "A policy improvement reaches π*": iterated - best.policy,
        "A Q^μ is a fixed point of the operator T^μ": behavior_operator(problem, mu, value.q) - value.q,
        "5.3 any potential: π* stays optimal": solve(shaped).policy - best.policy,
        "5.3 any policy, any potential: optimal for its reward": reached.policy - mu,
        "5.3 the potential is V*": reached.v - potential,
        "5.3 any reward = log-ratio + shaping by its V*": problem.reward
        - reward_of(tree, best.policy, reference, best.v, beta=beta, discount=discount),
        "5.4 Q* − Q^μ = β KL̄(μ ‖ π*), KL̄ enumerated": best.q - value.q - beta * enumerated,
        "5.4 the same, μ deterministic": best.q
        - evaluate(problem, fixed).q
        - beta * sequential_kl(tree, fixed, best.policy, discount),
        "5.5 Reg = −β (log π*/π_ref − KL̄)": regrets + beta * (log_ratio(best.policy, reference) - later),
        "5.5 Reg does not change with shaping": regret(shaped, mu) - regrets,
        "6 one-sample −Reg = return to go − V* − β Σ γ^l log μ/π_ref": (one_sample - (to_go - beta * likelihood))[
            responses.mask
        ],
        "§5 μ = π*: Reg = −β log π*/π_ref (DPO's score)": regret(problem, best.policy)
        + beta * (best.policy - reference),
        "V* − V^μ = E_μ Reg + β KL(μ ‖ π_ref)": best.v
        - value.v
        - (expectation(tree, mu, regrets) + beta * kl(tree, mu, reference)),
    }


def claims(rng: np.random.Generator, problem: Problem) -> dict[str, FloatArray]:
    """Differences of log-policies that claims made in passing say are zero: in each context the largest, (N,) each.

    All but the last fail; the last is what the one before should have said.
    """
    tree, reward, beta, discount = problem.tree, problem.reward, problem.beta, problem.discount
    best = solve(problem).policy
    potential = rng.standard_normal(tree.contexts)

    def gap(reward: FloatArray, other: FloatArray) -> FloatArray:
        return np.maximum.reduceat(np.abs(solve(replace(problem, reward=reward)).policy - other), tree.first)

    return {
        "A, 5.3 restated without γ: π* stays optimal": gap(shape(tree, reward, potential, 1.0), best),
        "5.3 with a potential of 1 after the last token: π* stays": gap(
            shape(tree, reward, potential, discount, end=1.0), best
        ),
        "§5 translating rewards (+1 a token): π* stays": gap(reward + 1.0, best),
        "C dividing rewards by σ = 2: π* stays": gap(reward / 2, best),
        "C dividing rewards by σ = 2 is temperature α/σ": gap(
            reward / 2, solve(replace(problem, beta=beta / 2)).policy
        ),
        "(it is temperature α·σ)": gap(reward / 2, solve(replace(problem, beta=beta * 2)).policy),
    }
