"""What a model does behind its output layer: factors and soft caps are measured, everything else is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from regretless.modeling.output_layer import head_of
from tiny_kinds import tiny_of_kind


@pytest.mark.parametrize(
    ("kind", "more", "scale", "softcap"),
    [
        ("qwen3", {}, 1.0, None),
        ("cohere", {}, 0.25, None),
        ("granite", {}, 1 / 3, None),
        ("gemma2", {"final_logit_softcapping": 3.0}, 1.0, 3.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_head_when_a_model_scales_or_caps_its_logits_then_the_factor_is_measured(
    kind: str, more: dict[str, Any], scale: float, softcap: float | None, dtype: torch.dtype
) -> None:
    model = tiny_of_kind(kind, **more).to(dtype)
    head = head_of(model)
    # In bf16 too: what is measured with are numbers that the precision of the weights does not touch.
    assert head.scale == pytest.approx(scale, rel=1e-6)
    assert head.softcap == softcap
    assert head.model_logits is None
    assert head.is_linear
    assert "forward" not in model.__dict__
    assert "forward" not in model.model.__dict__


@pytest.mark.parametrize("kind", ["minicpm3", "bert"])
def test_head_when_a_model_changes_hidden_states_first_then_its_own_code_is_called(kind: str) -> None:
    model = tiny_of_kind(kind)
    head = head_of(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    assert not head.is_linear
    torch.testing.assert_close(head.logits(hidden[1:3]), model(input_ids=ids, use_cache=False).logits[0, 1:3])


def test_head_when_code_behind_it_is_unknown_then_it_is_called() -> None:
    model = tiny_of_kind("qwen3")

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits - output.logits.square()
            return output

    model.__class__ = Odd
    head = head_of(model)
    hidden = torch.randn(3, 32, dtype=torch.float64)
    raw = model.lm_head(hidden)
    assert isinstance(model, PreTrainedModel)
    torch.testing.assert_close(head.logits(hidden), raw - raw.square())
