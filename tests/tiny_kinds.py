"""Tiny models with random weights of many kinds: recurrent layers, masks and output layers of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from regretless.modeling.recurrent import CONTINUES

needs_states = pytest.mark.skipif(not CONTINUES, reason="recurrent layers share rows with transformers 5.21 or newer")
"""For tests of recurrent layers in shared rows."""

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "num_hidden_layers": 3,
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 16, "n_groups": 2},
        **{"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    },
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "llama4_text": {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
    "bloom": {},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "minicpm3": {"dim_model_base": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "bert": {"is_decoder": True},
}


def tiny_of_kind(kind: str, **more: Any) -> PreTrainedModel:
    """A model of the kind with random weights, in float64 as far as its code allows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS.get(kind, {}) | more))
    config._experts_implementation = "eager"  # the others have no float64
    return AutoModelForCausalLM.from_config(config).double().eval()
