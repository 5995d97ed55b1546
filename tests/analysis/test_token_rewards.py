"""Token rewards against plain calls of the models and the written-out double sum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flat_pairs import pair_of
from regretless.analysis import token_rewards
from regretless.analysis.token_rewards import TokenRewardsConfig, run, text_pieces
from regretless.core.errors import DataError
from regretless.data.columns import Pair
from regretless.data.rows import write_records
from regretless.modeling.load import ModelConfig, load_model
from regretless.world.tiny_models import smoke_architecture

PROMPT = "Tom has 17 apples. Tom gives 3 to Ann. How many?\n"
CHOSEN, REJECTED = "17-3=14\n\\boxed{14}", "17+3=20\n\\boxed{20}"
SIDES = {"chosen": CHOSEN, "rejected": REJECTED}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that other alphabets' characters are several tokens."""
    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    architecture = smoke_architecture("qwen3", len(tokenizer)) | {"initializer_range": 0.3}
    return ModelConfig(architecture=architecture, tokenizer=str(folder))


def pair(number: int, **more: Any) -> Pair:
    values: dict[str, Any] = {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}
    return pair_of(**(values | {"pair_id": f"pair-{number}", "prompt_id": f"prompt-{number}"} | more))


def with_logps(tokenizer: PreTrainedTokenizerFast, number: int) -> Pair:
    ids = {side: [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for side, text in SIDES.items()}
    logps = {side: [-0.125 * (1 + place % 5) for place in range(len(values))] for side, values in ids.items()}
    return pair(
        number,
        prompt_token_ids=tokenizer(PROMPT)["input_ids"],
        **{f"{side}_token_ids": values for side, values in ids.items()},
        **{f"{side}_logps": values for side, values in logps.items()},
    )


def plain_logps(model: ModelConfig, prompt: list[int], response: list[int]) -> list[float]:
    row = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = load_model(model)(row).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0].tolist()


def test_token_rewards_when_written_then_values_are_those_of_the_models_and_sums_are_the_repo_score(
    tokenizer: PreTrainedTokenizerFast, model: ModelConfig, tmp_path: Path
) -> None:
    write_records(tmp_path / "pairs.parquet", [with_logps(tokenizer, 0)])
    policy = model.model_copy(update={"init_seed": 1})
    summary = run(TokenRewardsConfig(beta=0.5), tmp_path / "pairs.parquet", model, {"repo": policy}, tmp_path)
    content = json.loads((tmp_path / "token_rewards.json").read_text())
    chosen, rejected = content["pairs"][0]["responses"]
    assert (chosen["side"], rejected["side"]) == ("chosen", "rejected")
    length = len(CHOSEN) + 1
    assert summary == {"pairs": 1, "tokens": 2 * length, "policies": 1}

    assert chosen["text"] == CHOSEN == "".join(chosen["tokens"])
    assert chosen["names"][-1] == "<eos>" and chosen["tokens"][-1] == ""
    ids = [*tokenizer(CHOSEN)["input_ids"], tokenizer.eos_token_id]
    prompt = tokenizer(PROMPT)["input_ids"]
    pi, ref = plain_logps(policy, prompt, ids), plain_logps(model, prompt, ids)
    scored = chosen["policies"]["repo"]
    assert scored["logps"] == pytest.approx(pi, abs=1e-4)
    assert chosen["reference"] == pytest.approx(ref, abs=1e-4)
    assert scored["reward"] == pytest.approx([0.5 * (a - b) for a, b in zip(pi, ref, strict=True)], abs=1e-4)

    mu = chosen["behavior"]
    assert mu == pytest.approx([-0.125 * (1 + place % 5) for place in range(length)])
    regret = sum(
        pi[t] - ref[t] + sum(pi[s] - mu[s] for s in range(t + 1, length)) / max(length - t - 1, 1)
        for t in range(length)
    )
    assert sum(scored["regret"]) == pytest.approx(0.5 * regret, abs=1e-3)
    parts = zip(scored["reward"], scored["long_horizon"], strict=True)
    assert scored["regret"] == pytest.approx([local + horizon for local, horizon in parts], abs=2e-6)


def test_token_rewards_when_behavior_is_unknown_then_its_numbers_are_null(
    tokenizer: PreTrainedTokenizerFast, model: ModelConfig, tmp_path: Path
) -> None:
    write_records(tmp_path / "pairs.parquet", [pair(0)])
    run(TokenRewardsConfig(), tmp_path / "pairs.parquet", model, {"dpo": model}, tmp_path)
    response = json.loads((tmp_path / "token_rewards.json").read_text())["pairs"][0]["responses"][0]
    assert response["behavior"] is None
    assert response["policies"]["dpo"]["long_horizon"] is response["policies"]["dpo"]["regret"] is None
    assert set(response["policies"]["dpo"]["reward"]) == {0.0}


@pytest.mark.parametrize(
    ("wanted", "masked", "expected"),
    [
        (2, 0, ["prompt-2", "same"]),
        (4, 0, ["masked", "prompt-2", "same", "same"]),
        (2, 2, ["masked", "masked", "prompt-2", "same"]),
        (9, 9, ["masked"] * 6 + ["prompt-2", "same", "same"]),
    ],
)
def test_token_rewards_when_pairs_are_chosen_then_originals_of_different_prompts_come_first(
    model: ModelConfig, tmp_path: Path, wanted: int, masked: int, expected: list[str]
) -> None:
    rows = [
        *(pair(n, kind="masked", rejected=CHOSEN[:5], rejected_complete=False) for n in range(3, 9)),
        *(pair(n, prompt_id="same") for n in (0, 1)),
        pair(2),
    ]
    write_records(tmp_path / "pairs.parquet", rows)
    config = TokenRewardsConfig(pairs=wanted, masked=masked)
    run(config, tmp_path / "pairs.parquet", model, {"dpo": model}, tmp_path)
    found = json.loads((tmp_path / "token_rewards.json").read_text())["pairs"]
    prompts = {row.pair_id: row.prompt_id for row in rows}
    assert sorted("masked" if row["kind"] == "masked" else str(prompts[row["pair_id"]]) for row in found) == expected


def test_token_rewards_when_no_pair_is_usable_then_the_error_says_why(
    tokenizer: PreTrainedTokenizerFast, model: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "a"}\n')
    with pytest.raises(DataError, match="chosen and rejected are equal"):
        run(TokenRewardsConfig(), tmp_path / "pairs.jsonl", model, {"dpo": model}, tmp_path)


def test_text_pieces_when_the_text_is_long_then_they_are_those_of_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [*tokenizer("a€ 😀b \ufffd\ufffd c😀😀" * 12)["input_ids"], tokenizer.eos_token_id] * 2
    pieces = text_pieces(tokenizer, ids)
    assert "".join(pieces) == "a€ 😀b \ufffd\ufffd c😀😀" * 24
    monkeypatch.setattr(token_rewards, "CONTEXT", len(ids))
    assert text_pieces(tokenizer, ids) == pieces


def test_text_pieces_when_a_character_is_several_tokens_then_the_last_of_them_shows_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = [*tokenizer("a€ 😀b")["input_ids"], tokenizer.eos_token_id]
    assert text_pieces(tokenizer, ids) == ["a", "", "", "€", " ", "", "", "", "😀", "b", ""]
    assert "".join(text_pieces(tokenizer, tokenizer("\ufffd?")["input_ids"])) == "\ufffd?"
    assert "".join(text_pieces(tokenizer, ids[:3])) == "a\ufffd"  # cut inside the character
