"""Pairs with log-probabilities of other models: each response gets those of the model that its writer stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flat_pairs import pair_of
from regretless.core.errors import ConfigError, DataError
from regretless.data.columns import Pair, several_tokenizers
from regretless.labeling.pair import PairConfig
from regretless.labeling.rescore import rescore
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer, tokenizer_fingerprint

PROMPT = "Tom has 3 coins. Tom doubles. How many?\n"
TEXTS = ("3*2=6\n\\boxed{6}", "3*2=7\n\\boxed{7}")


def other_model(folder: Path) -> ModelConfig:
    """The tiny model with other random weights."""
    architecture = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return ModelConfig(architecture={**architecture, **heads}, tokenizer=str(folder), init_seed=5)


def pair(folder: Path, **changes: object) -> Pair:
    """A pair of responses of two writers, labelled −1 for each token."""
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(folder)))
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]
    values = {
        "prompt": PROMPT,
        "chosen": TEXTS[0],
        "rejected": TEXTS[1],
        "prompt_id": "q",
        "chosen_token_ids": ids[0],
        "rejected_token_ids": ids[1],
        "chosen_logps": [-1.0] * len(ids[0]),
        "rejected_logps": [-1.0] * len(ids[1]),
        "chosen_model": "runs/one/pretrain/able",
        "rejected_model": "runs/one/pretrain/lucky",
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    return pair_of(**values | changes)


def expected(config: ModelConfig, ids: list[int]) -> list[float]:
    """Log-probability of each token after the prompt, by one plain forward pass."""
    model, tokenizer = load_model(config), load_tokenizer(config)
    prompt = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0].float().log_softmax(-1)
    return [float(logits[len(prompt) + place - 1, token]) for place, token in enumerate(ids)]


def test_rescore_when_writers_are_swapped_then_each_response_has_the_other_models_logps(model: Path) -> None:
    one, other = ModelConfig(name_or_path=str(model)), other_model(model)
    original = pair(model)
    (found,), counts = rescore([original], {"able": other, "lucky": one})
    assert found.rejected is not None and original.rejected is not None
    assert found.chosen.logps == pytest.approx(expected(other, original.chosen.token_ids or []), abs=1e-5)
    assert found.rejected.logps == pytest.approx(expected(one, original.rejected.token_ids or []), abs=1e-5)
    assert counts["lucky"]["nats_per_token"] == pytest.approx(sum(found.rejected.logps) / len(found.rejected.logps))
    assert found.chosen.text == original.chosen.text and found.logps_kind == "raw"


def test_rescore_when_a_writer_has_no_key_then_it_keeps_its_logps_and_the_star_stands_for_the_others(
    model: Path,
) -> None:
    one = ModelConfig(name_or_path=str(model))
    (found,), _ = rescore([pair(model)], {"runs/one/pretrain/lucky": one})
    assert found.chosen.logps == [-1.0] * len(found.chosen.logps or [])
    (all_of_them,), counts = rescore([pair(model, rejected_model=None)], {"*": one})
    assert -1.0 not in [*(all_of_them.chosen.logps or []), *all_of_them.rejected.logps]  # type: ignore[union-attr, misc]
    assert counts["*"]["responses"] == 2


def test_rescore_when_it_cannot_be_right_then_it_is_refused(model: Path) -> None:
    one = ModelConfig(name_or_path=str(model))
    with pytest.raises(ConfigError, match=r"pair.rescore: unlucky: .*the responses name .*able.*lucky"):
        rescore([pair(model)], {"unlucky": one})
    with pytest.raises(ConfigError, match=r"pair.rescore.able: .* has another vocabulary"):
        rescore([pair(model, tokenizer="another")], {"able": one})
    with pytest.raises(DataError, match="has no token ids"):
        rescore([pair(model, chosen_token_ids=None, chosen_logps=None)], {"able": one})
    other = pair(model, tokenizer=several_tokenizers("a1", pair(model).tokenizer))
    with pytest.raises(ConfigError, match=r"pair.rescore.able: .* has another vocabulary"):
        rescore([other], {"able": one})
    (found,), _ = rescore([other], {"lucky": one})
    assert found.rejected is not None
    assert found.rejected.logps == pytest.approx(expected(one, found.rejected.token_ids or []), abs=1e-5)
    with pytest.raises(ConfigError, match="`logps` must be raw"):
        PairConfig.parse({"logps": "sampled", "rescore": {"*": {"name_or_path": "x"}}}, "pair")
