"""Weighted sums of objectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError
from regretless.objectives import Logps, build

PAIRS = torch.tensor([[0, 1], [0, 2], [2, 1]])
MakeBatch = Callable[..., dict[str, Tensor]]


def test_sum_when_its_terms_are_those_of_another_objective_then_loss_and_gradient_are_the_same(
    make_batch: MakeBatch,
) -> None:
    batch = make_batch([5, 2, 3])
    terms = [{"objective": "dpo", "beta": 0.3}, {"objective": "sft", "weight": 0.7}]
    logps = Logps(**batch)
    found, expected = build("weighted_sum", terms=terms)(logps, PAIRS), build("rpo", beta=0.3, eta=0.7)(logps, PAIRS)
    torch.testing.assert_close(found.pair_losses, expected.pair_losses)
    gradients = [
        torch.autograd.grad(output.loss, batch["policy"], retain_graph=True)[0] for output in (found, expected)
    ]
    torch.testing.assert_close(*gradients)
    assert found.rewards is not None and expected.rewards is not None
    assert found.rewards.tolist() == expected.rewards.tolist()


def test_sum_when_terms_have_needs_and_modifiers_of_their_own_then_it_has_all_of_them(make_batch: MakeBatch) -> None:
    terms = [
        {"objective": "sft", "weight": 2},
        {"objective": "kto", "weight": 0.5},
        {"objective": "dpo", "reference": "behavior", "ld_alpha": 0.25},
    ]
    objective = build("weighted_sum", terms=terms)
    assert objective.required == {"reference", "behavior", "rejected", "z_ref"}
    assert objective.zero_point == "mismatched"
    logps = Logps(**make_batch([5, 2, 3]), z_ref=0.1)
    kto = build("kto")(logps, PAIRS)
    parts = [build("sft")(logps, PAIRS), kto, build("dpo", reference="behavior", ld_alpha=0.25)(logps, PAIRS)]
    expected = 2 * parts[0].loss + 0.5 * parts[1].loss + parts[2].loss
    output = objective(logps, PAIRS)
    torch.testing.assert_close(output.loss, expected)
    assert output.pair_losses.shape == (3,)
    # The first term with rewards is KTO.
    assert output.rewards is not None and kto.rewards is not None
    assert output.rewards.tolist() == kto.rewards.tolist()
    swapped = build("weighted_sum", terms=terms[::-1])(logps, PAIRS)
    torch.testing.assert_close(swapped.pair_rewards(PAIRS), parts[2].pair_rewards(PAIRS))


def test_sum_when_its_terms_are_unusable_then_every_problem_is_reported() -> None:
    inner = {"objective": "weighted_sum", "terms": [{"objective": "dpo", "beta": -2}]}
    terms = [{"objective": "dpo", "bet": 1, "beta": -1}, {"objective": "ppo", "weight": -1}, {"weight": True}, inner]
    with pytest.raises(ConfigError) as caught:
        build("weighted_sum", terms=terms)
    problems = dict(problem.split(": ", 1) for problem in caught.value.problems)
    assert problems.pop("terms.1.objective").endswith("; got 'ppo'")
    assert problems.pop("terms.2.objective").endswith("; got ''")
    assert problems == {
        "terms.0.beta": "input should be greater than 0 (got -1)",
        "terms.0.bet": "unknown key (got 1); did you mean beta?",
        "terms.1.weight": "expected a number of at least 0, got -1",
        "terms.2.weight": "expected a number of at least 0, got True",
        "terms.3.terms.0.beta": "input should be greater than 0 (got -2)",
    }
    with pytest.raises(ConfigError, match="at least one term"):
        build("weighted_sum", terms=[])
    two = [{"objective": "kto"}, {"objective": "kto", "reference_point": "paired"}]
    with pytest.raises(ConfigError, match="different zero points"):
        build("weighted_sum", terms=two)
    with pytest.raises(ConfigError, match="reference: weighted_sum needs the reference model itself for `z_ref`"):
        build("weighted_sum", terms=two[:1], reference="behavior")


def test_sum_when_its_terms_cannot_have_its_modifier_of_lengths_then_they_are_named() -> None:
    for name in ("simpo", "orpo"):
        terms = [{"objective": "dpo"}, {"objective": "weighted_sum", "terms": [{"objective": name}]}]
        with pytest.raises(ConfigError, match=rf"ld_alpha: .* but terms.1.terms.0 \({name}\) cannot have it, because"):
            build("weighted_sum", terms=terms, ld_alpha=0.5)
    terms = [{"objective": "simpo"}, {"objective": "dpo", "ld_alpha": 0.5}]
    assert build("weighted_sum", terms=terms).ld_alpha == 1
    with pytest.raises(ConfigError, match=r"terms.0 \(simpo\) .*; terms.1 \(dpo\) has one of its own, and the two"):
        build("weighted_sum", terms=terms, ld_alpha=0.5)
    assert build("weighted_sum", ld_alpha=0.5).ld_alpha == 0.5
    weighted = [{"objective": "dpo", "importance": "mean"}]
    with pytest.raises(ConfigError, match=r"importance: .* terms.0 \(dpo\) has one of its own, and the two would"):
        build("weighted_sum", terms=weighted, importance="sum")
    assert build("weighted_sum", terms=weighted).required == {"reference", "rejected", "behavior"}
