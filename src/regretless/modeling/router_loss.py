"""The load-balancing loss of mixtures of experts, over each distinct token once.

It is E · Σ_e f_e P_e (Switch Transformer, arXiv:2101.03961, equations 4 to 6), as in transformers: E is the number of
experts, f_e the mean number of tokens that expert e is among the chosen ones of, and P_e its mean probability. Both are
means over tokens and layers, and only P_e has a gradient. So the loss of several rows follows from two sums of each.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from regretless.core.errors import ConfigError
from regretless.modeling.layout import Layout
from regretless.modeling.token_logps import TokenScores

LOSS_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Of `load_balancing_loss_func` in transformers' models; a function with others means something else."""


def has_router_loss(model: PreTrainedModel) -> bool:
    """Whether transformers computes this load-balancing loss for the model."""
    # Under FSDP2 the class is one that torch derives; the model's own is behind it.
    modules = [sys.modules.get(kind.__module__) for kind in type(model).__mro__]
    functions = [loss for module in modules if (loss := getattr(module, "load_balancing_loss_func", None))]
    is_familiar = bool(functions) and list(inspect.signature(functions[0]).parameters) == LOSS_ARGUMENTS
    return is_familiar and None not in _experts(model)


def _experts(model: PreTrainedModel) -> tuple[int | None, int | None]:
    """Number of experts, and of those that a token is sent to."""
    return getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)


def asked(layout: Layout, *, hidden_only: bool) -> dict[str, Any]:
    """Arguments with which a decoder returns what the layout's load-balancing loss needs."""
    return {} if layout.counted is None or hidden_only else {"output_router_logits": True}


def with_routers(scores: TokenScores, model: PreTrainedModel, output: Any, layout: Layout) -> TokenScores:
    """The scores of a row with the sums of its routers over the counted tokens, if it has any (`asked`).

    Of each expert, the number of tokens that it is among the chosen ones of, without gradient, and its probability;
    both are means over the layers. Raises ConfigError if the decoder returned no logits.
    """
    if layout.counted is None:
        return scores
    logits = getattr(output, "router_logits", None)
    experts, chosen = _experts(model)
    if not logits or experts is None or chosen is None:
        raise ConfigError(
            f"router_aux_loss_coef: {type(model).__name__} returned no logits of its routers; set it to 0 to train "
            "without the load-balancing loss"
        )
    sums = torch.stack([_sums(layer.flatten(0, -2), experts, chosen, layout.counted) for layer in logits])
    return scores._replace(routers=sums.mean(0).unsqueeze(-1))


def _sums(logits: Tensor, experts: int, chosen: int, counted: Tensor) -> Tensor:
    """(2, E) of a layer's logits (N, E)."""
    # FlexAttention's rows are padded.
    weights = functional.pad(counted.to(logits.device), (0, len(logits) - len(counted)))
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights = weights.to(probabilities.dtype)
    indices = probabilities.detach().topk(chosen, dim=-1).indices.flatten()
    # Not bincount, which would wait for the device.
    sent = weights.new_zeros(experts).scatter_add_(0, indices, weights.repeat_interleave(chosen))
    # Not a product of matrices, which autocast would compute in bfloat16.
    return torch.stack([sent, (weights.unsqueeze(-1) * probabilities).sum(0)]).to(counted.device)


def router_loss(routers: Tensor, tokens: int) -> Tensor:
    """The load-balancing loss, a scalar, of rows with these sums (2, E, rows) over together so many tokens."""
    sent, probability = routers.sum(-1) / tokens
    return len(sent) * (sent * probability).sum()


class DistinctTokens:
    """Tells of the tokens of several rows which ones are new: the text up to them was in no earlier place.

    A query that is cut into several rows has its prompt in each, plain rows repeat the prompt for each response, and
    responses with a short beginning in common have it side by side in one row. So the answer does not depend on how a
    step is laid out.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], int] = {}

    def new(self, layout: Layout) -> Tensor:
        """(B·N,) bool, on the layout's device; False for padding. From now on these tokens are known."""
        ids = layout.input_ids.flatten().tolist()
        new = [False] * len(ids)
        width = layout.input_ids.shape[1]
        for row, length in enumerate(layout.lengths):
            self._read(0, ids, row * width, length, new)
        start = 0
        ends: list[int] = []
        for segment in layout.segments:
            before = 0 if segment.parent is None else ends[segment.parent]
            ends.append(self._read(before, ids, start, segment.length, new))
            start += segment.length
        return torch.tensor(new, dtype=torch.bool, device=layout.input_ids.device)

    def _read(self, text: int, ids: list[int], start: int, length: int, new: list[bool]) -> int:
        """Go on from a text with the ids of these places; returns the number of the text that they make."""
        for index in range(start, start + length):
            key = text, ids[index]
            new[index] = key not in self._texts
            text = self._texts.setdefault(key, len(self._texts) + 1)
        return text
