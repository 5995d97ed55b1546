"""Every causal architecture of transformers in miniature, and what the check before training says of it.

    python experiments/architectures.py              # the tables of docs/architectures.md
    python experiments/architectures.py qwen3 bloom  # some of them, with the whole message
    python experiments/architectures.py --precision bf16      # those with another answer than in float32
    python experiments/architectures.py --precision autocast  # the same with float32 weights under autocast
    python experiments/architectures.py --adapter             # with LoRA: those with another answer than without

The models have random weights and a layer of each kind that their default configuration names.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from regretless.core.errors import ConfigError
from regretless.modeling.model_check import CANNOT_SHARE
from regretless.modeling.row_choice import choose_rows, why_not_grouped
from regretless.training.adapter import add_adapter

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model types with a causal language model in transformers."""
ANSWERS = ("grouped", "plain", "refused", "not built")
MODELS_OF_2026 = {
    "Qwen3": ("qwen3", "qwen3_moe"),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "Qwen4-Exp": ("qwen4_exp_text",),
    "Nemotron-H": ("nemotron_h",),
    "Jamba": ("jamba",),
    "LFM2": ("lfm2", "lfm2_moe"),
    "Granite 4": ("granitemoehybrid",),
    "gpt-oss": ("gpt_oss",),
    "Llama 4": ("llama4_text",),
    "Gemma 3": ("gemma3_text", "gemma3n_text"),
    "Gemma 4": ("gemma4_text",),
    "Olmo 3": ("olmo3", "olmo_hybrid"),
    "DeepSeek": ("deepseek_v3", "deepseek_v32", "deepseek_v4"),
    "Mixtral": ("mixtral",),
    "Mistral 3": ("ministral3",),
    "GLM": ("glm4_moe", "glm_moe_dsa"),
    "Kimi Linear": ("kimi_linear",),
    "Command A": ("cohere2",),
}
"""Model types of families in use in 2026."""

LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
HIDDEN, HEADS, HEAD, WINDOW = 32, 4, 8, 12
LONGEST = 60
"""Tokens of the longest sequence that the models are asked about: longer than their windows and chunks."""
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
            values[name] = _shrunk(inner) | OWN.get(inner.model_type, {})
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


QWEN4_EXP = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim", "hc_lowrank"), HEAD),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hc_count": 2, "eos_token_id": 60},
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": 4},
    **{"ple_layer_ids": [1], "ple_embed_dim": HIDDEN, "heads_per_ngram": 2, "split_ngram_parts": 1},
    **{"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
OWN: dict[str, dict[str, Any]] = {
    "axk2": {"num_experts_per_tok": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": None, "num_hidden_layers": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 1},
    "kimi_linear": {"linear_head_dim": HEAD, "linear_num_heads": HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 16},
    "qwen4_exp_text": QWEN4_EXP,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16}
    | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16}
    | {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
"""What single model types need beside these."""


def tiny_model(model_type: str, **more: Any) -> PreTrainedModel:
    """Model of a model type with tiny random weights."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **more)
    for part in (config, config.get_text_config(decoder=True)):
        part._experts_implementation = "eager"  # the others have no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


@dataclass
class Verdict:
    """What is said of a model type."""

    answer: str
    """grouped, plain, refused or not built."""
    reason: str = ""
    """Why not grouped; for a refused one also why not plain."""
    model: PreTrainedModel | None = None


def verdict(model_type: str, precision: str = "float32", *, adapter: bool = False) -> Verdict:
    """The model, if transformers can build it this small, and the rows that it is computed in.

    precision: float32, bf16 (also the weights), or autocast (to bfloat16). adapter: with LoRA on all linear layers, and
    on what peft adapts besides.
    """
    try:
        model = tiny_model(model_type)
    # What goes wrong depends on the architecture.
    except Exception as error:
        return Verdict("not built", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    if precision == "bf16":
        model.to(torch.bfloat16)
    rounding = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    try:
        trained = add_adapter(model, LoraConfig(**LORA), seed=0) if adapter else model
        with rounding:
            answer = choose_rows(trained, longest=LONGEST)
    except ConfigError as error:
        return Verdict("refused", str(error).removeprefix(f"{type(model).__name__}: {CANNOT_SHARE}"), model)
    return Verdict(answer, why_not_grouped(model), model)


def row(model_type: str, found: Verdict) -> str:
    """The table's line about a model type; figures are left out, for they are those of random weights."""
    reason = re.sub(r" by [\d.e+-]+ nats \(at most [\d.e+-]+ expected\)", "", found.reason)
    reason = re.sub(r"Nor one by one: \w+: cannot be trained or scored in rows of one sequence each", "Plain", reason)
    reason = reason.replace("|", "\\|")
    return f"| {model_type} | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]} | {found.answer} | {reason} |"


def of_2026(lines: dict[str, str]) -> list[str]:
    """Lines of the table about the models that are most used in 2026, given all its lines by model type."""
    return [
        " | ".join((f"| {name}", lines[model_type].removeprefix("| ")))
        for name, model_types in MODELS_OF_2026.items()
        for model_type in model_types
    ]


def main() -> None:
    """Print the table, the whole messages about single model types, or what a lower precision changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--precision", choices=("float32", "bf16", "autocast"), default="float32")
    parser.add_argument("--adapter", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if arguments.names or arguments.precision != "float32" or arguments.adapter:
        for name in arguments.names or MODEL_TYPES:
            found = verdict(name, arguments.precision, adapter=arguments.adapter)
            if arguments.names or found.answer != verdict(name).answer:
                print(f"{name}: {found.answer}{': ' * bool(found.reason)}{found.reason}", flush=True)
        return
    found_rows = {name: verdict(name) for name in MODEL_TYPES}
    lines = {name: row(name, found) for name, found in found_rows.items()}
    answers = Counter(found.answer for found in found_rows.values())
    print("| rows | model types |\n|---|---|")
    print("\n".join(f"| {answer} | {answers[answer]} |" for answer in ANSWERS))
    print("\n| models | model type | class | rows | why not grouped |\n|---|---|---|---|---|")
    print("\n".join(of_2026(lines)))
    print("\n| model type | class | rows | why not grouped |\n|---|---|---|---|")
    print("\n".join(lines.values()))


if __name__ == "__main__":
    main()
