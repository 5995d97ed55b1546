"""Models that stay loaded: copies share weights and nothing else, and a weight that was written to is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model

from regretless.core.errors import RegretlessError
from regretless.modeling import load, model_check
from regretless.modeling.kept_models import models_stay_loaded
from regretless.modeling.load import ModelConfig, load_model
from regretless.training.constructor import turn_off_dropout
from regretless.world.tiny_models import smoke_architecture

IDS = torch.tensor([[1, 2, 3]])


def tiny(seed: int) -> Any:
    """A model with random weights."""
    return load_model(ModelConfig(architecture=smoke_architecture("qwen3", 20), init_seed=seed))


@pytest.fixture
def folders(tmp_path: Path) -> list[ModelConfig]:
    """Three models in folders."""
    for number in range(3):
        tiny(number).save_pretrained(tmp_path / str(number))
    return [ModelConfig(name_or_path=str(tmp_path / str(number))) for number in range(3)]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that a model was read from."""
    read: list[str] = []
    plain = load._pretrained_model

    def noting(config: ModelConfig, origin: load.Origin) -> Any:
        read.append(Path(origin.base).name)
        return plain(config, origin)

    monkeypatch.setattr(load, "_pretrained_model", noting)
    return read


def test_copy_when_its_layers_change_then_the_next_one_is_as_read_in_the_same_memory(
    folders: list[ModelConfig], reads: list[str]
) -> None:
    with models_stay_loaded():
        first: Any = load_model(folders[0], for_training=True, base_stays=True)
        expected = load_model(folders[1])(IDS).logits, load_model(folders[0])(IDS).logits
        memory = first.model.embed_tokens.weight.data_ptr()
        turn_off_dropout(first)
        first.gradient_checkpointing_enable()
        first.enable_input_require_grads()
        first.config.use_cache = False
        adapted = get_peft_model(first, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        adapted.half()
        second: Any = load_model(folders[0])
        assert torch.equal(second(IDS).logits, expected[1]) and not torch.equal(*expected)
        assert second.model.embed_tokens.weight.data_ptr() == memory
        assert second.dtype == torch.float32 and second.config.use_cache and not second.is_gradient_checkpointing
        assert all(weight.requires_grad for weight in second.parameters()) and not second.training
        assert not second.model.embed_tokens._forward_hooks and first.model.embed_tokens._forward_hooks
        assert reads == ["0", "1"]
    load_model(folders[0])
    assert reads == ["0", "1", "0"], "outside of the block, nothing stays"


def test_kept_models_when_others_are_used_then_the_last_two_stay_and_changed_files_are_read_again(
    folders: list[ModelConfig], reads: list[str]
) -> None:
    with models_stay_loaded():
        for number in (0, 1, 0, 2, 0, 1):
            load_model(folders[number])
        assert reads == ["0", "1", "2", "1"]
        tiny(7).save_pretrained(str(folders[0].name_or_path))
        assert torch.equal(load_model(folders[0])(IDS).logits, tiny(7)(IDS).logits)


def test_model_when_its_weights_are_trained_then_it_is_not_kept(folders: list[ModelConfig], reads: list[str]) -> None:
    with models_stay_loaded():
        expected = load_model(folders[0])(IDS).logits
        trained = load_model(folders[0], for_training=True)
        with torch.no_grad():
            for weight in trained.parameters():
                weight.add_(1)
        assert torch.equal(load_model(folders[0])(IDS).logits, expected) and reads == ["0", "0"]


def test_adapter_when_it_trains_biases_of_the_base_then_these_are_its_own(
    folders: list[ModelConfig], tmp_path: Path
) -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    get_peft_model(load_model(folders[0]), config).save_pretrained(tmp_path / "adapter")
    on_it = folders[0].model_copy(update={"adapter": str(tmp_path / "adapter")})
    with models_stay_loaded():
        expected = load_model(folders[0])(IDS).logits
        with torch.no_grad():
            for weight in load_model(on_it, for_training=True).parameters():
                if weight.requires_grad:
                    weight.add_(1)
        assert torch.equal(load_model(folders[0])(IDS).logits, expected)


def test_copies_when_they_have_the_same_layers_then_one_check_is_for_all(
    folders: list[ModelConfig], tmp_path: Path
) -> None:
    for rank in (2, 3):
        adapted = get_peft_model(load_model(folders[0]), LoraConfig(r=rank, target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path / str(rank))

    def checks(rank: int | None, base: ModelConfig = folders[0]) -> int:
        adapter = None if rank is None else str(tmp_path / str(rank))
        with patch.object(model_check.ModelCheck, "run") as run:
            model_check.check_grouped(load_model(base.model_copy(update={"adapter": adapter})), 8)
        return run.call_count

    asked = [(None,), (2,), (2,), (3,), (3,), (None,), (None, folders[1]), (2, folders[1])]
    with models_stay_loaded():
        assert [checks(*of) for of in asked] == [1, 1, 0, 1, 0, 0, 1, 1]  # type: ignore[arg-type]
    assert [checks(2), checks(2)] == [1, 1], "outside of the block, each model is another one"


@pytest.mark.parametrize("write", [lambda weight: weight.data.add_(1), lambda weight: weight.detach().zero_()])
def test_kept_model_when_a_weight_was_written_to_then_it_is_refused(write: Any, folders: list[ModelConfig]) -> None:
    with models_stay_loaded():
        model: Any = load_model(folders[0])
        write(model.model.layers[0].mlp.up_proj.weight)
        with pytest.raises(RegretlessError, match="written to in memory"):
            load_model(folders[0])
        load_model(folders[0])  # it is read again
