"""Every causal architecture of transformers in miniature, and what the check before training says of it.

python experiments/architectures.py              # the table of docs/architectures.md
python experiments/architectures.py qwen3 bloom  # some of them, with the whole message
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model types with a causal language model in transformers."""

HIDDEN, HEADS, HEAD, WINDOW = 32, 4, 8, 12
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), 61),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "emb_dim"), HIDDEN),
    **dict.fromkeys(("embedding_dim", "attention_hidden_size", "lru_width", "input_embedding_size"), HIDDEN),
    **dict.fromkeys(("output_embedding_size", "backbone_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("ffn_dim", "dim_ff", "d_inner", "ffn_hidden_size", "expert_ffn_hidden_size", "n_inner"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("shared_experts_intermediate_size", "feed_forward_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "kv_channels", "swa_head_dim", "rotary_dim"), HEAD),
    **dict.fromkeys(("attention_head_size", "query_pre_attn_scalar", "v_head_dim", "qk_nope_head_dim"), HEAD),
    **dict.fromkeys(("qk_rope_head_dim",), HEAD),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_window_size"), WINDOW),
    "is_decoder": True,
    "hidden_size_per_layer_input": 8,
}
"""Sizes by the names that configurations share."""


def tiny_config(model_type: str, **more: Any) -> PretrainedConfig:
    """Configuration of a model type with a layer of each kind and tiny sizes."""
    return CONFIG_MAPPING[model_type](**(_shrunk(CONFIG_MAPPING[model_type]()) | OWN.get(model_type, {}) | more))


def _shrunk(default: PretrainedConfig) -> dict[str, Any]:
    known = default.to_dict()
    values = {key: size for key, size in SIZES.items() if known.get(key) is not None}
    for name in getattr(default, "sub_configs", {}):
        inner = getattr(default, name, None)
        if isinstance(inner, PretrainedConfig):
            values[name] = _shrunk(inner)
    if known.get("kv_lora_rank"):
        values["num_key_value_heads"] = HEADS  # latent attention has keys for every head
    if "head_dim" in known:
        values["head_dim"] = HEAD
    ids = [key for key in known if key.endswith(("_token_id", "_token_index")) and known[key] is not None]
    values |= {key: 60 - number for number, key in enumerate(ids)}
    kinds = known.get("layer_types")
    if kinds:
        values["layer_types"] = list(dict.fromkeys(kinds)) * (2 if len(set(kinds)) == 1 else 1)
        values["num_hidden_layers"] = len(values["layer_types"])
    return values


OWN: dict[str, dict[str, Any]] = {}


def tiny_model(model_type: str, **more: Any) -> PreTrainedModel:
    """Model of a model type with tiny random weights."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type, **more))
    return model.eval()
