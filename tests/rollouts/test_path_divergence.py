from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regretless.modeling.load import ModelConfig, load_model
from regretless.rollouts import path_divergence
from regretless.rollouts.path_divergence import path_divergences
from regretless.sampling.engine_settings import SamplingParams

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def test_divergence_when_the_reference_samples_plainly_then_zero(models: Callable[[int], ModelConfig]) -> None:
    found = path_divergences(models(0), models(0), SamplingParams(**PLAIN), [([1], [2, 4, 0])])  # type: ignore[arg-type]
    assert found == [pytest.approx(0, abs=1e-6)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.8}, {"top_k": 2}, {"top_p": 0.5}, {"repetition_penalty": 1.5}, {"top_k": 3, "top_p": 0.9}],
)
def test_divergence_is_that_of_what_the_engine_samples_from(
    changes: dict[str, float], models: Callable[[int], ModelConfig]
) -> None:
    """Against the distribution that many draws of the engine's own loop come from: its recorded log-probabilities."""
    from regretless.sampling.transformers_engine import TransformersEngine

    params = SamplingParams(**{**PLAIN, **changes, "max_new_tokens": 1})  # type: ignore[arg-type]
    context = [1, 2, 2]
    drawn = TransformersEngine(models(0), params).generate([context] * 2000, 0)
    writer = {one.token_ids[0]: one.sampled_logps[0] for one in drawn if one.token_ids and one.sampled_logps}
    assert sum(map(float, torch.tensor(list(writer.values())).exp())) == pytest.approx(1, abs=1e-6), "all are seen"
    with torch.no_grad():
        logits = load_model(models(1))(input_ids=torch.tensor([context])).logits[0, -1]
    reference = logits.log_softmax(dim=0).tolist()
    exact = sum(float(torch.tensor(logp).exp()) * (logp - reference[token]) for token, logp in writer.items())
    found = path_divergences(models(0), models(1), params, [(context, [4])])
    assert found == [pytest.approx(exact, abs=1e-4)]
    # The sum over a path is that of its contexts.
    both = path_divergences(models(0), models(1), params, [(context, [4, 2]), ([*context, 4], [2])])
    assert both[0] == pytest.approx(found[0] + both[1], abs=1e-4)


def test_divergence_when_continuations_are_equal_then_one_pass_serves_all(
    models: Callable[[int], ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    whole = path_divergence._next_token_logits

    def counted(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
        passes.append(count)
        return whole(model, ids, count)

    monkeypatch.setattr(path_divergence, "_next_token_logits", counted)
    paths = [([1, 2], [4]), ([1], [2, 4]), ([1, 2], [4]), ([1, 2], [4, 2])]
    found = path_divergences(models(0), models(1), SamplingParams(**PLAIN), paths)  # type: ignore[arg-type]
    assert passes == [1, 1, 2, 2, 2, 2], "both models, three paths"
    alone = [path_divergences(models(0), models(1), SamplingParams(**PLAIN), [path])[0] for path in paths]  # type: ignore[arg-type]
    assert found == alone and len(set(found)) == 3
