"""Models that stay loaded for whoever needs them next: only their weights are shared, and only to be read."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regretless.core.errors import RegretlessError
from regretless.core.files import fingerprint

MOST = 2
"""Models that stay: in rounds the one that all begins with, and the latest."""
COMPARED_NUMBERS = 64
"""Numbers of each weight that show whether it was written to."""


class KeptModels:
    """The models that were used last, by what they were loaded from."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[PreTrainedModel, list[Tensor]]] = {}

    def reading(self, key: str, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """A copy of the model whose weights lie in the memory of the kept ones; all else is the copy's own.

        So layers may be replaced, frozen, cast or given an adapter, and the next copy does not see it. What may not
        happen is a write into a weight. Raises RegretlessError if one was written to.
        """
        model, first = self._kept.pop(key) if key in self._kept else _with_first_numbers(load())
        if not all(map(torch.equal, map(_first_numbers, model.parameters()), first)):
            raise RegretlessError(
                "a model that stays loaded was written to in memory, so that it is no longer that of its files; the "
                "same command loads it again and goes on"
            )
        while len(self._kept) >= MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = model, first
        shared = {}
        for weight in model.parameters():
            shared[id(weight)] = same = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
            vars(same).update(vars(weight))
        made = copy.deepcopy(model, shared)
        _originals[made] = model
        return made

    def writing(self, key: str, load: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """The model itself, for somebody who trains its weights: it is kept no longer."""
        return self._kept.pop(key)[0] if key in self._kept else load()


def _with_first_numbers(model: PreTrainedModel) -> tuple[PreTrainedModel, list[Tensor]]:
    return model, [_first_numbers(weight).clone() for weight in model.parameters()]


def _first_numbers(weight: Tensor) -> Tensor:
    # All numbers of a matrix change together: to compare some of them costs nothing.
    return weight.detach().flatten()[:COMPARED_NUMBERS]


_originals: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
"""The kept model of each copy."""


def original_of(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """The kept model that a model is a copy of, and a hash of the layers that the copy has by now; else itself and "".

    Copies with equal hashes differ in numbers alone, those of their adapters.
    """
    if model not in _originals:
        return model, ""
    layers = [[name, type(module).__qualname__] for name, module in model.named_modules()]
    weights = [
        [name, list(weight.shape), str(weight.dtype), weight.requires_grad] for name, weight in model.named_parameters()
    ]
    return _originals[model], fingerprint([layers, weights])


_kept: KeptModels | None = None


def kept() -> KeptModels | None:
    """The models that stay loaded in this process; None outside of `models_stay_loaded`."""
    return _kept


@contextlib.contextmanager
def models_stay_loaded() -> Iterator[None]:
    """Within the block, `load_model` reads the weights of a model once, as long as its files are the same."""
    global _kept  # noqa: PLW0603 one run per process; passing it through every stage would buy nothing
    before, _kept = _kept, KeptModels()
    try:
        yield
    finally:
        _kept = before
