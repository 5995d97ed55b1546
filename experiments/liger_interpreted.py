"""Shared rows with Liger's kernels against the same rows without, on a CPU: Triton's interpreter runs the kernels.

    pip install triton liger-kernel
    python experiments/liger_interpreted.py

Prints, for several architectures, the largest difference of a log-probability (nats) and the relative difference of
the gradient. What GPUs compile is the kernels' same source; their speed is measured by `benchmarks/gpu.py`.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from regretless.modeling.forward import grouped, response_scores
from regretless.modeling.layout import lay_out

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
ITEMS = [((1, 2, 3), (4, 5, 6)), ((1, 2, 3), (7, 8, 9, 10)), ((11, 12), (13, 14, 15))]


class Number(float):
    """A float as the kernels know it when they are compiled; the interpreter gives them Python's."""

    def to(self, dtype: Any) -> Number:
        """The same number: the interpreter's tensors have types of their own."""
        return self


def complete_interpreter() -> None:
    """Add what Liger's kernels need and Triton's interpreter lacks."""
    import liger_kernel.ops.geglu
    import liger_kernel.ops.rms_norm
    from triton import language
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def with_numbers(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [Number(value) if type(value) is float else value for value in args]
        named = {name: Number(value) if type(value) is float else value for name, value in kwargs.items()}
        return call(self, *given, **named)

    GridExecutor.__call__ = with_numbers
    liger_kernel.ops.rms_norm.rsqrt = lambda x: 1.0 / language.sqrt(x)
    liger_kernel.ops.geglu.tanh = lambda x: 1.0 - 2.0 / (language.exp(2.0 * x) + 1.0)


def results(model_type: str, liger: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a shared row, and the gradient of their sum."""
    from transformers.integrations.liger import apply_liger_kernel

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE), dtype=torch.float32)
    if liger:
        apply_liger_kernel(model, None)
        assert "liger" in model.model.norm.forward.__module__, "Liger changed nothing"
    layout, _ = lay_out(ITEMS)
    with grouped(model):
        logps = response_scores(model, layout).logps
        logps.sum().backward()
    gradients = [weight.grad.flatten() for _, weight in sorted(model.named_parameters()) if weight.grad is not None]
    return logps.detach(), torch.cat(gradients)


def main() -> None:
    """Print a line for each architecture."""
    complete_interpreter()
    for model_type in ("qwen3", "qwen2", "llama", "mistral", "gemma2"):
        # Liger changes transformers' classes too, so its results come last.
        (own, own_gradient), (logps, gradient) = results(model_type, False), results(model_type, True)
        difference = (gradient - own_gradient).norm() / own_gradient.norm()
        print(f"{model_type}: {float((logps - own).abs().max()):.1e} nats, gradient {float(difference):.1e}")


if __name__ == "__main__":
    main()
