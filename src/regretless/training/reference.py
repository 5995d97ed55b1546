"""The reference model, and its log-probabilities: computed once per distinct response, cached on disk."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import atomic_path, fingerprint, write_text
from regretless.modeling.forward import causal_model, in_rows, reference_head
from regretless.modeling.layout import Item, Layout
from regretless.modeling.output_layer import head_of
from regretless.modeling.rows import RowKind
from regretless.modeling.token_logps import ReferenceHead

Scorer = Callable[[Sequence[Item]], list[NDArray[np.float32]]]

RESPONSES_IN_A_PART = 4096
"""Responses computed between two writes: the most that an interruption can lose."""
OPEN_PARTS = 64
COMPLETE = ".complete"
"""End of the name of a file that marks data for which nothing is missing."""
LOCATION = np.dtype([("high", "u8"), ("low", "u8"), ("start", "i8"), ("length", "i4"), ("part", "i4")])
"""Hash of an item, and the location of its values."""


class ReferenceModel:
    """The model that rewards are relative to: a frozen one, the policy without its adapters, or the policy's start.

    The last, the policy as it is before the first step, needs no second copy of the weights: its log-probabilities are
    computed before training begins. Only a method that needs whole distributions at every step makes a copy.
    """

    def __init__(
        self, policy: nn.Module, frozen: nn.Module | None, *, adapters_off: bool, needs_distributions: bool
    ) -> None:
        self.adapters_off = adapters_off and frozen is None
        if frozen is None and needs_distributions:
            if not self.adapters_off:
                frozen = copy.deepcopy(policy)
            elif not head_of(causal_model(policy)).is_frozen_linear:
                raise ConfigError(
                    "the method needs the reference's distribution, and the adapter covers the output layer; pass "
                    "ref_model, or exclude the output layer from the adapter"
                )
        self.frozen = None if frozen is None else frozen.requires_grad_(False).eval()

    @property
    def is_start_of_training(self) -> bool:
        """True if the reference is lost once the policy has taken a step."""
        return self.frozen is None and not self.adapters_off

    @contextlib.contextmanager
    def instead_of(self, policy: nn.Module) -> Iterator[nn.Module]:
        """Within the block, the reference model; `policy` is the unwrapped policy."""
        if self.frozen is not None:
            yield self.frozen
        elif self.adapters_off:
            with policy.disable_adapter():  # type: ignore[operator]
                yield policy
        else:
            yield policy

    def in_rows(self, kind: RowKind) -> contextlib.AbstractContextManager[None]:
        """Context within which `distribution` may be called (beside `modeling.forward.in_rows` for the policy)."""
        return contextlib.nullcontext() if self.frozen is None else in_rows(self.frozen, kind)

    def distribution(self, policy: nn.Module, layout: Layout) -> ReferenceHead:
        """Inputs of the reference's next-token distributions at a layout's response tokens."""
        with self.instead_of(policy) as model:
            return reference_head(model, layout)

    def key(self, policy: nn.Module, precision: str) -> str:
        """Key of the reference: its weights' bytes and types, the configuration, and the computing precision.

        With adapters off, the trainable parameters are excluded: they are the adapter.
        """
        model = policy if self.frozen is None else self.frozen
        digest = xxhash.xxh3_128()
        for name, parameter in sorted(model.state_dict(keep_vars=True).items()):
            if self.adapters_off and parameter.requires_grad:
                continue
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
        config = causal_model(model).config.to_dict()
        settings = {name: value for name, value in config.items() if name not in VOLATILE}
        adapters = [] if self.adapters_off else adapter_settings(model)
        return fingerprint([digest.hexdigest(), settings, precision, self.adapters_off, adapters])


def adapter_settings(model: nn.Module) -> list[Any]:
    """Settings of a model's adapters that change log-probabilities (their scales, for one), and which are active."""
    if not isinstance(model, PeftModel):
        return []
    settings = {name: {**config.to_dict(), **OF_ANY_ADAPTER} for name, config in model.peft_config.items()}
    return [_sorted_sets(settings), model.active_adapters]


def _sorted_sets(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _sorted_sets(item) for key, item in value.items()}
    return sorted(map(str, value)) if isinstance(value, set) else value


OF_ANY_ADAPTER = dict.fromkeys(("base_model_name_or_path", "revision", "inference_mode", "peft_version"))
"""Settings of adapters that do not change log-probabilities, all with the same value."""
VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "_attn_implementation_internal")
"""Configuration entries that do not change log-probabilities."""


