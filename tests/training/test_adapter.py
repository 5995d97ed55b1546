"""LoRA on the experts of mixtures: computed in shared rows, off for the reference, merged, and told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from regretless.core.errors import ConfigError
from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.layout import Item, lay_out
from regretless.modeling.scoring import score_responses
from regretless.training.adapter import add_adapter
from regretless.training.merge import merge_adapter

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTURE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
PARTS = {
    "qwen3_moe": MIXTURE | {"num_experts": 4},
    "mixtral": MIXTURE | {"num_local_experts": 4},
    "gpt_oss": MIXTURE | {"num_local_experts": 4},
    "deepseek_v3": MIXTURE
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
ITEMS: list[Item] = [((5, 6, 8, 9), (20, 21, 22, 2)), ((5, 6, 8, 9), (20, 31, 2)), ((11, 12), (30, 31, 32, 2))]


def settings(**more: object) -> LoraConfig:
    given = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**given, "target_modules": ["q_proj"], "target_parameters": EXPERTS, **more})  # type: ignore[arg-type]


def plain(model: torch.nn.Module, item: Item) -> torch.Tensor:
    row = torch.tensor([[*item[0], *item[1]]])
    logits = model(input_ids=row, use_cache=False).logits[0, len(item[0]) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, row[0, len(item[0]) :, None])[:, 0]


@pytest.mark.parametrize("model_type", PARTS)
def test_experts_with_an_adapter_when_they_compute_shared_rows_then_values_and_gradients_are_those_of_single_ones(
    model_type: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    base = make_model(model_type=model_type, **PARTS[model_type])
    off = [plain(base, item).detach() for item in ITEMS]
    model = add_adapter(base, settings(), seed=0)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert sum("mlp.experts" in name for name in trained) == 2 * 2 * 2  # layers, parameters, A and B

    expected = [plain(model, item) for item in ITEMS]
    wanted = torch.autograd.grad(torch.stack([part.sum() for part in expected]).sum(), list(trained.values()))
    layout, places = lay_out(ITEMS)
    with grouped(model):
        logps = response_scores(model, layout).logps
        gradients = torch.autograd.grad(logps.sum(), list(trained.values()))
    for place, one in zip(places, expected, strict=True):
        torch.testing.assert_close(logps[place], one, rtol=1e-4, atol=1e-5)
    for name, mine, theirs in zip(trained, gradients, wanted, strict=True):
        assert float(theirs.abs().max()) > 1e-4, name
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)

    with model.disable_adapter():
        reference = score_responses(model, ITEMS)
    for found, one, with_adapter in zip(reference, off, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), one, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(one, with_adapter, atol=1e-2)


@pytest.mark.parametrize("model_type", PARTS)
def test_experts_with_an_adapter_when_it_is_merged_then_the_written_model_is_the_same(
    model_type: str, make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    make_model(model_type=model_type, **PARTS[model_type]).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings(), seed=0)
    model.save_pretrained(tmp_path / "adapter")
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert merged.change > 0.1 and merged.difference < 1e-5
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(plain(written, ITEMS[0]), plain(model.eval(), ITEMS[0]), rtol=1e-4, atol=1e-4)


def test_all_linear_when_the_model_is_a_mixture_then_what_has_an_adapter_is_printed_and_dropout_is_refused(
    make_model: Callable[..., PreTrainedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    def adapted(model: PreTrainedModel, **more: object) -> tuple[PeftModel, str]:
        found = add_adapter(model, settings(target_modules="all-linear", target_parameters=None, **more), seed=0)
        return found, capsys.readouterr().err

    mixture = make_model(model_type="qwen3_moe", **PARTS["qwen3_moe"])
    count = sum(weight.numel() for name, weight in mixture.named_parameters() if "down_proj" in name)
    assert (
        f"with an adapter: mlp.experts.gate_up_proj ({2 * count:,}), mlp.experts.down_proj ({count:,})"
        in (adapted(mixture)[1])
    )
    assert adapted(make_model())[1] == ""
    with pytest.raises(ConfigError, match=r"cannot have dropout.*set lora.dropout"):
        adapted(make_model(model_type="qwen3_moe", **PARTS["qwen3_moe"]), lora_dropout=0.1)
    # A family that peft does not know: nothing but what is printed would tell that its experts stay as they are.
    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4,
    )  # fmt: skip
    shown = adapted(AutoModelForCausalLM.from_config(config))[1]
    assert "without one: " in shown and "mlp.experts.gate_up_proj (12,288)" in shown.split("without one: ")[1]
