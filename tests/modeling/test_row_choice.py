"""The choice of rows: what is taken, what is printed, and what is refused."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from regretless.core.errors import ConfigError
from regretless.modeling import row_choice
from regretless.modeling.row_choice import choose_rows
from regretless.modeling.scoring import score_responses
from tiny_kinds import needs_states, tiny_of_kind

ITEMS = [((5, 6, 7, 8), (9, 10, 2)), ((5, 6, 7, 8), (11, 12, 13, 2))]


@needs_states
def test_rows_when_chosen_by_name_then_they_are_taken_or_refused_with_the_reason() -> None:
    assert choose_rows(tiny_of_kind("qwen3"), 40) == "grouped"
    assert choose_rows(tiny_of_kind("qwen3"), 40, "plain") == "plain"
    model = tiny_of_kind("jamba")
    assert choose_rows(model, 40) == "plain"
    with pytest.raises(
        ConfigError, match=r"model.layers.0.mamba \(JambaMambaMixer\) does not continue from the states"
    ):
        choose_rows(model, 40, "grouped")
    shared, alone = (score_responses(tiny_of_kind("qwen3"), ITEMS, rows=rows) for rows in ("grouped", "plain"))
    assert [len(values) for values in shared] == [3, 4]
    for mine, other in zip(shared, alone, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(other), rtol=0, atol=1e-5)


def test_rows_when_an_adapter_depends_on_where_it_is_invoked_then_each_sequence_has_its_own() -> None:
    model = tiny_of_kind("qwen3").float()
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    config.alora_invocation_tokens = [7, 8]
    model = get_peft_model(model, config).eval()
    # The invocation is at the end of a prompt, in a response, at both places, and nowhere.
    items = [*ITEMS, ((5, 6, 7, 8, 9), (10, 2)), ((9, 10), (3, 7, 8, 11, 12, 2)), ((5, 6, 7, 8), (7, 8, 9, 2))]
    items.append(((9, 10), (11, 12, 13, 14, 15, 16, 2)))
    with pytest.raises(ConfigError, match=r"adapter 'default' does depends on where its invocation tokens are"):
        choose_rows(model, 40, "grouped")
    assert choose_rows(model, 40) == "plain"
    for (prompt, response), found in zip(items, score_responses(model, items), strict=True):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(found), own, rtol=0, atol=1e-5)
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        assert (7 in prompt + response) == bool((base - logits).abs().max() > 1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rows_when_sequences_are_longer_than_a_models_positions_then_it_is_refused_with_their_number(kind: str) -> None:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 256}
    model = tiny_of_kind(kind, **(sizes if kind == "opt" else {"n_positions": 256}))
    ids = tuple(torch.randint(4, 40, (257,), generator=torch.Generator().manual_seed(0)).tolist())
    # The last token of a response is not read.
    assert len(score_responses(model, [(ids[:200], ids[200:])])[0]) == 57
    with pytest.raises(ConfigError, match=r"has embeddings of 256 positions, and the longest .* has 258 tokens"):
        score_responses(model, [(ids[:200], (*ids[200:], 5))])
    assert choose_rows(tiny_of_kind("qwen3", max_position_embeddings=256), 300) == "grouped"


def test_rows_when_a_model_is_not_causal_then_both_reasons_are_named() -> None:
    model = tiny_of_kind("xlm", emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=256)
    with pytest.raises(ConfigError, match=r"rows that share prompts: .*Nor one by one: .* the model is not causal"):
        choose_rows(model, 40)


@needs_states
def test_rows_when_they_cannot_be_shared_then_reason_and_cost_are_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_of_kind("jamba")
    checks: list[int] = []
    check = row_choice.check_grouped
    monkeypatch.setattr(row_choice, "check_grouped", lambda *args: (checks.append(1), check(*args)))
    for _ in range(2):
        score_responses(model, ITEMS)
    printed = capsys.readouterr().err
    assert len(checks) == 1
    assert printed.count("note: JambaForCausalLM") == 1
    assert "model.layers.0.mamba (JambaMambaMixer) does not continue from the states" in printed
    # Two rows of 7 tokens, of which one pads; shared, the prompt of 4 and responses of 3 and 4.
    assert "14 tokens are computed instead of 11 (1.3 times as many)" in printed
    score_responses(tiny_of_kind("qwen3"), ITEMS)
    assert capsys.readouterr().err == ""
