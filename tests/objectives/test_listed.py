"""The divergence by listed tokens: exact where all is listed, its gradient, its tail, and the authors' code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regretless.core.errors import ConfigError, DataError
from regretless.objectives import Logps, build
from regretless.objectives.listed import Listed

R, T, V = 3, 6, 9
PAIRS = torch.tensor([[0, 1], [2, 1]])
LENGTHS = [6, 2, 5]
MASK = torch.arange(T) < torch.tensor(LENGTHS).unsqueeze(1)


def distributions(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probabilities (R, T, V) of a writer, and logits of a policy, a leaf."""
    numbers = torch.Generator().manual_seed(seed)
    writer = (2 * torch.randn(R, T, V, generator=numbers, dtype=torch.float64)).log_softmax(-1)
    return writer.to(dtype), torch.randn(R, T, V, generator=numbers, dtype=dtype).requires_grad_()


def listed(writer: Tensor, logits: Tensor, count: int) -> Listed:
    """What the head and the data have of the writer's `count` most likely tokens."""
    behavior, ids = writer.topk(count)
    policy = logits.log_softmax(-1)
    others = policy.exp().scatter(-1, ids, 0.0).sum(-1, keepdim=True).clamp(min=torch.finfo(policy.dtype).tiny)
    return Listed(behavior, torch.cat((policy.gather(-1, ids), others.log()), dim=-1))


def logps_of(top: Listed, policy: Tensor, ids: Tensor, **more: Any) -> Logps:
    of_tokens = policy.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return Logps(of_tokens, mask=MASK, reference=of_tokens.detach() - 0.1, top_logps=top, **more)


def exact(writer: Tensor, logits: Tensor) -> Tensor:
    return (writer.exp() * (writer - logits.log_softmax(-1))).sum(-1)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_divergence_when_the_vocabulary_is_listed_then_it_and_its_gradient_are_exact(
    dtype: torch.dtype, within: float
) -> None:
    writer, logits = distributions(dtype=dtype)
    found, wanted = listed(writer, logits, V).divergence(), exact(writer, logits)
    torch.testing.assert_close(found, wanted, rtol=0, atol=within)
    weights = torch.rand(R, T, dtype=dtype)
    gradients = [torch.autograd.grad((weights * each).sum(), logits)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=0, atol=within)


@pytest.mark.parametrize("count", [1, 3, V - 1])
def test_divergence_when_some_are_listed_then_the_others_count_as_one_and_it_is_less(count: int) -> None:
    writer, logits = distributions()
    found, wanted = listed(writer, logits, count).divergence(), exact(writer, logits)
    # The chain rule: what is missing is the divergence among those that are not listed, times their probability.
    ids = writer.topk(count)[1]
    rest = writer.exp().scatter(-1, ids, 0.0).sum(-1)
    inner = [each.scatter(-1, ids, -1e300).log_softmax(-1) for each in (writer, logits)]
    within = (inner[0].exp() * (inner[0] - inner[1])).sum(-1)
    torch.testing.assert_close(found + rest * within, wanted, rtol=0, atol=1e-12)
    assert (count == V - 1) == bool((wanted - found).max() < 1e-12)
    # Its gradient pulls the policy's other tokens together, each in its own proportion.
    gradient = torch.autograd.grad(found.sum(), logits)[0]
    policy = logits.detach().softmax(-1)
    others = policy.scatter(-1, ids, 0.0)
    target = (
        writer.exp() - writer.exp().scatter(-1, ids, 0.0) + rest.unsqueeze(-1) * others / others.sum(-1, keepdim=True)
    )
    torch.testing.assert_close(gradient, policy - target, rtol=0, atol=1e-12)


