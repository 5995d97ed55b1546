"""The check that every model passes before its first shared-prefix row: faults that are planted, and what is right."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling import cpu_attention, gpu_attention, model_check
from regretless.modeling.forward import grouped
from regretless.modeling.model_check import check_grouped
from regretless.modeling.plain_check import check_plain
from regretless.modeling.scoring import score_responses

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def tiny(model_type: str, **more: Any) -> PreTrainedModel:
    """Random weights at their initial scale: what is wrong then shows least."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | more))).eval()


def look_back(layer: torch.nn.Module, strength: float) -> None:
    """Add to what a layer gets a part of the token before: a convolution as state-space and hybrid models have one."""
    layer.register_forward_pre_hook(lambda _, args: (args[0] + strength * args[0].roll(1, dims=1), *args[1:]))


class Gated(torch.nn.Module):
    """A causal convolution behind a gate that is still zero: without effect until it has been trained."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, torch.nn.Parameter(torch.zeros(()))
        self.convolution = torch.nn.Conv1d(32, 32, 3, padding=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.convolution(hidden.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        return self.inner(hidden) + self.gate * mixed


@pytest.mark.parametrize("strength", [1.0, 1e-6])
def test_check_when_a_layer_mixes_tokens_then_it_is_named_however_little_it_does(strength: float) -> None:
    model = tiny("qwen3")
    look_back(model.model.layers[1].mlp.down_proj, strength)
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp \(Qwen3MLP\) mixes tokens, and not through"):
        check_grouped(model)


def test_check_when_a_mixing_layer_has_no_effect_yet_then_it_is_named() -> None:
    model = tiny("qwen3")
    model.model.layers[0].mlp = Gated(model.model.layers[0].mlp)
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp \(Gated\) mixes tokens"):
        check_grouped(model)


def test_check_when_attention_reaches_other_responses_then_the_leak_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = cpu_attention._attend

    def leaking(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        # As a row would be that forgets where prompts end: every part sees a little of the one before it.
        output = attend(query, key, *rest)
        seen.append(output.mean(2, keepdim=True))
        return output + (1e-9 * seen[-2] if len(seen) > 1 else 0)

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(cpu_attention, "_attend", leaking)
    with pytest.raises(ConfigError, match=r"depends on \d+ tokens of other responses or prompts"):
        check_grouped(tiny("qwen3").double())


@pytest.mark.parametrize(("window", "off"), [(11, -1), (11, 1), (200, -1), (200, 1)])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen2"])
def test_check_when_a_window_is_off_by_one_then_layer_and_token_are_named(
    model_type: str, window: int, off: int
) -> None:
    # One token of 200 changes log-probabilities by less than 1e-4 at this scale, and the mask by a whole entry.
    sliding = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    model = tiny(model_type, **sliding)
    check_grouped(model)
    model = tiny(model_type, **sliding)
    model.model.layers[0].self_attn.sliding_window = window + off
    place = rf"model.layers.0.self_attn \(\w+Attention\) tells attention a window of {window + off} tokens"
    with pytest.raises(ConfigError, match=rf"{place}, but by its mask token {min(window, window + off)} "):
        check_grouped(model)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gemma", "gemma3_text"])
def test_check_when_only_eager_attention_is_causal_then_the_models_own_is_what_counts(
    model_type: str, precision: torch.dtype
) -> None:
    # Transformers gives SDPA no mask for one sequence; a layer that says it is not causal then sees all of it.
    model = tiny(model_type, use_bidirectional_attention=True).to(precision)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(
        ConfigError, match=r"by its own attention \(sdpa\), a token's score depends on the tokens after"
    ):
        check_grouped(model)
    check_grouped(tiny(model_type).to(precision))


def test_check_when_a_models_own_attention_cannot_compute_it_then_rows_still_can() -> None:
    def no_soft_caps(*args: Any, softcap: float | None = None, **kwargs: Any) -> None:
        raise ValueError(f"softcap {softcap}")  # as transformers' function `sdpa` does in newer versions

    AttentionInterface.register("no_soft_caps", no_soft_caps)
    model = tiny("gemma2", attn_logit_softcapping=20.0)
    model.config._attn_implementation = "no_soft_caps"
    with pytest.raises(ValueError, match="softcap 20"):
        model(torch.tensor([[5, 6]]))
    check_grouped(model)


def test_check_when_the_models_numbers_are_not_finite_then_it_says_so_and_not_that_tokens_leak() -> None:
    for layer in ("norm", "lm_head"):
        model = tiny("qwen3")
        weight = model.model.norm.weight if layer == "norm" else model.lm_head.weight
        weight.data.view(-1)[3] = float("nan")
        with pytest.raises(ConfigError, match="its log-probabilities are not finite numbers: check the weights"):
            check_grouped(model)


def test_check_when_a_configuration_lacks_the_size_of_the_vocabulary_then_the_embeddings_tell_it() -> None:
    class Unsized(LlamaConfig):
        @property
        def vocab_size(self) -> int:
            raise AttributeError("'Unsized' object has no attribute 'vocab_size'")

    model = tiny("llama")
    model.config.__class__ = Unsized
    for check in (check_grouped, check_plain):
        check(model)
    model = tiny("llama")
    model.config.__class__ = Unsized
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens)
    for check in (check_grouped, check_plain):
        with pytest.raises(ConfigError, match=r"neither its configuration \(vocab_size\) nor its input embeddings say"):
            check(model)


def test_check_when_no_sequence_fills_a_window_then_no_time_goes_into_it() -> None:
    model = tiny("mistral", sliding_window=200)
    lengths: list[int] = []
    model.model.register_forward_hook(lambda _, args, output: lengths.append(output[0].shape[1]))
    check_grouped(model, longest=150)
    assert max(lengths) < 100
    check_grouped(model, longest=150)
    check_grouped(model, longest=90)
    assert len(lengths) == (first := len(lengths))
    check_grouped(model, longest=220)  # passed for shorter ones only
    assert len(lengths) > first
    assert max(lengths) > 200


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}),
    "longrope": (
        "phi3",
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
        },
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_check_when_positions_depend_on_the_longest_one_then_sequences_up_to_the_context_train_and_longer_do_not(
    rope: str,
) -> None:
    model_type, parameters = ROPES[rope]
    longer = {"original_max_position_embeddings": 256, "max_position_embeddings": 1024} if rope == "longrope" else {}
    model = tiny(model_type, rope_parameters=parameters, pad_token_id=0, **longer)
    check_grouped(model, longest=256)
    with pytest.raises(ConfigError, match=rf"rope_type {rope}\) gives for a position changes .* up to 256 tokens"):
        check_grouped(model, longest=257)
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (300,), generator=numbers).tolist()
    with pytest.raises(ConfigError, match="max_length"):
        score_responses(model, [(tokens[:40], tokens[40:]), (tokens[:40], tokens[50:60])])


@pytest.mark.parametrize("check", [check_grouped, check_plain])
def test_check_when_the_original_context_is_shorter_than_its_own_rows_then_longer_sequences_are_refused(
    check: Callable[..., None],
) -> None:
    lengths = {"original_max_position_embeddings": 40, "max_position_embeddings": 1024}
    model = tiny("phi3", rope_parameters=ROPES["longrope"][1], pad_token_id=0, **lengths)
    for longest in (41, 60, 400):
        with pytest.raises(ConfigError, match=r"rope_type longrope\) gives for a position changes .* up to 40 tokens"):
            check(model, longest=longest)
    if check is check_grouped:  # one of the other's sequences is longer than this context
        check(model, longest=40)


def test_check_when_an_unknown_embedding_of_positions_depends_on_the_row_then_it_is_refused() -> None:
    model = tiny("llama")
    plain = model.model.rotary_emb.forward

    def stretched(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(x, position_ids * 100 / position_ids.max().clamp(min=100))

    model.model.rotary_emb.forward = stretched
    check_grouped(model, longest=101)
    with pytest.raises(ConfigError, match=r"model.rotary_emb \(LlamaRotaryEmbedding"):
        check_grouped(model, longest=120)


def ignore_positions(model: PreTrainedModel) -> None:
    plain = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: plain(x, torch.arange(x.shape[1])[None])


def scale_logits(model: PreTrainedModel) -> None:
    plain = model.forward

    def forward(**kwargs: Any) -> Any:
        output = plain(**kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = forward


@pytest.mark.parametrize("fault", [ignore_positions, scale_logits])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_check_when_precision_is_low_then_what_is_right_passes_and_what_is_wrong_does_not(
    fault: Callable[[PreTrainedModel], None], precision: str
) -> None:
    for model_type in ("qwen3", "gemma2"):  # with a second attention implementation, and without
        low = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
        for wrong in (False, True):
            model = tiny(model_type, initializer_range=0.2)
            model = model.bfloat16() if precision == "bfloat16" else model
            if wrong:
                fault(model)
            expected = pytest.raises(ConfigError, match="differ from") if wrong else contextlib.nullcontext()
            with low, expected:
                check_grouped(model)


def test_check_of_a_new_adapter_when_under_autocast_then_it_passes() -> None:
    # An adapter's B is zero and filled for one pass of the check. Autocast would keep the filled weights, as cast.
    model = tiny("qwen3", initializer_range=0.2).bfloat16()
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert adapter and all(weight.dtype == torch.float32 and not weight.any() for weight in adapter)
    with torch.autocast("cpu", torch.bfloat16):
        check_grouped(model)
    assert not any(weight.any() for weight in adapter)


def test_check_when_it_has_run_then_the_model_is_as_it_was() -> None:
    model = tiny("qwen3").train()
    model.model.layers[0].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    numbers = torch.get_rng_state()
    check_grouped(model)
    assert model.training
    assert not model.model.layers[0].training
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not model.config._attn_implementation.startswith("regretless")


@pytest.mark.parametrize("window", [None, 11, 200])
def test_check_when_the_row_is_padded_as_on_a_gpu_then_it_passes_and_a_leak_is_refused(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FlexAttention has no backward pass on a CPU: here its mask's rule, which is the package's, is filled in densely.
    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        at = torch.arange(query.shape[2])
        sees = options["block_mask"].mask_mod(torch.tensor(0), torch.tensor(0), at[:, None], at[None, :])
        sees = sees | torch.eye(len(at), dtype=torch.bool)
        if leaks:
            sees[20:, 19] = True
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, sees, scale=options["scale"], enable_gqa=options["enable_gqa"])

    monkeypatch.setattr(gpu_attention, "_flex", lambda device: dense)
    monkeypatch.setattr(model_check, "grouped", functools.partial(grouped, one_row=True))
    leaks = False
    check_grouped(tiny("mistral", sliding_window=window))
    leaks = True
    with pytest.raises(ConfigError, match=r"depends on \d+ tokens of other responses or prompts"):
        check_grouped(tiny("mistral", sliding_window=window))


def test_check_when_memory_runs_out_then_the_model_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(model_check, "response_scores", full)
    with pytest.raises(torch.OutOfMemoryError):
        check_grouped(tiny("qwen3"))
