"""Numbers that a model's own code computes, one sequence at a time: what every other way is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from regretless.modeling.forward import attention_by
from regretless.modeling.layout import Item, is_context, read_ids


def own_logps(model: PreTrainedModel, items: Sequence[Item], attention: str | None = None) -> list[torch.Tensor]:
    """Log-probabilities of each response's own tokens; `attention`: one of transformers', by default the model's."""
    found = []
    for prompt, response in items:
        ids = torch.tensor([prompt + read_ids(response)])
        with attention_by(model, attention) if attention else contextlib.nullcontext():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        found.append(logps[[not is_context(token) for token in response]])
    return found


def gradients(model: PreTrainedModel, logps: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients, by parameter, of a sum in which each token has a weight that depends on its response and its place."""
    model.zero_grad()
    sum((values * torch.linspace(-1, 2 + n, len(values))).sum() for n, values in enumerate(logps)).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
