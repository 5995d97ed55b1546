"""The adapter that a trainer puts on its model, and what it does not cover."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed

from regretless.core.errors import ConfigError
from regretless.core.paths import page
from regretless.core.terminal import print_note

ALL_LINEAR = "all-linear"
WITHOUT_ADAPTER = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), ("out_proj", "conv1d"))
"""By model type, layers for which peft refuses an adapter: fused Mamba kernels read their weights alone."""


COMPARED_NUMBERS = 256
"""Numbers of each weight that show whether an adapter has changed it."""
MODEL_CODE = ("transformers.models.", "transformers_modules.")
"""Modules with the code of architectures. Quantized layers, which peft knows, are defined elsewhere."""


def with_adapter(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """The model with a new adapter; `target_modules: all-linear` leaves out layers that cannot have one.

    Raises ConfigError for settings that peft cannot do with this model.
    """
    if _is_all_linear(config) and getattr(config, "exclude_modules", None) is None:
        left_out = [*WITHOUT_ADAPTER.get(model.config.model_type, ()), *no_products(model)]
        if left_out:
            config = copy.copy(config)
            config.exclude_modules = left_out
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        advice = ""
        if "lora_dropout" in str(error):
            advice = (
                "; weights that are no linear layers (the experts and routers of a mixture, which all-linear and "
                "target_parameters cover) cannot have dropout, because their adapter is added to the weights: set "
                "lora.dropout (in Python: lora_dropout) to 0, or name the layers of attention in target_modules"
            )
        raise ConfigError(f"peft_config: {error}{advice}") from error


def add_adapter(model: PreTrainedModel | PeftModel, config: PeftConfig, seed: int) -> PeftModel:
    """The model with a new adapter, whose first weights are those of the seed.

    Where `target_modules: all-linear` meets weights that are no linear layers, such as the experts of a mixture, the
    terminal says which of them have an adapter: peft knows only some families of mixtures.
    Raises ConfigError for a model that has an adapter, and for settings that peft cannot do.
    """
    if isinstance(model, PeftModel):
        raise ConfigError("peft_config: the model has an adapter already; merge it first, or omit peft_config")
    check_trainable(config)
    all_linear = _is_all_linear(config)  # peft replaces it by the names of the layers
    set_seed(seed)
    adapted = with_adapter(model, config)
    if all_linear:
        covered, without = coverage(adapted)
        parameters = ", ".join(f"{name} ({count:,})" for name, count in covered.items())
        left = ", ".join(f"{name} ({count:,})" for name, count in without.items())
        if parameters or left:
            print_note(
                "note: target_modules=all-linear: besides the linear layers, with an adapter: "
                f"{parameters or 'nothing'}; without one: {left or 'nothing'} (numbers of weights). target_parameters "
                f"names such weights ({page('large_models')})"
            )
    return adapted


def check_trainable(config: PeftConfig) -> None:
    """Raise ConfigError for kinds of adapters that rows cannot have, or that load as another model."""
    if config.is_prompt_learning:
        raise ConfigError(
            f"peft_config: {config.peft_type.value} puts tokens of its own before each sequence, and sequences "
            "share rows here; use LoRA or another adapter of the model's layers"
        )
    if getattr(config, "layer_replication", None):
        raise ConfigError("peft_config: layer_replication makes another model of the base; remove it")
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.startswith("pissa_niter_"):
        raise ConfigError(
            f"peft_config: init_lora_weights={start}: peft repeats this approximate decomposition when it loads the "
            "adapter, with other weights as a result; use pissa, which is exact"
        )


class BaseWeights:
    """A model's weights as they are before it gets an adapter."""

    def __init__(self, model: nn.Module) -> None:
        self._first = [(weight, _first_numbers(weight)) for weight in model.parameters()]

    def are_left_by(self, adapted: PeftModel) -> bool:
        """Whether `adapted` without its adapter is the model that it was, and stays it in training.

        Some adapters begin by moving a part of the weights into themselves (PiSSA, OLoRA), and some train weights of
        the model beside their own (`bias="all"`).
        """
        kept = {id(weight) for weight in adapted.parameters()}
        return all(
            id(weight) in kept and not weight.requires_grad and torch.equal(_first_numbers(weight), first)
            for weight, first in self._first
        )


def _first_numbers(weight: Tensor) -> Tensor:
    # All numbers of a matrix change together: to compare some of them takes no second copy of the model.
    return weight.detach().flatten()[:COMPARED_NUMBERS].clone()


def _is_all_linear(config: PeftConfig) -> bool:
    return getattr(config, "target_modules", None) == ALL_LINEAR


def no_products(model: nn.Module) -> list[str]:
    """Names of linear layers whose own code returns something other than a product with the weight.

    Routers that return scores and logits, for example, and products by groups: an adapter's output cannot be added.
    """
    names = []
    for name, layer in model.named_modules():
        has_own_code = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
        if has_own_code and type(layer).__module__.startswith(MODEL_CODE) and not _gives_product(layer):
            names.append(name)
    return names


def _gives_product(layer: Any) -> bool:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    rows = torch.empty(3, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        output = torch.func.functional_call(layer, weights, (rows,))
    except Exception:  # what goes wrong depends on the architecture's code
        return False
    return isinstance(output, Tensor) and output.shape == (3, layer.out_features)


def sort_sets(configs: Iterable[PeftConfig]) -> None:
    """Sort settings that peft stores as sets, so that equal runs write equal files."""
    for config in configs:
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))


def coverage(model: PeftModel) -> tuple[dict[str, int], dict[str, int]]:
    """Weights that are parameters of other modules than layers, with an adapter, and all frozen ones without.

    By name, without the numbers of layers, with how many numbers they have. Embeddings, the output layer and vectors
    (norms, biases) are left out.
    """
    inner = model.get_base_model()
    head = inner.get_output_embeddings()
    apart = [module for module in inner.modules() if isinstance(module, nn.Embedding) or module is head]
    adapted = {id(weight) for module in apart for weight in module.parameters()}
    parameters: set[int] = set()
    for layer in inner.modules():
        if isinstance(layer, BaseTunerLayer):
            name, base = getattr(layer, "parameter_name", None), layer.get_base_layer()
            if name:
                parameters.add(id(getattr(base, name)))
            else:
                adapted |= {id(weight) for weight in base.parameters()}
    counts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for name, weight in inner.named_parameters():
        if weight.ndim > 1 and not weight.requires_grad and id(weight) not in adapted:
            plain = re.sub(r"\.base_layer(?=\.)|\.\d+(?=\.)", "", name)
            side = counts[0] if id(weight) in parameters else counts[1]
            short = plain.rpartition("layers.")[2]
            side[short] = side.get(short, 0) + weight.numel()
    return counts
