from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import chisquare
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from regretless.core.errors import ConfigError
from regretless.core.top_logps import unpacked
from regretless.modeling.generation import responses
from regretless.modeling.load import ModelConfig
from regretless.sampling import transformers_engine
from regretless.sampling.base import Completion
from regretless.sampling.engine_settings import SamplingParams
from regretless.sampling.transformers_engine import TransformersEngine
from regretless.world.tiny_models import smoke_architecture

WORDS = ["<pad>", "<end>", "<stop>", *(f"w{number}" for number in range(21))]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [3, 3, 4], [20, 5, 6, 20, 21]]
ALL_ON = SamplingParams(n=1, max_new_tokens=12, repetition_penalty=1.3, top_k=12, top_p=0.9, temperature=1.5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    fast.save_pretrained(folder)
    return str(folder)


def engine_for(tokenizer: str, params: SamplingParams, model_type: str = "qwen3", **changes: Any) -> TransformersEngine:
    architecture = {**smoke_architecture(model_type, len(WORDS)), "initializer_range": 0.3, **changes}
    return TransformersEngine(ModelConfig(architecture=architecture, tokenizer=tokenizer), params)


def scores(model: Any, prompt: list[int], response: list[int]) -> np.ndarray:
    """Logits before each response token, computed for this row alone, without padding or cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0]
    return np.asarray(logits[len(prompt) - 1 : -1].double().numpy())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def drawn_from(logits: np.ndarray, seen: list[int], params: SamplingParams) -> np.ndarray:
    """Log-probabilities after penalty, temperature, top-k and top-p, written from their definitions."""
    logits = logits.copy()
    for token in set(seen):
        logits[token] = (
            logits[token] / params.repetition_penalty
            if logits[token] > 0
            else (logits[token] * params.repetition_penalty)
        )
    logits /= params.temperature
    likely_first = np.argsort(-logits)[: params.top_k]
    probabilities = np.exp(log_softmax(logits[likely_first]))
    enough = int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1
    kept = np.full_like(logits, -np.inf)
    kept[likely_first[:enough]] = logits[likely_first[:enough]]
    return log_softmax(kept)


@pytest.mark.parametrize("model_type", ["qwen3", "gemma2"])
def test_logps_when_sampled_in_a_padded_batch_equal_a_plain_re_score(tokenizer: str, model_type: str) -> None:
    engine = engine_for(tokenizer, ALL_ON, model_type)
    engine.ends = [1, 9, 13]
    completions = [found for seed in range(3) for found in engine.generate(PROMPTS, seed)]
    assert {found.finish_reason for found in completions} == {"stop", "length"}
    for prompt, found in zip(PROMPTS * 3, completions, strict=True):
        logits = scores(engine.model, prompt, found.token_ids)
        raw = [log_softmax(row)[token] for row, token in zip(logits, found.token_ids, strict=True)]
        seen = [prompt + found.token_ids[:position] for position in range(len(found.token_ids))]
        drawn = [
            drawn_from(row, before, ALL_ON)[token]
            for row, before, token in zip(logits, seen, found.token_ids, strict=True)
        ]
        assert found.logps == pytest.approx(raw, abs=1e-4)
        assert found.sampled_logps == pytest.approx(drawn, abs=1e-4)


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("kind", ["raw", "sampled"])
def test_top_logps_when_sampled_are_those_of_each_place_and_end_with_the_response(
    tokenizer: str, kind: Any, decodes: bool
) -> None:
    params = ALL_ON.model_copy(update={"top_logps": 12, "top_logps_kind": kind, "stop": ["w9"]})
    engine = engine_for(tokenizer, params)
    engine.decodes, engine.ends = decodes, [1, 9, 13]
    completions = [found for seed in range(3) for found in engine.generate(PROMPTS, seed)]
    assert {found.finish_reason for found in completions} == {"stop", "stop_string"}
    for prompt, found in zip(PROMPTS * 3, completions, strict=True):
        assert found.token_ids is not None and found.top_logps is not None and found.top_logps_kind == kind
        entries = unpacked(found.top_logps, len(found.token_ids))
        assert entries.shape == (len(found.token_ids), 12)
        for at, logits in enumerate(scores(engine.model, prompt, found.token_ids)):
            seen = prompt + found.token_ids[:at]
            of_place = log_softmax(logits) if kind == "raw" else drawn_from(logits, seen, params)
            np.testing.assert_allclose(entries["logp"][at], np.sort(of_place)[::-1][:12], atol=1e-4)
            np.testing.assert_allclose(entries["logp"][at], of_place[entries["id"][at]], atol=1e-4)
            if kind == "sampled":
                assert np.exp(entries["logp"][at]).sum() == pytest.approx(1, abs=1e-5), "top_k is 12: no tail"


@pytest.mark.parametrize(
    ("params", "vocab_size", "possible"),
    [
        (ALL_ON.model_copy(update={"max_new_tokens": 1}), len(WORDS), range(4, 13)),
        # More tokens than transformers' own default of top-k leaves.
        (SamplingParams(n=1, max_new_tokens=1, temperature=4, top_p=1, top_k=0, repetition_penalty=1), 80, [80]),
    ],
)
def test_draws_when_many_follow_the_recorded_distribution(
    tokenizer: str, params: SamplingParams, vocab_size: int, possible: Sequence[int]
) -> None:
    found = engine_for(tokenizer, params, vocab_size=vocab_size).generate([PROMPTS[0]] * 8000, 0)
    claimed = {item.token_ids[0]: np.exp((item.sampled_logps or [])[0]) for item in found}
    assert len(claimed) in possible
    assert sum(claimed.values()) == pytest.approx(1, abs=1e-5), "every token that can be drawn was drawn"
    counts = {token: sum(item.token_ids == [token] for item in found) for token in claimed}
    expected = [claimed[token] / sum(claimed.values()) * len(found) for token in counts]
    assert chisquare(list(counts.values()), expected).pvalue > 0.01


def test_generate_when_seeded_alike_repeats_and_leaves_the_callers_random_state(tokenizer: str) -> None:
    engine = engine_for(tokenizer, ALL_ON)
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, 7)
    assert torch.equal(state, torch.get_rng_state())
    assert engine.generate(PROMPTS, 7) == first
    assert engine.generate(PROMPTS, 8) != first


def test_greedy_equals_transformers_own_and_draws_nothing(tokenizer: str) -> None:
    params = SamplingParams(n=1, temperature=0, max_new_tokens=10, repetition_penalty=1.0)
    engine = engine_for(tokenizer, params)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, 0), strict=True):
        ids = torch.tensor([prompt])
        own = engine.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
        assert found.token_ids == own[0, len(prompt) :].tolist()
        assert found.sampled_logps is None
        logits = scores(engine.model, prompt, found.token_ids)
        assert found.logps == pytest.approx([log_softmax(row).max() for row in logits], abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_generate_when_the_checkpoint_brings_settings_ignores_and_keeps_them(
    tokenizer: str, temperature: float
) -> None:
    engine = engine_for(tokenizer, ALL_ON.model_copy(update={"temperature": temperature}))
    plain = engine.generate(PROMPTS, 3)
    own = engine.model.generation_config
    own.update(
        repetition_penalty=3.0,
        top_k=1,
        temperature=9.0,
        min_new_tokens=9,
        suppress_tokens=[5, 6],
        no_repeat_ngram_size=1,
    )
    assert engine.generate(PROMPTS, 3) == plain
    assert engine.model.generation_config is own
    assert own.top_k == 1


def test_responses_when_any_end_token_comes_keep_it_and_stop(tokenizer: str) -> None:
    engine = engine_for(tokenizer, ALL_ON.model_copy(update={"max_new_tokens": 40, "repetition_penalty": 1.0}))
    engine.ends = [1, 2]
    found = [item for seed in range(4) for item in engine.generate(PROMPTS, seed)]
    assert {item.token_ids[-1] for item in found if item.finish_reason == "stop"} == {1, 2}
    for item in found:
        stopped = item.finish_reason == "stop"
        assert [token in (1, 2) for token in item.token_ids] == [False] * (len(item.token_ids) - 1) + [stopped]
        assert stopped or len(item.token_ids) == 40
        assert len(item.logps) == len(item.sampled_logps or []) == len(item.token_ids)
        assert item.text == " ".join(WORDS[token] for token in item.token_ids if token > 2)


def test_generate_when_the_model_has_an_adapter_scores_with_it(tokenizer: str, tmp_path: Path) -> None:
    base = engine_for(tokenizer, ALL_ON).model
    trained = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False))
    trained.save_pretrained(tmp_path)
    architecture = {**smoke_architecture("qwen3", len(WORDS)), "initializer_range": 0.3}
    config = ModelConfig(architecture=architecture, tokenizer=tokenizer, adapter=str(tmp_path))
    engine = TransformersEngine(config, ALL_ON)
    found: list[Completion] = engine.generate(PROMPTS, 0)
    for prompt, item in zip(PROMPTS, found, strict=True):
        with_adapter = [
            log_softmax(row)[token]
            for row, token in zip(scores(trained.eval(), prompt, item.token_ids), item.token_ids, strict=True)
        ]
        assert item.logps == pytest.approx(with_adapter, abs=1e-4)
    assert engine.provenance.model == f"qwen3 (random weights, seed 0) + {tmp_path}"


@pytest.mark.parametrize(
    ("kind", "changes", "position"),
    [
        # Bytes of float32, layers, heads of keys, their width; then the same of values.
        ("qwen3", {"head_dim": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}, 4 * 3 * 2 * 8 * 2),
        ("llama", {"head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 2}, 4 * 2 * 1 * 16 * 2),
    ],
)
@pytest.mark.parametrize(("rows", "side_by_side"), [(0.5, 1), (3.5, 3), (100, 64)])
def test_batch_when_a_memory_is_set_then_keys_and_values_fill_it(
    tokenizer: str, monkeypatch: Any, kind: str, changes: dict[str, Any], position: int, rows: float, side_by_side: int
) -> None:
    longest = 7 + 12
    memory = f"{rows * longest * position / 2**30:.12f}GiB"
    engine = engine_for(tokenizer, ALL_ON.model_copy(update={"batch_size": memory}), kind, **changes)
    slots: list[int] = []

    def noting(*of: Any, **how: Any) -> Any:
        slots.append(how["slots"])
        return responses(*of, **how)

    monkeypatch.setattr(transformers_engine, "responses", noting)
    engine.generate(PROMPTS, 0)
    assert slots == [side_by_side]
    engine.with_params(ALL_ON.model_copy(update={"batch_size": "auto"})).generate(PROMPTS, 0)
    engine.with_params(ALL_ON.model_copy(update={"batch_size": 2})).generate(PROMPTS, 0)
    assert slots[1:] == [64, 2]


def test_engine_when_no_token_ends_a_response_is_refused(tokenizer: str, tmp_path: Path) -> None:
    backend = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json", pad_token="<pad>")
    backend.save_pretrained(tmp_path)
    config = ModelConfig(architecture=smoke_architecture("qwen3", len(WORDS)), tokenizer=str(tmp_path))
    with pytest.raises(ConfigError, match="end-of-sequence token"):
        TransformersEngine(config, ALL_ON)