@pytest.mark.parametrize("never", [-torch.inf, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_when_all_that_can_be_written_is_listed_then_there_is_no_other_token(
    never: float, dtype: torch.dtype
) -> None:
    """A list of four tokens of a writer that draws from three: the policy may do whatever it likes elsewhere."""
    writer, logits = distributions()
    kept = writer.topk(3)[1]
    drawn = torch.full_like(writer, never).scatter(-1, kept, writer.gather(-1, kept)).log_softmax(-1).to(dtype)
    logits = logits.detach().to(dtype)
    logits[..., :2] -= 200  # float32 has no such probability
    logits.requires_grad_()
    found = listed(drawn, logits, 4).divergence()
    terms = drawn.exp() * (drawn - logits.log_softmax(-1))
    wanted = terms.masked_fill(drawn.exp() == 0, 0.0).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradient = torch.autograd.grad(found.sum(), logits)[0]
    torch.testing.assert_close(gradient, logits.softmax(-1) - drawn.exp(), rtol=1e-5, atol=2e-6)


def test_repo_when_all_is_listed_then_it_is_the_mean_over_what_the_writer_might_have_written() -> None:
    """Value and gradient: Σ_s (π_s − r_s) as written, and behind w_s the mean of π_v − m_v over v ~ m at s."""
    writer, logits = distributions()
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (R, T), generator=numbers)
    repo = build("repo", estimator="topk", beta=0.7)
    assert repo.needs == {"reference", "rejected", "top_logps"}
    found = repo(logps_of(listed(writer, logits, V), logits, ids), PAIRS)
    sampled = build("repo", beta=0.7)
    policy = logits.log_softmax(-1)
    of_tokens = policy.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    assert found.scores is not None
    with_all = []
    for token in range(V):
        # The same response, but for the future terms, which are those of this token at every position.
        behavior = of_tokens - (policy - writer)[..., token]
        logps = Logps(of_tokens, mask=MASK, reference=of_tokens.detach() - 0.1, behavior=behavior.detach())
        object.__setattr__(logps, "behavior", behavior.masked_fill(~MASK, 0.0))  # with its gradient
        with_all.append(sampled.token_scores(logps))  # type: ignore[attr-defined]
    mean = (torch.stack(with_all, dim=-1) * writer.exp().masked_fill(~MASK.unsqueeze(-1), 1 / V)).sum(-1).sum(1)
    torch.testing.assert_close(found.scores, mean, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(scores.sum(), logits, retain_graph=True)[0] for scores in (found.scores, mean)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert gradients[0].abs().max() > 0.1 and not gradients[0][~MASK].any()


def test_released_lists_when_compared_with_the_authors_class_then_losses_scores_and_gradients_agree() -> None:
    cases = json.loads(Path(__file__).with_name("released_topk.json").read_text(encoding="utf-8"))["cases"]
    for case in cases:
        values = {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row, dtype=torch.float64) for row in case[name]], batch_first=True
            )
            for name in ("policy", "reference", "top_behavior", "top_policy", "policy_gradient", "top_policy_gradient")
        }
        policy, tops = (values[name].requires_grad_() for name in ("policy", "top_policy"))
        mask = torch.arange(policy.shape[1]) < torch.tensor(case["lengths"]).unsqueeze(1)
        others = (1 - tops.exp().sum(-1, keepdim=True)).clamp(min=1e-30).log()
        top = Listed(values["top_behavior"], torch.cat((tops, others), dim=-1))
        logps = Logps(policy, mask=mask, reference=values["reference"], top_logps=top)
        repo = build("repo", estimator="topk", formulation="released", **case["hyperparameters"])
        output = repo(logps, torch.tensor(case["pairs"]))
        output.loss.backward()
        close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
        assert output.scores is not None
        for found, name in ((output.pair_losses, "pair_losses"), (output.loss, "loss"), (output.scores, "scores")):
            torch.testing.assert_close(found, torch.tensor(case[name], dtype=torch.float64), **close)
        assert policy.grad is not None and tops.grad is not None
        torch.testing.assert_close(policy.grad, values["policy_gradient"], **close)
        torch.testing.assert_close(tops.grad, values["top_policy_gradient"], **close)


def test_long_tails_when_weighted_then_their_divergences_are() -> None:
    writer, logits = distributions()
    ids = torch.zeros(R, T, dtype=torch.long)
    top = listed(writer, logits, 4)
    pair = torch.tensor([[0, 1]])
    found = build("repo", estimator="topk", ld_alpha=0.25)(logps_of(top, logits, ids), pair)
    weights = torch.ones(R, T, dtype=torch.float64)
    weights[0, LENGTHS[1] :] = 0.25
    plain = build("repo", estimator="topk")
    scores = plain.token_scores(logps_of(top, logits, ids))  # type: ignore[attr-defined]
    assert found.scores is not None
    torch.testing.assert_close(found.scores, (weights * scores).sum(1)[:2])


BROKEN: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no lists": (
        lambda: build("repo", estimator="topk")(Logps(torch.zeros(2, 1), mask=torch.ones(2, 1)), PAIRS[:1]),
        DataError,
        "`top_logps`: the most likely tokens.*sample with top_logps, or set estimator=sampled",
    ),
    "no behavior policy": (
        lambda: build("repo_det", estimator="topk"),
        ConfigError,
        "estimator",
    ),
    "other shape": (
        lambda: Logps(
            torch.zeros(2, 3),
            mask=torch.ones(2, 3),
            top_logps=Listed(torch.zeros(2, 2, 4), torch.zeros(2, 3, 5)),
        ),
        ValueError,
        r"Logps.top_logps.behavior: expected \(2, 3\) as policy, got \(2, 2\)",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_lists_when_missing_or_misused_then_the_message_says_what_to_do(fault: str) -> None:
    act, kind, message = BROKEN[fault]
    with pytest.raises(kind, match=message):
        act()
