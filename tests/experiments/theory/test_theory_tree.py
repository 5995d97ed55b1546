"""Token trees, and dynamic programming on them against plain recursion."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from theory import END, Problem, TokenTree, evaluate, normalize, regret, sequential_kl, solve
from theory.random_problems import full_tree, random_policy, random_tree

EXPERIMENTS = Path(__file__).resolve().parents[3] / "experiments"


def small_tree() -> TokenTree:
    """Two prompts. 0: token to 2, or end; 1: forced token to 3. 2: two ends; 3: three ends."""
    return TokenTree(np.array([0, 0, 1, 2, 2, 3, 3, 3]), np.array([2, END, 3, END, END, END, END, END]))


def test_token_tree_when_written_out_gives_every_response_once() -> None:
    tree = small_tree()
    assert (tree.prompts, tree.contexts, tree.edges) == (2, 4, 8)
    assert tree.level.tolist() == [0, 0, 1, 1]
    assert tree.prompt.tolist() == [0, 1, 0, 1]
    responses = tree.responses
    assert responses.edges.tolist() == [[1, -1], [0, 3], [0, 4], [2, 5], [2, 6], [2, 7]]
    assert responses.lengths.tolist() == [1, 2, 2, 2, 2, 2]
    assert responses.prompt.tolist() == [0, 0, 0, 1, 1, 1]
    future = responses.future(responses.gather(np.arange(8.0)), 0.5)
    assert future[:, 0].tolist() == [0, 1.5, 2, 2.5, 3, 3.5]
    assert not future[:, 1].any()


def test_responses_when_random_have_probabilities_that_sum_to_one_in_every_prompt() -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, prompts=50)
    responses = tree.responses
    chance = np.exp(responses.log_prob(random_policy(rng, tree)))
    np.testing.assert_allclose(np.bincount(responses.prompt, chance), 1, rtol=0, atol=1e-12)
    assert full_tree(prompts=2, depth=3, branching=2).responses.edges.shape == (16, 3)


def test_mean_given_edge_when_the_policy_is_deterministic_reads_only_what_it_writes() -> None:
    tree = small_tree()
    policy = np.log([1.0, 1e-300, 1, 1, 1e-300, 0.5, 0.5, 1e-300])
    policy[[1, 4, 7]] = -math.inf
    values = np.full(tree.responses.edges.shape, math.inf)
    values[1, 0], values[3, 0], values[4, 0] = 2.0, 4.0, 8.0
    mean = tree.responses.mean_given_edge(policy, values)
    assert mean[0] == 2.0
    assert mean[2] == 6.0


@pytest.mark.parametrize(
    ("source", "child", "message"),
    [
        ([], [], "E ≥ 1"),
        ([0, 0], [END], "two"),
        ([0, 2], [END, END], "contexts in order"),
        ([1, 1], [END, END], "contexts in order"),
        ([0, 1, 1], [1, 1, END], "reached once"),
        ([0, 0, 1, 2], [2, 1, END, END], "reached once"),
        ([0, 1, 2], [END, END, 2], "leads back"),
    ],
)
def test_token_tree_when_its_numbering_is_broken_says_how(source: list[int], child: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(np.array(source, dtype=int), np.array(child, dtype=int))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference": np.log(np.full(8, 0.5))}, "sum to 1"),
        ({"reference": np.zeros(3)}, "each of 8 edges"),
        ({"reward": np.full(8, math.nan)}, "finite"),
        ({"beta": 0.0}, "beta > 0"),
        ({"discount": 1.5}, "discount"),
    ],
)
def test_problem_when_its_numbers_cannot_be_says_which(change: dict[str, object], message: str) -> None:
    tree = small_tree()
    good: dict[str, object] = {"reward": np.zeros(8), "reference": normalize(tree, np.zeros(8))}
    with pytest.raises(ValueError, match=message):
        Problem(tree=tree, **{**good, **change})  # type: ignore[arg-type]


def test_dynamic_programming_when_compared_with_plain_recursion_is_equal() -> None:
    rng = np.random.default_rng(1)
    tree = random_tree(rng, prompts=20)
    reward, reference, mu = rng.standard_normal(tree.edges), random_policy(rng, tree), random_policy(rng, tree)
    beta, discount = 0.3, 0.8
    problem = Problem(tree=tree, reward=reward, reference=reference, beta=beta, discount=discount)
    best = solve(problem)

    def edges(context: int) -> list[int]:
        return [edge for edge in range(tree.edges) if tree.source[edge] == context]

    def optimal(context: int) -> float:
        terms = (reference[edge] + optimal_q(edge) / beta for edge in edges(context))
        return 0.0 if context == END else beta * math.log(math.fsum(map(math.exp, terms)))

    def optimal_q(edge: int) -> float:
        return float(reward[edge]) + discount * optimal(int(tree.child[edge]))

    def value_q(edge: int) -> float:
        later = (math.exp(mu[e]) * (value_q(e) - beta * (mu[e] - reference[e])) for e in edges(int(tree.child[edge])))
        return float(reward[edge]) + discount * math.fsum(later)

    def divergence(edge: int) -> float:
        later = edges(int(tree.child[edge]))
        return discount * math.fsum(math.exp(mu[e]) * (mu[e] - best.policy[e] + divergence(e)) for e in later)

    found = sequential_kl(tree, mu, best.policy, discount)
    values = evaluate(problem, mu)
    for edge in range(0, tree.edges, 7):
        assert best.q[edge] == pytest.approx(optimal_q(edge), abs=1e-12)
        assert values.q[edge] == pytest.approx(value_q(edge), abs=1e-12)
        assert found[edge] == pytest.approx(divergence(edge), abs=1e-12)
        assert regret(problem, mu)[edge] == pytest.approx(optimal(tree.source[edge]) - value_q(edge), abs=1e-12)


def test_one_decision_when_solved_by_hand_has_the_value_that_the_lemma_names() -> None:
    tree = TokenTree(np.array([0, 0]), np.array([END, END]))
    problem = Problem(tree=tree, reward=np.array([1.0, 0.0]), reference=np.log([0.25, 0.75]), beta=0.5)
    best = solve(problem)
    partition = 0.25 * math.exp(2) + 0.75
    assert best.v[0] == pytest.approx(0.5 * math.log(partition), abs=1e-15)
    assert np.exp(best.policy).tolist() == pytest.approx([0.25 * math.exp(2) / partition, 0.75 / partition], abs=1e-15)
    assert regret(problem, problem.reference).tolist() == pytest.approx([best.v[0] - 1, best.v[0]], abs=1e-15)


def test_theory_when_imported_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, theory; print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=EXPERIMENTS)
    assert result.stdout == "set()\n"
