"""A query larger than a micro-batch: scored first, trained row by row, with the gradient of all its rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair, TokenizedSide
from regretless.modeling import prefix_tree
from regretless.modeling.forward import grouped
from regretless.modeling.layout import Ids, as_context, own_ids
from regretless.modeling.token_logps import TokenScores
from regretless.objectives import OBJECTIVES, build
from regretless.training import passes
from regretless.training.passes import Passes, joined
from regretless.training.trainer import PreferenceTrainer

Make = Callable[..., PreferenceTrainer]

METHODS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OBJECTIVES if not build(name).token_numbers),
    ("repo", {"formulation": "released", "sft_weight": 0.3}),
    ("repo", {"granularity": "step"}),
    ("tdpo", {"variant": "tdpo1"}),
    ("dpo", {"reference": "behavior", "ld_alpha": 0.5, "importance": "mean", "importance_clip": 2.0}),
    ("tdpo", {"ld_alpha": 0.5}),
    ("weighted_sum", {"terms": [{"objective": "kto"}, {"objective": "sft", "weight": 0.5}, {"objective": "tdpo"}]}),
]
SMALL = 18
"""Tokens: two responses of the 2 × 2 queries and their prompt."""


@pytest.fixture
def make_double(make_trainer: Make, make_model: Callable[..., PreTrainedModel]) -> Make:
    """A trainer in float64 throughout, for a model whose norms are not computed in float32; its LoRA does something."""

    def make(**options: Any) -> PreferenceTrainer:
        trainer = make_trainer(model=make_model(model_type="starcoder2").double(), **options)
        numbers = torch.Generator().manual_seed(5)
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                assert parameter.dtype == torch.float64
                parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=numbers, dtype=torch.float64))
        trainer.prepare_reference()
        return trainer

    return make


def gradient(trainer: PreferenceTrainer) -> Tensor:
    """The trained weights' gradient, which is then gone."""
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])
    trainer.model.zero_grad()
    return found