class ReferenceLogps:
    """Log-probabilities (nats) of (prompt, response) token pairs under one fixed reference model.

    They are on disk under the reference's key (weights, configuration, precision) and, inside, under the token ids
    themselves: other data, another tokenizer or truncation have other ids, so nothing stale can be read. In memory is
    the location of each: 32 bytes per response. What another run writes into the folder later is not looked at.
    """

    def __init__(self, folder: Path, seen_by_all: Callable[[list[str]], list[str]] = sorted) -> None:
        """`seen_by_all`: file names that this process sees to those that all processes of the training see.

        Each of them then finds the same values missing, also while another run writes into the folder.
        """
        self.folder = folder
        self._parts: list[Path] = []
        self._places = np.empty(0, LOCATION)
        self._open = lru_cache(maxsize=OPEN_PARTS)(lambda part: self._parts[part].open("rb"))
        # A mark is written behind the parts that it vouches for, so it is looked for before them.
        names = [file.name for pattern in (f"*{COMPLETE}", "part-*.npy") for file in folder.glob(pattern)]
        seen = seen_by_all(names)
        self._complete = {name for name in seen if name.endswith(COMPLETE)}
        self._merge([self._read(folder / name) for name in seen if name not in self._complete])

    def __getitem__(self, item: Item) -> NDArray[np.float32]:
        location = self._find(_item_key(item))
        if location is None:
            raise KeyError(f"no reference log-probabilities for a response of {len(item[1])} tokens")
        size = 4 * int(location["length"])
        data = os.pread(self._open(int(location["part"])).fileno(), size, int(location["start"]))
        return np.frombuffer(data, np.float32).copy()

    def missing(self, items: Iterable[Item]) -> Iterator[Item]:
        """Items without a value, in order."""
        return (item for item in items if self._find(_item_key(item)) is None)

    def compute(
        self, items: Iterable[Item], score: Scorer, *, writes: bool = True, wait: Callable[[], None] = lambda: None
    ) -> int:
        """Compute what is missing, part by part; returns the number of missing items.

        Equal prompts should be adjacent: they share a computation. Of several processes one `writes`, and all `wait`
        for it. Raises DataError when a process does not see what another one wrote.
        """
        parts, waiting = [], self.missing(items)
        computed: set[Item] = set()
        while part := list(islice(_distinct(waiting, computed), RESPONSES_IN_A_PART)):
            computed = set(part)
            keys = np.array([_item_key(item) for item in part], np.uint64)
            values = score(part)
            path = self.folder / f"part-{hashlib.sha256(keys.tobytes()).hexdigest()[:16]}.npy"
            if writes:
                _write_part(path, keys, values)
            wait()
            if not path.exists():
                raise DataError(
                    f"{path}: written by the first process and not there for this one; use a folder that all of them "
                    "share (reference_cache_dir), or set save_on_each_node"
                )
            parts.append(self._read(path))
        self._merge(parts)
        return sum(map(len, parts))

    def covers(self, data: str) -> bool:
        """True if `mark` recorded that nothing is missing for these data: then they need not be read."""
        return data + COMPLETE in self._complete

    def mark(self, data: str, *, writes: bool = True) -> None:
        """Record that nothing is missing for data with this key; of several processes one `writes`."""
        self._complete.add(data + COMPLETE)
        if writes:
            write_text(self.folder / (data + COMPLETE), "")

    def _find(self, key: tuple[int, int]) -> Any:
        high, low = np.uint64(key[0]), key[1]
        row = int(np.searchsorted(self._places["high"], high))
        while row < len(self._places) and self._places["high"][row] == high:
            if self._places["low"][row] == low:
                return self._places[row]
            row += 1
        return None

    def _merge(self, parts: list[NDArray[Any]]) -> None:
        places = np.concatenate([self._places, *parts])
        self._places = places[np.argsort(places["high"], kind="stable")]

    def _read(self, part: Path) -> NDArray[Any]:
        """Locations of the values of a part; the part is registered."""
        with part.open("rb") as handle:
            keys, lengths = np.load(handle), np.load(handle)
            start = handle.tell()
        places = np.empty(len(keys), LOCATION)
        places["high"], places["low"], places["length"] = keys[:, 0], keys[:, 1], lengths
        places["part"] = len(self._parts)
        places["start"] = start + 4 * (np.cumsum(lengths) - lengths)
        self._parts.append(part)
        return places


def _distinct(items: Iterable[Item], computed: set[Item]) -> Iterator[Item]:
    seen = set(computed)
    for item in items:
        if item not in seen:
            seen.add(item)
            yield item


def _write_part(path: Path, keys: NDArray[np.uint64], values: Sequence[NDArray[np.float32]]) -> None:
    """Keys and lengths as arrays, then all values, of which single ones are read."""
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        np.save(handle, keys)
        np.save(handle, np.array([len(value) for value in values], np.int64))
        handle.write(np.concatenate(values).astype(np.float32).tobytes())


def _item_key(item: Item) -> tuple[int, int]:
    prompt, response = item
    digest = xxhash.xxh3_128_intdigest(np.array([len(prompt), *prompt, *response], np.int64).tobytes())
    return digest >> 64, digest & ((1 << 64) - 1)
