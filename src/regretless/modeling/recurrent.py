"""Recurrent layers in shared-prefix rows: each segment starts from the final states of its parent."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from regretless.modeling.layout import Segment

LONGER = 1.4
"""How much longer than the shortest one a segment of a batch may be."""
STATES = ("cache", "cache_params", "past_key_values")
"""Names of the argument in which transformers gives a layer the states behind earlier tokens (5.24: the first)."""
KERNEL = 4
"""Tokens that the convolution of a recurrent layer reads."""
ROW = {"segments", "row_mask", "calls", "forks"}
"""Keywords of the model's forward that describe a row, and that no layer of its own knows."""

CONTINUES = hasattr(DynamicCache, "get_conv_state")
"""Whether this version of transformers, 5.21 or newer, has layers that ask for states by the names known here."""

Run = Callable[[Tensor, "BranchStates"], Tensor]
"""A recurrent layer: gives (B, N, D) for (B, N, D), and moves the states on by these tokens."""


class BranchStates:
    """States of one layer behind segments of a row, in place of transformers' `Cache` of a batch of sequences.

    They start with those of each segment's parent, which stay as they are: every segment that continues the parent
    needs them, and so does the backward pass, which reaches the parent's tokens through them.
    """

    def __init__(self, parents: Sequence[BranchStates] = ()) -> None:
        self._convolution: dict[int, Tensor] = {}
        self._recurrent: dict[int, Tensor] = {}
        for index in parents[0]._convolution if parents else ():
            tails = [parent._convolution[index] for parent in parents]
            longest = max(tail.shape[-1] for tail in tails)
            # A convolution reads zeros before a sequence's start.
            padded = [functional.pad(tail, (longest - tail.shape[-1], 0)) for tail in tails]
            self._convolution[index] = torch.cat(padded)
        for index in parents[0]._recurrent if parents else ():
            self._recurrent[index] = torch.cat([parent._recurrent[index] for parent in parents])

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a layer then changes no convolution's state in place."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a segment comes before."""
        return bool(self._convolution or self._recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a convolution read last (B, C, K); None at a prompt's start."""
        return self._convolution.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """What a convolution reads for these tokens (B, C, N), with what it read before them (B, C, up to K + N)."""
        before = self._convolution.get(state_idx)
        read = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        self._convolution[state_idx] = read if conv_kernel_size is None else read[..., -conv_kernel_size:]
        return read

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state behind the tokens so far; None at a prompt's start."""
        return self._recurrent.get(state_idx)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state behind these tokens."""
        self._recurrent[state_idx] = recurrent_states
        return recurrent_states


@contextlib.contextmanager
def forked_states(model: nn.Module) -> Iterator[None]:
    """Within the block, the recurrent layers of `model` compute a row's segments, a parent before its own.

    A row's segments reach them as the keyword `segments` of the model's forward, like attention. They compute with
    their own code: it is given states that were made by the parent's tokens. Whether it uses them rightly, and gives
    them gradients, is what `check_grouped` finds out. Layers with hooks in place of their forward keep it.
    """
    layers = recurrent_layers(model)
    hooks = []
    for layer, above in layers.items():
        rows: dict[str, Any] = {}
        hooks.append(above.register_forward_pre_hook(partial(_note_row, rows), with_kwargs=True))
        vars(layer)["forward"] = partial(_forward, layer, rows)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del vars(layer)["forward"]


def recurrent_layers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The layers of a model that ask for states behind earlier tokens (convolutions, scans, linear attention).

    With the module that each one is a child of.
    """
    return {
        layer: above
        for above in model.modules()
        for layer in above.children()
        if "forward" not in vars(layer) and _asks_for_states(type(layer))
    }


def _asks_for_states(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and bool({"get_conv_state", "get_recurrent_state"} & set(code.co_names))


def _note_row(rows: dict[str, Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep what describes the row: some modules do not pass it on to their recurrent layer."""
    rows.clear()
    rows.update({name: kwargs[name] for name in ROW if name in kwargs})


def _forward(layer: nn.Module, rows: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
    """The layer's output (1, N, D) for a row of segments; with `calls` each token by itself, as nothing may mix there.

    `forks`, a list, is given the layer and its `state_error` for these inputs.
    Raises ValueError if the row's segments did not reach the layer, or something that is not known here did.
    """
    code = type(layer).forward
    bound = inspect.signature(code).bind(layer, *args, **{key: kwargs[key] for key in kwargs.keys() - ROW})
    name = next((name for name in STATES if name in bound.signature.parameters), None)
    if name is None:
        raise ValueError(f"{type(layer).__name__} takes states in none of the arguments {', '.join(STATES)}")
    if "hidden_states" not in bound.arguments:
        raise ValueError(f"{type(layer).__name__} takes no hidden_states")
    if bound.arguments.get("attention_mask") is not None:
        raise ValueError(f"{type(layer).__name__} was given a mask")

    def run(hidden: Tensor, states: BranchStates) -> Tensor:
        bound.arguments |= {"hidden_states": hidden, name: states}
        output = code(*bound.args, **bound.kwargs)
        if not isinstance(output, Tensor):
            raise ValueError(f"{type(layer).__name__} gives {type(output).__name__}, where a tensor is known")
        return output

    hidden: Tensor = bound.arguments["hidden_states"]
    if "forks" in rows:
        rows["forks"].append((layer, state_error(run, hidden)))
    if "calls" in rows:
        return run_segments(run, hidden, (Segment(1),) * hidden.shape[1])
    if "segments" not in rows:
        raise ValueError(f"{type(layer).__name__} was called without `segments`: its caller does not pass them on")
    return run_segments(run, hidden, rows["segments"])


def run_segments(run: Run, hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
    """What a layer gives for a row of segments (1, N, D), which padding may follow: nobody reads what that gets.

    Segments that no other continues are computed in batches of similar length, the others one by one: padding would
    move their states on.
    """
    lengths = [segment.length for segment in segments]
    parts = [*torch.split(hidden[:, : sum(lengths)], lengths, dim=1)]
    parents = [segment.parent for segment in segments]
    # For one more token, layers have code of their own, which changes states in place or has no backward pass: no call
    # continues with one token. One that others continue is computed with each of them, at its start.
    with_single: dict[int, int] = {}
    for number, parent in enumerate(parents):
        if parent is not None and parents[parent] is not None and parts[parent].shape[1] == 1:
            with_single[number] = parent
            parts[number] = torch.cat((parts[parent], parts[number]), dim=1)
            parents[number] = parents[parent]
    singles = set(with_single.values())
    called = {
        number: Segment(part.shape[1], parent)
        for number, (part, parent) in enumerate(zip(parts, parents, strict=True))
        if number not in singles
    }
    inner = {segment.parent for segment in called.values()}
    states: dict[int | None, BranchStates] = {}
    outputs: dict[int, Tensor] = {}
    for number, segment in called.items():
        if number in inner:
            states[number] = BranchStates([states[segment.parent]] if segment.parent is not None else [])
            outputs[number] = run(parts[number], states[number])
    for batch in _batches([number for number in called if number not in inner], called):
        longest = max(2, *(called[number].length for number in batch))
        padded = [functional.pad(parts[number], (0, 0, 0, longest - called[number].length)) for number in batch]
        before = [states[called[number].parent] for number in batch if called[number].parent is not None]
        output = run(torch.cat(padded), BranchStates(before))
        outputs |= {number: output[index : index + 1, : called[number].length] for index, number in enumerate(batch)}
    for number, single in with_single.items():
        outputs[single], outputs[number] = outputs[number][:, :1], outputs[number][:, 1:]
    row = torch.cat([outputs[number] for number in range(len(segments))], dim=1)
    return functional.pad(row, (0, 0, 0, hidden.shape[1] - row.shape[1]))


def _batches(numbers: Iterable[int], segments: Mapping[int, Segment]) -> Iterator[list[int]]:
    """The segments of these numbers, together where lengths are similar; those that continue none by themselves."""

    def order(number: int) -> tuple[bool, int]:
        return segments[number].parent is None, segments[number].length

    batch: list[int] = []
    for number in sorted(numbers, key=order):
        if batch and (order(number)[0] != order(batch[0])[0] or order(number)[1] > LONGER * order(batch[0])[1]):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def state_error(run: Run, hidden: Tensor) -> float:
    """How wrong the gradient is that passes from responses to their prompt, as a share of its norm; 1 if there is none.

    hidden: what the layer gets for a sequence (1, N, D). Its first half becomes a prompt that two responses continue,
    one of them a single token. The worse of two: the whole gradient, and the part of it between tokens that are too far
    apart for a convolution. That part passes through recurrent states alone, and shows whether the layer continues from
    those that it is given, however small their effect on its output is.
    """
    count = hidden.shape[1]
    half = count // 2
    leaf = hidden.detach().clone().requires_grad_()
    prompt, long, short = torch.split(leaf, [half, count - half - 1, 1], dim=1)

    def gradient(output: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view_as(output)
        (grad,) = torch.autograd.grad((weights * output).sum(), leaf, retain_graph=True)
        return grad[:, :half].double()

    errors = [0.0]
    with torch.enable_grad():
        row = run_segments(run, leaf, (Segment(half), Segment(count - half - 1, 0), Segment(1, 0)))
        for response, forked, skipped in ((long, row[:, half:-1], KERNEL - 1), (short, row[:, -1:], 0)):
            alone = run(torch.cat((prompt, response), dim=1), BranchStates())[:, half:]
            # A token is too far from another if KERNEL - 1 tokens are skipped before it: here, or at the prompt's end.
            reach = half - (KERNEL - 1 - skipped)
            for first, last in ((0, half), (skipped, reach)):
                expected, actual = (gradient(output[:, first:])[:, :last] for output in (alone, forked))
                if not torch.equal(expected, actual):
                    errors.append(float((expected - actual).norm() / expected.norm()))
    return max(errors)