def step(trainer: PreferenceTrainer, budget: int) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of a step of all pairs, with so many tokens at a time."""
    trainer._microbatch_tokens = budget
    loss = trainer.training_step(trainer.model, list(trainer.train_dataset))
    return float(loss), gradient(trainer), trainer._means["train"].take(trainer.accelerator)


def assert_same_gradient(found: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 0
    assert (found - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize(("name", "hyperparameters"), METHODS)
def test_step_when_queries_are_larger_than_a_microbatch_then_loss_gradients_and_metrics_stay(
    name: str, hyperparameters: dict[str, Any], make_double: Make
) -> None:
    trainer = make_double(objective=name, objective_kwargs=hyperparameters)
    z_ref = trainer._zero_point(list(trainer.train_dataset), counts=True)
    trainer._zero_point = lambda pairs, counts: z_ref  # scored in float32, with rows of another size
    loss, expected, metrics = step(trainer, 100_000)
    small_loss, found, small_metrics = step(trainer, SMALL)
    assert metrics["tokens/recomputed"] == 0
    # Chosen responses alone, as SFT has them, have nothing to do with each other.
    assert small_metrics["tokens/recomputed"] > 20 if name != "sft" else small_metrics["tokens/recomputed"] == 0
    assert small_loss == pytest.approx(loss, rel=1e-13)
    assert_same_gradient(found, expected)
    for key, value in metrics.items():
        if not key.startswith("tokens/"):
            assert small_metrics[key] == pytest.approx(value, rel=1e-6), key  # statistics are float32
    assert "rewards/accuracies" in metrics or name == "sft"


def conversations() -> list[TokenizedPair]:
    """Two queries of four conversations that part at the second or the third message, each with a masked pair."""
    numbers = torch.Generator().manual_seed(4)

    def words(count: int) -> Ids:
        return tuple(torch.randint(4, 40, (count,), generator=numbers).tolist())

    def side(ids: Ids) -> TokenizedSide:
        return TokenizedSide(ids, {"behavior": tuple((-4 * torch.rand(len(own_ids(ids)), generator=numbers)).tolist())})

    found: list[TokenizedPair] = []
    for query in range(2):
        prompt, first = words(5), (*words(11), 2, *as_context(words(6)))
        second = [(*first, *words(4), 2, *as_context(words(3))) for _ in range(2)]
        right, wrong = ([side((*begin, *words(5 + query), 2)) for begin in second] for _ in range(2))
        pairs = [(one, other, "original") for one in right for other in wrong]
        pairs.append((right[0], right[0].cut(len(right[0].ids) - 4), "masked"))
        found += [
            TokenizedPair(f"{query}-{number}", prompt, *sides, f"rows:{number}", kind)
            for number, (*sides, kind) in enumerate(pairs)
        ]
    return found


@pytest.mark.parametrize(
    ("name", "hyperparameters"), [("repo", {}), ("repo", {"granularity": "step"}), ("tdpo", {}), ("orpo", {})]
)
def test_step_when_conversations_share_beginnings_then_loss_gradients_and_metrics_stay_and_fewer_tokens_are_computed(
    name: str, hyperparameters: dict[str, Any], make_double: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    data = conversations()
    # A query's tokens without its prompt and last ones: conversations of 18 + 8 + 6 (or 7) tokens, each by itself, or
    # once what four share, twice what two share, and four ends.
    for shared, budget, tokens in [
        (10**9, 1000, [5 + 4 * (18 + 8 + 5), 5 + 4 * (18 + 8 + 6)]),
        (16, 1000, [5 + 18 + 2 * 8 + 4 * 5, 5 + 18 + 2 * 8 + 4 * 6]),
        # Of 45 tokens in a row, those that part at the third message are together.
        (16, 45, [2 * (5 + 18 + 8 + 2 * 5), 2 * (5 + 18 + 8 + 2 * 6)]),
    ]:
        monkeypatch.setattr(prefix_tree, "SHARED_AT_LEAST", shared)
        trainer = make_double(objective=name, objective_kwargs=hyperparameters, data=data)
        loss, gradients, metrics = step(trainer, budget)
        assert metrics["tokens/computed"] == sum(tokens)
        assert metrics["tokens/computed"] + metrics["tokens/saved"] == sum(
            len(pair.prompt_ids) + len(side.ids) for pair in data for side in pair.sides
        )
        found[shared, budget] = loss, gradients, metrics
    (loss, gradients, metrics), *others = found.values()
    for other_loss, other_gradients, other_metrics in others:
        assert other_loss == pytest.approx(loss, rel=1e-12)
        assert_same_gradient(other_gradients, gradients)
        for key, value in metrics.items():
            if not key.startswith("tokens/"):
                assert other_metrics[key] == pytest.approx(value, rel=1e-6), key  # statistics are float32


def test_all_weights_when_trained_on_a_query_larger_than_a_microbatch_then_gradients_stay(make_double: Make) -> None:
    trainer = make_double(objective="repo", lora=False)
    _, expected, _ = step(trainer, 100_000)
    _, found, _ = step(trainer, SMALL)
    assert_same_gradient(found, expected)


@pytest.mark.parametrize("fault", ["of the other row", "of another response", "of the first row only"])
def test_derivatives_when_they_belong_to_other_scores_then_the_comparison_of_gradients_notices(
    fault: str, make_double: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_double(objective="dpo")
    _, expected, _ = step(trainer, 100_000)
    right = passes.derivatives_by_row

    def wrong(loss: Tensor, scores: TokenScores, layouts: Any) -> list[dict[str, Tensor]]:
        rows = [row["logps"] for row in right(loss, scores, layouts)]
        if fault == "of the other row":  # cut to its length
            rows = list(torch.cat(rows[::-1]).split([len(row) for row in rows]))
        elif fault == "of another response":
            rows = [row.roll(len(row) // 2) for row in rows]
        else:
            rows = [rows[0], *(torch.zeros_like(row) for row in rows[1:])]
        return [{"logps": row} for row in rows]

    monkeypatch.setattr(passes, "derivatives_by_row", wrong)
    _, found, _ = step(trainer, SMALL)
    with pytest.raises(AssertionError):
        assert_same_gradient(found, expected)


def test_dropout_when_a_row_is_computed_twice_then_both_passes_drop_the_same(make_double: Make) -> None:
    trainer = make_double(objective="dpo", dropout=0.3)
    trainer._microbatch_tokens = SMALL
    model = trainer.model
    pairs = [item for item in trainer.train_dataset if item.pair.prompt_ids == trainer.train_dataset[2].pair.prompt_ids]
    batch = trainer._batch(pairs)
    assert len(batch.layouts) == 2
    model.train()

    def score(layout: Any, statistics: bool) -> TokenScores:
        return trainer._scores(model, layout, statistics=statistics)

    def loss(batch: Any, scores: TokenScores | None, counts: bool) -> Tensor:
        return trainer.compute_loss(model, batch, counts=counts, scores=scores)

    # All graphs at once, in the order of the passes: the first row's is the last one.
    with grouped(model):
        torch.manual_seed(3)
        second = score(batch.layouts[1], True)
        scores = joined([score(batch.layouts[0], True), second])
        after = torch.rand(3)
        loss(batch, scores, True).backward()
        expected = gradient(trainer)

        torch.manual_seed(3)
        Passes(trainer.accelerator, model, score, loss).gradients([(batch, 1.0)])
        assert torch.equal(torch.rand(3), after)  # nothing that comes later is drawn twice
        assert_same_gradient(gradient(trainer), expected)

        torch.manual_seed(4)
        assert not torch.allclose(score(batch.layouts[1], False).logps, second.logps)


def test_model_when_it_draws_random_numbers_of_its_own_then_a_query_in_two_rows_is_refused(make_trainer: Make) -> None:
    trainer = make_trainer(objective="dpo")
    trainer.prepare_reference()
    step(trainer, SMALL)  # the model is checked here
    own = torch.Generator().manual_seed(1)

    def noise(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + torch.randn(output.shape, generator=own)

    trainer.model.get_input_embeddings().register_forward_hook(noise)
    with pytest.raises(
        ConfigError, match=r"max_tokens_per_microbatch: pairs\.jsonl:\d+ .* not torch's.* to \d+ or more"
    ):
        step(trainer, SMALL)
    step(trainer, 100_000)


def test_tokens_when_a_query_needs_two_rows_then_the_log_counts_what_was_computed_twice_and_saved(
    make_trainer: Make,
) -> None:
    def side(token: int) -> TokenizedSide:
        return TokenizedSide((token,) * 10)

    pairs = [
        TokenizedPair(f"p{c}{r}", (4, 5, 6, 8), side(c), side(r), f"rows:{c}{r}", "original")
        for c in (10, 11, 12)
        for r in (20, 21)
    ]
    lines = {}
    for budget in (1000, 34, 14):
        trainer = make_trainer(
            data=pairs, objective="dpo", per_device_train_batch_size=6, max_steps=2, max_tokens_per_microbatch=budget
        )
        trainer.train()
        lines[budget] = [line for line in trainer.state.log_history if "loss" in line]
    names = ("tokens/computed", "tokens/saved", "tokens/recomputed")
    pairwise = 6 * 2 * (4 + 10)
    # A response's last token is not read. Of five responses, 34 tokens hold three with the prompt; 14 hold one.
    expected = {1000: (4 + 5 * 9, 0), 34: (2 * 4 + 5 * 9, 4 + 2 * 9), 14: (5 * 4 + 5 * 9, 4 * (4 + 9))}
    for budget, (computed, recomputed) in expected.items():
        for line in lines[budget]:
            assert tuple(line[name] for name in names) == (computed, pairwise - computed, recomputed)
        assert lines[budget][-1]["num_tokens"] == 2 * pairwise
