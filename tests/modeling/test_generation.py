from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import GenerationConfig

from regretless.modeling.decoding import Row
from regretless.modeling.draws import Sampler
from regretless.modeling.generation import responses
from regretless.modeling.load import ModelConfig, load_model
from regretless.world.tiny_models import smoke_architecture

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [12], [3, 3, 4], [20, 5, 6, 20, 21]]
HOT = Sampler(temperature=1.5, top_k=20, repetition_penalty=1.2)


def ends(rows: Sequence[Row]) -> list[bool]:
    """A row ends at a token below 8, or, the third one, at its fourth token."""
    return [row.token_ids[-1] < 8 or (row.number == 2 and len(row.token_ids) == 4) for row in rows]


@pytest.mark.parametrize("slots", [2, 8])
def test_responses_when_generate_writes_them_are_those_of_the_loop_and_the_models_settings_stay(slots: int) -> None:
    architecture = {**smoke_architecture("qwen3", 40), "initializer_range": 0.3}
    model: Any = load_model(ModelConfig(architecture=architecture, tokenizer=None))
    own = model.generation_config = GenerationConfig(eos_token_id=30, repetition_penalty=3.0, min_new_tokens=9)
    by_loop, by_generate = (
        sorted(
            responses(model, PROMPTS, range(5), HOT, 12, ends, slots=slots, decodes=decodes, padding=0),
            key=lambda row: row.number,
        )
        for decodes in (True, False)
    )
    assert [row.token_ids for row in by_generate] == [row.token_ids for row in by_loop]
    assert len({len(row.token_ids) for row in by_loop}) > 2 and len(by_loop[2].token_ids) <= 4
    for one, other in zip(by_generate, by_loop, strict=True):
        for name in ("logps", "sampled_logps"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)
            assert len(getattr(one, name)) == len(one.token_ids)
    assert model.generation_config is own
