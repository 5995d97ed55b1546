from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model

from regretless.modeling import decoding
from regretless.modeling.decoding import GROWTH, Decoder, Row, RowCache, decode, draw_next, why_not
from regretless.modeling.draws import Sampler
from regretless.modeling.load import ModelConfig, load_model
from regretless.world.tiny_models import smoke_architecture

VOCABULARY = 40
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [12], [12], [3, 3, 4], [20, 5, 6, 20, 21], [20, 5, 6, 20, 21], [8, 9]]
HOT = Sampler(temperature=1.5, top_k=20, repetition_penalty=1.2)


def model_of(model_type: str, **changes: Any) -> Any:
    architecture = {**smoke_architecture(model_type, VOCABULARY), "initializer_range": 0.3, **changes}
    return load_model(ModelConfig(architecture=architecture, tokenizer=None))


@pytest.fixture(scope="module")
def qwen() -> Any:
    return model_of("qwen3")


def none_over(rows: Sequence[Row]) -> list[bool]:
    return [False] * len(rows)


def ends_at(*tokens: int) -> Any:
    return lambda rows: [row.token_ids[-1] in tokens for row in rows]


def written(model: Any, prompts: Any, slots: int, sampler: Sampler = HOT, most: int = 12, **changes: Any) -> list[Row]:
    """The response to each prompt, in their order."""
    over = changes.get("are_over", none_over)
    seeds = changes.get("seeds", range(len(prompts)))
    rows = list(decode(Decoder(model, slots), prompts, seeds, sampler, most, over))
    assert sorted(row.number for row in rows) == list(range(len(prompts)))
    return sorted(rows, key=lambda row: row.number)


