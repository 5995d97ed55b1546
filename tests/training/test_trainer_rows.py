"""Training of hybrids, in shared rows or in plain ones: the numbers are those of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import chosen_logps, logits_of, plain_loss

from regretless.core.errors import ConfigError
from regretless.data.tokenization import TokenizedPair
from regretless.modeling.compiled_layers import is_compiled
from regretless.training.arguments import PreferenceConfig
from regretless.training.train_config import TrainConfig
from regretless.training.trainer import PreferenceTrainer
from tiny_kinds import needs_states, tiny_of_kind

Make = Callable[..., PreferenceTrainer]


@pytest.mark.parametrize(
    ("kind", "objective", "lora", "rows"),
    [
        pytest.param("qwen3_5_text", "repo", True, "grouped", marks=needs_states),
        pytest.param("qwen3_5_text", "tdpo", False, "grouped", marks=needs_states),
        pytest.param("nemotron_h", "kto", True, "grouped", marks=needs_states),
        ("bloom", "repo", True, "plain"),
        ("bloom", "kto", True, "plain"),
        ("bloom", "tdpo", False, "plain"),
    ],
)
def test_training_step_when_a_model_is_no_plain_transformer_then_loss_and_gradients_are_those_of_plain_computation(
    kind: str, objective: str, lora: bool, rows: str, make_trainer: Make, pairs: list[TokenizedPair]
) -> None:
    start = tiny_of_kind(kind).float()
    trainer = make_trainer(model=tiny_of_kind(kind).float(), objective=objective, lora=lora, seed=1)
    model = trainer.model
    trainer.prepare_reference()
    # Moved away from the reference.
    numbers = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=numbers))
    batch = list(trainer.train_dataset)
    loss = trainer.training_step(model, batch)
    assert trainer._rows == rows
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.eval()

    def reference(prompt: tuple[int, ...], ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return logits_of(start.eval(), prompt, ids)

    wanted = plain_loss(model, reference, pairs, objective, {}, [item.mismatched for item in batch])
    wanted.backward()
    microbatches, _ = trainer._weighted_microbatches(batch)
    assert len(microbatches) > 2 or rows == "grouped"
    assert {layout.is_plain for each, _ in microbatches for layout in each.layouts} == {rows == "plain"}
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    own = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    mine = torch.cat([grads[key].flatten() for key in own])
    expected = torch.cat([own[key].flatten() for key in own])
    assert expected.norm() > 0
    assert (mine - expected).norm() <= 2e-5 * expected.norm()


@needs_states
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3_next", ""),
        ("jamba", "model.layers.0.mamba (JambaMambaMixer) does not continue from the states behind earlier tokens"),
    ],
)
def test_training_when_a_hybrid_is_trained_then_reference_margins_and_note_are_right(
    kind: str, why: str, make_trainer: Make, pairs: list[TokenizedPair], capsys: pytest.CaptureFixture[str]
) -> None:
    start = tiny_of_kind(kind).float()
    trainer = make_trainer(
        model=tiny_of_kind(kind).float(), objective="dpo", max_steps=6, eval_dataset=pairs[:5], max_length=64
    )
    trainer.prepare_reference()
    trainer.train()
    printed = capsys.readouterr().err
    assert printed.count("each sequence is computed in a row of its own") == bool(why)
    assert why in printed
    # With its adapters off the trained model is the one that training began with.
    for pair in pairs:
        for side in pair.sides:
            kept = trainer._reference_logps[pair.prompt_ids, side.ids]
            with torch.no_grad():
                own = chosen_logps(logits_of(start, pair.prompt_ids, side.ids), side.ids)
            torch.testing.assert_close(torch.from_numpy(kept), own, rtol=0, atol=1e-5)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert lines[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    # It was trained on the pairs that it is evaluated on.
    assert trainer.evaluate()["eval_rewards/margins"] > 0.1


@needs_states
def test_rows_when_set_by_name_then_training_is_the_same_and_grouped_refuses_what_cannot_be(
    make_trainer: Make, make_model: Callable[..., Any]
) -> None:
    losses = []
    for rows in ("grouped", "plain"):
        trainer = make_trainer(
            model=make_model(), objective="repo", rows=rows, max_steps=3, max_tokens_per_microbatch=200
        )
        trainer.train()
        assert trainer._rows == rows
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    trainer = make_trainer(model=tiny_of_kind("jamba").float(), objective="dpo", rows="grouped")
    with pytest.raises(ConfigError, match=r"\(JambaMambaMixer\) does not continue"):
        trainer.train()


def test_compiled_layers_when_rows_are_not_shared_then_it_is_refused_before_the_first_step(
    make_trainer: Make, tmp_path: Path
) -> None:
    trainer = make_trainer(model=tiny_of_kind("bloom").float(), objective="dpo", compile_layers=True)
    with pytest.raises(ConfigError, match=r"compile_layers: .* computed in plain rows: .*set it to false"):
        trainer.train()
    others = {"rows": "plain", "gradient_checkpointing": True, "fsdp": "full_shard"}
    with pytest.raises(ConfigError, match=r"3 problem\(s\)") as caught:
        PreferenceConfig(output_dir=str(tmp_path), use_cpu=True, compile_layers=True, **others)
    for what in ("with gradient_checkpointing, ", "with fsdp, ", "compute shared rows, not plain ones; remove one"):
        assert what in str(caught.value)
    with pytest.raises(ConfigError, match="compile_layers: fsdp2 gathers weights"):
        TrainConfig.parse({"objective": "dpo", "strategy": "fsdp2", "compile_layers": True}, "train")
    own = {"compile_layers": True, "gradient_checkpointing": True}
    recipe = TrainConfig.parse({"objective": "dpo", "rows": "plain", "methods": {"dpo": own}}, "train")
    first, second = recipe.problems_here("dpo")
    assert first.startswith("methods.dpo.compile_layers: not together with gradient_checkpointing, which")
    assert second.startswith("methods.dpo.compile_layers: the compiled layers compute shared rows")


def test_layers_when_an_earlier_trainer_compiled_them_then_another_one_does_not(
    make_trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_of_kind("bloom").float()
    make_trainer(model=model, objective="dpo", lora=False, compile_layers=True)
    assert is_compiled(model)
    assert "compile_layers: the first rows compile the layers" in capsys.readouterr().err
    make_trainer(model=model, objective="dpo", lora=False)
    assert not is_compiled(model)
    assert "compile_layers" not in capsys.readouterr().err
