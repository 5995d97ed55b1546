"""Temporary replacement of the `forward` of modules, and the check whether a module may be replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

ELEMENTS = 1 << 17
"""Elements of a part of a tensor on a CPU: few enough that its float32 copies stay in a processor's cache."""


@contextlib.contextmanager
def replaced_forwards(model: nn.Module, wanted: Callable[[Any], bool], forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block, modules of `model` that are `wanted` compute `forward(module, …)`.

    A module whose forward is replaced already, by accelerate or by an outer block, stays as it is.
    """
    modules = [module for module in model.modules() if "forward" not in vars(module) and wanted(module)]
    for module in modules:
        vars(module)["forward"] = partial(forward, module)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["forward"]


def is_replaced_by(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call of the module computes its class's forward, or `forward` in its place: nothing else."""
    replaced = vars(module).get("forward")
    return replaced is None or (isinstance(replaced, partial) and replaced.func is forward)


def has_hooks(module: Any) -> bool:
    """Whether a call of the module runs hooks."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def same_code(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module computes by the same code as modules of this kind; many architectures have copies of it."""
    return _code(module) == _code(kind)


def _code(module: Any) -> tuple[Any, ...] | None:
    code = getattr(module.forward, "__code__", None)
    return None if code is None else (code.co_code, code.co_names, code.co_consts)


def flat(x: Tensor) -> Tensor:
    """Rows (N, D) of x (..., D). Outside a `Function`: models change outputs in place, and may not change its views."""
    return x.reshape(-1, x.shape[-1])


def parts(rows: Tensor) -> Sequence[slice]:
    """Slices of rows (N, D) that stay in a processor's cache; elsewhere one, because each call takes its time there."""
    if rows.device.type != "cpu":
        return [slice(None)]
    size = max(1, ELEMENTS // rows.shape[-1])
    return [slice(start, start + size) for start in range(0, len(rows), size)]