def re_scored(model: Any, row: Row) -> list[float]:
    """Log-probabilities of a response by the model's own forward pass over its text alone."""
    ids = torch.tensor([[*row.prompt, *row.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1]
    return logits.log_softmax(1).gather(1, ids[0, len(row.prompt) :, None])[:, 0].tolist()


KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "mistral": {"sliding_window": 5},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_logps_when_rows_come_and_go_are_those_of_each_text_alone(kind: str) -> None:
    model = model_of(kind, **KINDS[kind])
    assert why_not(model) is None
    rows = written(model, PROMPTS, slots=3, are_over=ends_at(*range(8)))
    assert len({len(row.token_ids) for row in rows}) > 2, "rows end at different times, and others take their place"
    for row in rows:
        assert row.logps == pytest.approx(re_scored(model, row), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen3_next", {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}, "recurrent layers"),
        ("mamba2", {"num_heads": 8}, "recurrent layers"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "recurrent layers"),
        ("bloom", {}, "no layer attends through"),
        ("stablelm", {}, "do not pass keyword arguments"),
        ("minimax", {}, "log-probabilities differ from its own by"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "positions change .*dynamic",
        ),
        ("llama4_text", {"attention_chunk_size": 64}, "not told of the window of 64 tokens"),
    ],
)
def test_model_when_it_cannot_be_decoded_row_by_row_then_it_is_told_why(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    found = why_not(model_of(kind, **changes))
    assert found is not None and re.search(reason, found)


def test_window_when_attention_is_not_told_it_then_the_model_is_refused(qwen: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(qwen.config, "attention_chunk_size", 300, raising=False)
    monkeypatch.setattr(type(qwen.config), "to_dict", lambda self: {"attention_chunk_size": 300})
    assert why_not(qwen) == "attention is not told of the window of 300 tokens that its configuration names"
    assert why_not(qwen, longest=300) is None


def test_model_when_its_keys_are_put_at_another_place_then_the_check_fails(qwen: Any, monkeypatch: Any) -> None:
    put = RowCache.put

    def shifted(self: RowCache, slot: int, states: Any) -> None:
        put(self, slot, [(key.roll(1, dims=1), value) for key, value in states])

    monkeypatch.setattr(RowCache, "put", shifted)
    assert "log-probabilities differ" in (why_not(qwen) or "")


def test_adapter_when_rounding_changes_much_then_what_fused_layers_change_is_allowed_and_no_fault_is(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(decoding, "SPREAD", 0.0)
    lora = LoraConfig(r=8, init_lora_weights=False, target_modules="all-linear")
    model = get_peft_model(model_of("qwen3").to(torch.bfloat16), lora, autocast_adapter_dtype=False).eval()
    _, difference, allowed = decoding._probe(model, model.config)
    assert 0 < difference <= allowed and why_not(model) is None
    attend = decoding._attend
    monkeypatch.setattr(decoding, "_attend", lambda query, key, *of, **how: attend(query, key.roll(1, 1), *of, **how))
    assert "log-probabilities differ" in (why_not(model) or "")


def test_memory_of_rows_on_a_cpu_is_that_of_the_positions_written() -> None:
    slots, positions, size = 4, 1 << 16, 64
    process = psutil.Process()
    before = process.memory_info().rss
    cache = RowCache(slots, positions)
    for slot in range(slots):
        cache.put(slot, [(torch.ones(1, 100, size), torch.ones(1, 100, size))])
    ((keys, values),) = cache.layers
    reserved = 2 * slots * positions * size * 4
    assert keys.nbytes + values.nbytes == reserved
    assert process.memory_info().rss - before < reserved / 4, "up to 2 MiB a row, where the system has large pages"
    assert keys.sum() == slots * 100 * size, "what was not written is 0: attention multiplies it by 0"
    cache.make_room(positions)
    assert cache.layers[0][0] is keys, "nothing is copied while rows become longer"


def test_memory_of_rows_where_it_is_taken_at_once_grows_with_them(monkeypatch: Any) -> None:
    monkeypatch.setattr(decoding, "_takes_memory_when_written", lambda like: False)
    cache = RowCache(2, GROWTH + 20)
    text = torch.randn(1, 5, 4)
    cache.put(1, [(text, -text)])
    assert cache.capacity == GROWTH
    cache.make_room(GROWTH + 1)
    assert cache.capacity == GROWTH + 20, "not more than the longest row can have"
    assert torch.equal(cache.layers[0][1][1, :, :5], -text)


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_tokens_when_other_rows_stand_beside_them_are_the_same(qwen: Any, slots: int) -> None:
    wanted = [row.token_ids for row in written(qwen, PROMPTS, slots=5)]
    assert [row.token_ids for row in written(qwen, PROMPTS, slots)] == wanted
    turned = written(qwen, PROMPTS[::-1], slots, seeds=range(len(PROMPTS))[::-1])
    assert [row.token_ids for row in turned[::-1]] == wanted
    assert len(set(map(tuple, wanted))) == len(wanted), "equal prompts with other seeds are other responses"


@pytest.mark.slow
def test_greedy_tokens_when_memory_grows_equal_those_of_generate(qwen: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoding, "_takes_memory_when_written", lambda like: False)
    most = GROWTH + 20
    rows = written(qwen, PROMPTS, slots=3, sampler=Sampler(temperature=0), most=most)
    for row in rows:
        ids = torch.tensor([row.prompt])
        own = qwen.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most, eos_token_id=None
        )
        assert row.token_ids == own[0, len(row.prompt) :].tolist()


def test_prompts_when_equal_ones_follow_another_are_read_once(qwen: Any, monkeypatch: Any) -> None:
    reads: list[int] = []
    read = Decoder.read

    def noting(self: Decoder, prompts: Any) -> Any:
        reads.append(len(prompts))
        return read(self, prompts)

    monkeypatch.setattr(Decoder, "read", noting)
    written(qwen, PROMPTS, slots=2)
    assert sum(reads) == 5
    reads.clear()
    monkeypatch.setattr(decoding, "READ_TOGETHER", 9)
    written(qwen, PROMPTS, slots=8)
    assert reads == [2, 2, 1], "as many tokens together as are allowed: 7 and 1, 3 and 5, 2"


def test_rows_when_they_end_are_not_computed_on(qwen: Any, monkeypatch: Any) -> None:
    computed: list[int] = []

    def noting(sampler: Any, logits: Any, seen: Any, rows: Any) -> Any:
        computed.append(len(rows))
        return draw_next(sampler, logits, seen, rows)

    monkeypatch.setattr(decoding, "draw_next", noting)
    rows = written(qwen, PROMPTS, slots=3, are_over=ends_at(*range(12)))
    assert sum(computed) == sum(len(row.token_ids) for row in rows)


def test_model_when_rows_are_handed_out_is_as_before(qwen: Any) -> None:
    before = (qwen.config._attn_implementation, "forward" in vars(qwen))
    for _ in decode(Decoder(qwen, 2), PROMPTS, range(len(PROMPTS)), HOT, 3, none_over):
        assert (qwen.config._attn_implementation, "forward" in vars(qwen)) == before
        assert not torch.is_inference_mode_enabled()


def test_logps_when_the_model_has_an_adapter_are_its_own() -> None:
    base = model_of("qwen3")
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, target_modules=targets)).eval()
    assert why_not(model) is None
    rows = written(model, PROMPTS, slots=3)
    for row in rows:
        assert row.logps == pytest.approx(re_scored(model, row), abs=1e-5)
        with model.disable_adapter():
            assert row.logps != pytest.approx(re_scored(model, row), abs=1e-2)
