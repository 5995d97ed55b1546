"""4-bit bases of bitsandbytes' CPU back end: trained through, scored without the adapter, merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from regretless.core.errors import ConfigError
from regretless.evaluation.harness import HarnessSettings, command
from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.layout import Item, lay_out
from regretless.modeling.load import ModelConfig, load_model
from regretless.modeling.scoring import score_responses
from regretless.training import train
from regretless.training.merge import merge_adapter
from regretless.training.train_config import TrainConfig
from regretless.world.tokenizer import build_tokenizer

pytest.importorskip("bitsandbytes")
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}
ITEMS: list[Item] = [((5, 6, 8, 9), (20, 21, 22, 2)), ((5, 6, 8, 9), (20, 31, 2)), ((11, 12), (30, 31, 32, 2))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("base"), build_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), initializer_range=0.1, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def quantized(base: str, **more: Any) -> ModelConfig:
    return ModelConfig(name_or_path=base, quantization={**FOUR_BITS, **more})


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    layout, _ = lay_out(ITEMS)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    with grouped(model):
        found = torch.autograd.grad(response_scores(model, layout).logps.sum(), list(trained.values()))
    return dict(zip(trained, found, strict=True))


def test_quantized_base_when_it_scored_before_training_then_gradients_are_those_of_the_weights_it_stands_for(
    base: str,
) -> None:
    model: Any = load_model(quantized(base), for_training=True)
    assert model.is_quantized and model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    torch.manual_seed(1)
    settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings)
    # Scored without gradients first, as a reference is: bitsandbytes repacks weights in such a pass on some CPUs.
    scores = score_responses(adapted, ITEMS)
    found = gradients(adapted.train())
    plain: Any = load_model(quantized(base))
    bytes_in_4_bits = plain.model.layers[0].mlp.up_proj.weight.nbytes
    torch.manual_seed(1)
    other = get_peft_model(plain.dequantize(dtype=torch.float32), copy.deepcopy(settings)).train()
    other.load_state_dict({n: w for n, w in adapted.state_dict().items() if "lora_" in n}, strict=False)
    for mine, theirs in zip(scores, score_responses(other, ITEMS), strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=1e-4, atol=1e-4)
    assert other.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.nbytes == 8 * bytes_in_4_bits
    expected = gradients(other)
    assert max(float(value.abs().max()) for value in expected.values()) > 0.1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3)


def test_training_when_the_base_is_quantized_then_its_adapter_is_scored_loaded_and_merged_as_it_was_trained(
    base: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 2}"} for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"objective": "dpo", "lora": {"r": 4, "dropout": 0}, "max_steps": 2, "learning_rate": 0.05}
    config = TrainConfig.parse({**settings, "use_cpu": True, "save_steps": 1, "pairs_per_step": 8}, "train")
    train.run(config, "dpo", quantized(base), tmp_path / "pairs.jsonl", tmp_path / "trained")
    recorded = json.loads((tmp_path / "trained" / "quantization.json").read_text())
    assert recorded["load_in_4bit"] is True and recorded["bnb_4bit_quant_type"] == "nf4"
    assert recorded["bnb_4bit_compute_dtype"] == "float32" and recorded["bnb_4bit_use_double_quant"] is True

    # The reference of training, with the adapter off, is the quantized base by itself: to the last bit.
    adapter: Any = load_model(ModelConfig(name_or_path=str(tmp_path / "trained")))
    assert adapter.get_base_model().is_quantized
    alone = score_responses(load_model(quantized(base)), ITEMS)
    full = score_responses(load_model(ModelConfig(name_or_path=base)), ITEMS)
    with adapter.disable_adapter():
        off = score_responses(adapter, ITEMS)
    assert all((mine == theirs).all() for mine, theirs in zip(off, alone, strict=True))
    assert max(abs(mine - theirs).max() for mine, theirs in zip(off, full, strict=True)) > 0.01

    with pytest.raises(ConfigError, match="lm_eval would load its base in full size"):
        command(["gsm8k"], HarnessSettings(), ModelConfig(name_or_path=str(tmp_path / "trained")), tmp_path)
    merged = merge_adapter(tmp_path / "trained", tmp_path / "merged")
    assert merged.dtype == "float32" and merged.difference < 1e-4 and merged.change > 0.01
    on = score_responses(adapter, ITEMS)
    written = score_responses(load_model(ModelConfig(name_or_path=str(tmp_path / "merged"))), ITEMS)
    assert max(abs(mine - theirs).max() for mine, theirs in zip(on, written, strict=True)) < 1e-3


def test_quantization_when_it_cannot_be_used_then_it_is_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: weights are quantized while they are read; not possible with"):
        ModelConfig.parse({"architecture": {"model_type": "qwen3"}, "quantization": FOUR_BITS}, "model")
    with pytest.raises(ConfigError, match="load_in_4bit: expected true, got false"):
        ModelConfig.parse({"name_or_path": base, "quantization": {"load_in_4bit": False}}, "model")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}\n')
    config = TrainConfig.parse({"objective": "sft", "max_steps": 1, "use_cpu": True}, "train")
    with pytest.raises(ConfigError, match="only an adapter can train"):
        train.run(config, "sft", quantized(base), tmp_path / "pairs.jsonl", tmp_path / "trained")
