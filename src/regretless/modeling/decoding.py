"""Many responses side by side: a model's forward pass over rows that come and go, on keys and values kept for them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from regretless.core.errors import error_line
from regretless.core.progress import drew
from regretless.core.top_logps import packed
from regretless.modeling.adapters import fused_adapters
from regretless.modeling.cpu_attention import grouped_attention
from regretless.modeling.draws import Sampler, uniform_numbers
from regretless.modeling.forward import attention_by, causal_model
from regretless.modeling.layout import Segment
from regretless.modeling.norms import fused_norms
from regretless.modeling.output_layer import decoder_of, head_of, replaced_forward
from regretless.modeling.probe import KNOWN, special_ids, windows_named
from regretless.modeling.recurrent import recurrent_layers
from regretless.modeling.token_logps import Buffers

NAME = "regretless_decoding"
READ_TOGETHER = 4096
"""Tokens of prompts that are read in one forward pass, unless a single prompt has more."""
GROWTH = 128
"""Positions by which the memory of keys and values grows on a GPU: more are copied less often, fewer waste less."""
PROBE_STEPS = 4
"""Tokens by which the check continues a row."""
TOLERANCE = 1e-3
"""Nats by which a log-probability may differ from the model's own, in float32."""
SPREAD = 0.05
"""The same in lower precision, as a share of the standard deviation of log-probabilities over the vocabulary."""
MOVING_POSITIONS = {"dynamic", "longrope"}
"""Rotary embeddings in which a position's values depend on the longest sequence beside it."""


@dataclass
class Row:
    """A response that is being written."""

    number: int
    """Of its request."""
    prompt: Sequence[int]
    uniforms: np.ndarray
    """The number that each of its tokens is drawn by."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampled_logps: list[float] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    top: list[NDArray[np.void]] = field(default_factory=list)
    """Of each token the most likely ones in its place (`core.top_logps`)."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.token_ids)

    def cut(self, length: int) -> Row:
        """The same with this many tokens of the response."""
        numbers = {name: values[:length] for name, values in self.numbers.items()}
        parts = {name: getattr(self, name)[:length] for name in ("token_ids", "logps", "sampled_logps", "top")}
        return replace(self, **parts, numbers=numbers)


AreOver = Callable[[Sequence[Row]], Sequence[bool]]
"""Which of some rows their newest token ends."""


def draw_next(sampler: Sampler, logits: Tensor, seen: Tensor, rows: Sequence[Row]) -> Tensor:
    """Append to each row a token drawn from logits (B, V); returns their ids (B,). seen: as for the sampler."""
    uniforms = torch.tensor([row.uniforms[len(row.token_ids)] for row in rows], dtype=torch.float64)
    draw = sampler(logits, seen, uniforms.to(logits.device))
    numbers = {name: values.tolist() for name, values in draw.numbers.items()}
    drawn = zip(*(values.tolist() for values in draw[:3]), strict=True)
    for at, (row, (token, logp, sampled)) in enumerate(zip(rows, drawn, strict=True)):
        row.token_ids.append(token)
        row.logps.append(logp)
        row.sampled_logps.append(sampled)
        for name, values in numbers.items():
            row.numbers.setdefault(name, []).append(values[at])
    if draw.top is not None:
        for row, entries in zip(rows, packed(*(each.cpu().numpy() for each in draw.top)), strict=True):
            row.top.append(entries)
    return draw.tokens


class Decoder:
    """A model that reads prompts and continues up to `slots` rows, inside `ready`."""

    def __init__(self, model: PreTrainedModel | PeftModel, slots: int) -> None:
        self.model, self.inner, self.slots = model, causal_model(model), slots
        self.head = head_of(self.inner)
        self.windows: set[int | None] = set()
        """Windows that attention was told; None for layers without."""
        self._buffers = Buffers()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Within the block, calls of the model are those of this class; attention is computed by it."""
        with (
            torch.inference_mode(),
            replaced_forward(self.inner, self._forward),
            attention_by(self.inner, NAME),
            fused_adapters(self.inner),
            fused_norms(self.inner),
        ):
            yield

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[list[KeysValues], Tensor]:
        """Keys and values of each prompt, and the hidden states (P, D) that predict their next tokens.

        The prompts are one row, in which each sees itself only: none is padded.
        """
        lengths = [len(prompt) for prompt in prompts]
        attention = _Reading(tuple(map(Segment, lengths)))
        hidden = self._hidden(
            [token for prompt in prompts for token in prompt],
            torch.cat([torch.arange(length) for length in lengths]),
            attention,
        )
        if not attention.layers:
            raise ValueError("no layer attends through transformers' attention interface")
        self.windows |= attention.windows
        layers = [[torch.split(each, lengths, dim=2) for each in layer] for layer in attention.layers]
        states = [[(keys[at][0], values[at][0]) for keys, values in layers] for at in range(len(prompts))]
        return states, hidden[0, [end - 1 for end in accumulate(lengths)]]

    def step(self, cache: RowCache, rows: Sequence[Row]) -> Tensor:
        """Hidden states (R, D) that predict the next token of each row; its newest one is read."""
        positions = torch.tensor([row.length - 1 for row in rows])
        cache.make_room(int(positions.max()) + 1)
        tokens = [row.token_ids[-1] for row in rows]
        hidden = self._hidden(tokens, positions, _Continuing(cache, positions.to(self.inner.device)), one_each=True)
        return hidden[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, V) logits of hidden states (R, D), in float32 or better; the next call may use their memory again."""
        module: Any = self.head.module
        if not self.head.is_linear:
            return self.head.logits(hidden)
        # The first that is taken is the largest.
        for name, dtype in (("product", hidden.dtype), ("logits", torch.float32)):
            self._buffers.take(name, (self.slots, len(module.weight)), hidden, dtype)
        return self.head.linear_logits(hidden, module.weight, module.bias, self._buffers)

    def _hidden(self, tokens: Sequence[int], positions: Tensor, attention: Any, one_each: bool = False) -> Tensor:
        shape = (-1, 1) if one_each else (1, -1)
        device = self.inner.device
        ids, positions = torch.tensor(tokens, device=device).view(shape), positions.to(device).view(shape)
        hidden: Tensor = self.model(input_ids=ids, position_ids=positions, decoding=attention)
        return hidden

    def _forward(self, input_ids: Tensor, position_ids: Tensor, decoding: Any, **_: Any) -> Tensor:
        decoder = decoder_of(self.inner)
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, decoding=decoding)
        hidden: Tensor = output.last_hidden_state
        return self.head.cast(hidden)


KeysValues = list[tuple[Tensor, Tensor]]
"""(H_kv, S, D) keys and values of a text, layer by layer in the order in which attention is called."""


class RowCache:
    """Keys and values of rows: the token at position p of the row in slot r is at [r, :, p].

    positions: most tokens of a row. Memory on a CPU: that of the positions written, in the system's pages, at most all.
    On a GPU: those of `slots` rows of the longest one's length, up to `GROWTH` positions more, and while it grows those
    of one layer again.
    """

    def __init__(self, slots: int, positions: int) -> None:
        self.slots, self.positions = slots, positions
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def capacity(self) -> int:
        """Positions for which there is memory."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def make_room(self, positions: int) -> None:
        """Grow to this many positions, or more."""
        if positions > self.capacity:
            for number, states in enumerate(self.layers):
                self.layers[number] = tuple(self._grown(each, positions) for each in states)  # type: ignore[assignment]

    def _grown(self, states: Tensor, positions: int) -> Tensor:
        if _takes_memory_when_written(states):
            reserved = self.positions
        else:
            reserved = min(self.positions, -(-positions // GROWTH) * GROWTH)
        grown = _zeros((*states.shape[:2], reserved, states.shape[3]), states)
        grown[:, :, : states.shape[2]] = states
        return grown

    def put(self, slot: int, states: KeysValues) -> None:
        """Begin the row in a slot with a text of these keys and values."""
        if not self.layers:
            self.layers = [
                tuple(each.new_zeros(self.slots, each.shape[0], 0, each.shape[2]) for each in layer)  # type: ignore[misc]
                for layer in states
            ]
        length = states[0][0].shape[1]
        self.make_room(length)
        for layer, text in zip(self.layers, states, strict=True):
            for mine, given in zip(layer, text, strict=True):
                mine[slot, :, :length] = given

    def move(self, start: int, to: int, length: int) -> None:
        """Move a row of this length to another slot."""
        for layer in self.layers:
            for each in layer:
                each[to, :, :length] = each[start, :, :length]


def _takes_memory_when_written(like: Tensor) -> bool:
    return like.device.type == "cpu"


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of the type and on the device of another tensor; on a CPU a page takes memory once it is written."""
    if not _takes_memory_when_written(like):
        return like.new_zeros(shape)
    # Not from PyTorch's allocator: that writes the zeros, and keeps what is freed in pieces that fit nothing larger.
    memory = mmap.mmap(-1, math.prod(shape) * like.element_size(), access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=like.dtype).view(*shape)


def decode(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampler: Sampler,
    most: int,
    are_over: AreOver,
) -> Iterator[Row]:
    """A response to each prompt (token ids), as they are finished.

    A row that ends makes room for the next prompt. Equal prompts that follow one another are read once.
    seeds: each response draws by the numbers of its own. most: tokens of a response.
    """
    batch = _Batch(decoder, prompts, seeds, sampler, most, are_over)
    while batch.is_busy:
        finished: list[Row] = []
        # The model is its own again while the caller is at work.
        with decoder.ready():
            while batch.is_busy and not finished:
                finished = batch.advance()
        yield from finished


class _Batch:
    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampler: Sampler,
        most: int,
        are_over: AreOver,
    ) -> None:
        self.decoder, self.sampler, self.most, self.are_over = decoder, sampler, most, are_over
        self.waiting = deque(
            Row(number, tuple(prompt), uniform_numbers(seed, most))
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        self.rows: list[Row] = []
        """Those in the first slots."""
        self.cache = RowCache(decoder.slots, max(map(len, prompts), default=0) + most)
        self.ids = torch.zeros(decoder.slots, 0, dtype=torch.long, device=decoder.inner.device)
        """(slots, S) token ids of each row, the first one again behind its end."""
        self.read: dict[Sequence[int], tuple[KeysValues, Tensor]] = {}
        """The prompt that was read last, if the next rows begin with it."""

    @property
    def is_busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def advance(self) -> list[Row]:
        """A token for the rows that begin, if there are such, else for all; those that it ends are returned."""
        first = len(self.rows)
        if self.waiting and first < self.decoder.slots:
            hidden = self._begin()
        else:
            first, hidden = 0, self.decoder.step(self.cache, self.rows)
        rows, slots = self.rows[first:], slice(first, len(self.rows))
        longest = max(row.length for row in rows)
        tokens = draw_next(self.sampler, self.decoder.logits(hidden), self.ids[slots, :longest], rows)
        self._make_room(longest + 1)
        places = torch.tensor([[row.length - 1] for row in rows], device=tokens.device)
        self.ids[slots].scatter_(1, places, tokens[:, None])
        drew(len(rows))
        over = [ends or len(row.token_ids) == self.most for ends, row in zip(self.are_over(rows), rows, strict=True)]
        for at in reversed(range(len(rows))):
            if over[at]:
                self._remove(first + at)
        return [row for row, ends in zip(rows, over, strict=True) if ends]

    def _begin(self) -> Tensor:
        """Begin rows in free slots, of prompts that can be read together; the hidden states (B, D) at their ends."""
        rows: list[Row] = []
        unread: dict[Sequence[int], None] = {}
        while self.waiting and len(self.rows) + len(rows) < self.decoder.slots:
            prompt = self.waiting[0].prompt
            if prompt not in self.read and prompt not in unread:
                if unread and sum(map(len, unread)) + len(prompt) > READ_TOGETHER:
                    break
                unread[prompt] = None
            rows.append(self.waiting.popleft())
        if unread:
            states, hidden = self.decoder.read([*unread])
            self.read |= zip(unread, zip(states, hidden, strict=True), strict=True)
        self._make_room(max(row.length for row in rows))
        for row in rows:
            slot = len(self.rows)
            self.cache.put(slot, self.read[row.prompt][0])
            self.ids[slot] = row.prompt[0]
            self.ids[slot, : row.length] = torch.tensor(row.prompt)
            self.rows.append(row)
        hidden = torch.stack([self.read[row.prompt][1] for row in rows])
        following = self.waiting[0].prompt if self.waiting else None
        self.read = {prompt: read for prompt, read in self.read.items() if prompt == following}
        return hidden

    def _make_room(self, positions: int) -> None:
        grown = positions - self.ids.shape[1]
        if grown > 0:
            more = self.ids[:, :1] if self.ids.shape[1] else self.ids.new_zeros(len(self.ids), 1)
            self.ids = torch.cat((self.ids, more.expand(-1, max(grown, GROWTH))), dim=1)

    def _remove(self, slot: int) -> None:
        """Free a slot: the last row moves into it."""
        last = self.rows.pop()
        if slot < len(self.rows):
            self.rows[slot] = last
            self.cache.move(len(self.rows), slot, last.length)
            self.ids[slot] = self.ids[len(self.rows)]


def bytes_per_position(model: PreTrainedModel | PeftModel) -> int:
    """Memory for the keys and values of a token of a row, in all layers; of a model that can be decoded."""
    decoder = Decoder(model, slots=1)
    with decoder.ready():
        (states,), _ = decoder.read([[0]])
    return sum(each.numel() * each.element_size() for layer in states for each in layer)


# --- the check --------------------------------------------------------------------------------------------------------


def why_not(model: PreTrainedModel | PeftModel, longest: int | None = None) -> str | None:
    """Why a model's responses cannot be decoded here; None if they can.

    longest: most tokens of prompt and response, None: any number. Decoding is right for models in which tokens meet
    in attention alone, attention is told its window, and a token gets the same for its position whatever is beside it.
    Two prompts are read and continued, and log-probabilities compared with those of the model's own forward pass: to
    `TOLERANCE` in float32; in lower precision the median difference over the vocabulary, averaged over a row's tokens,
    to `SPREAD`.
    """
    inner = causal_model(model)
    config = inner.config.get_text_config(decoder=True)
    if recurrent_layers(inner):
        return "it has recurrent layers"
    if moving := _rope_types(inner) & MOVING_POSITIONS:
        return f"positions change with the longest sequence beside them (rope_type {', '.join(sorted(moving))})"
    if any(getattr(kind, "alora_invocation_tokens", None) for kind in getattr(model, "peft_config", {}).values()):
        return "its adapter depends on invocation tokens"
    try:
        told, difference, allowed = _probe(model, config)
    # A model that cannot take such rows may raise anything.
    except Exception as error:
        return error_line(error)
    untold = {window for window in windows_named(config) if longest is None or window < longest} - told
    if not difference <= allowed:
        return f"log-probabilities differ from its own by {difference:.2g} nats (at most {allowed:.2g} expected)"
    return (
        f"attention is not told of the window of {min(untold)} tokens that its configuration names" if untold else None
    )


def _rope_types(inner: PreTrainedModel) -> set[str]:
    """Kinds of a model's rotary embeddings; some have one for each kind of layer."""
    kinds = [getattr(module, "rope_type", None) for module in inner.modules()]
    return {name for kind in kinds if kind for name in (kind.values() if isinstance(kind, dict) else [kind])}


def _probe(model: PreTrainedModel | PeftModel, config: Any) -> tuple[set[int | None], float, float]:
    """Windows that attention is told, the difference from the model's own log-probabilities, and what is allowed."""
    decoder = Decoder(model, slots=2)
    special = special_ids(decoder.inner.config) | special_ids(config)
    known = [token for token in range(decoder.inner.get_input_embeddings().num_embeddings) if token not in special]
    texts = [
        [known[7 * (at + 11 * text + 1) % len(known)] for at in range(length)] for text, length in enumerate((9, 14))
    ]
    found: list[Tensor] = []
    with decoder.ready():
        prompts = [text[:-PROBE_STEPS] for text in texts]
        states, hidden = decoder.read(prompts)
        cache = RowCache(2, max(map(len, texts)))
        rows = [Row(slot, prompt, np.zeros(0)) for slot, prompt in enumerate(prompts)]
        for slot, state in enumerate(states):
            cache.put(slot, state)
        for _ in range(PROBE_STEPS):
            for row, text in zip(rows, texts, strict=True):
                row.token_ids.append(text[row.length])
            hidden = decoder.step(cache, rows)
            found.append(decoder.logits(hidden).log_softmax(1))
        told = decoder.windows
    # Of values, which are those of a product: under autocast its type is not that of the weights.
    exact = states[0][0][1].dtype in (torch.float32, torch.float64)
    made, wanted = torch.stack(found), _own_logps(model, decoder.inner, texts)
    difference = (made - wanted).abs()
    if exact and decoder.inner.device.type == "cpu":
        return told, float(difference.max()), TOLERANCE
    allowed = SPREAD * float(wanted.std(dim=2).mean())
    if _typical(difference) > allowed:
        # An adapter that changes much may amplify its rounding: then it differs as much where only layers are fused.
        with fused_adapters(decoder.inner), fused_norms(decoder.inner):
            rounded = _own_logps(model, decoder.inner, texts)
        allowed = max(allowed, 2 * _typical((rounded - wanted).abs()))
    return told, _typical(difference), allowed


def _own_logps(model: PreTrainedModel | PeftModel, inner: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """(`PROBE_STEPS`, texts, V) log-probabilities behind the last tokens of texts, by the model's own forward pass."""
    with torch.inference_mode():
        of_texts = [
            model(input_ids=torch.tensor([text], device=inner.device), use_cache=False).logits for text in texts
        ]
    logits = torch.cat([of_text[:, -PROBE_STEPS:] for of_text in of_texts]).transpose(0, 1)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(2)


def _typical(difference: Tensor) -> float:
    """The median over the vocabulary, of the row that differs more: a fault may concern one row alone."""
    return float(difference.median(dim=2).values.mean(dim=0).max())


# --- attention --------------------------------------------------------------------------------------------------------


class _Reading:
    """Attention while prompts are read: it keeps their keys and values."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.windows: set[int | None] = set()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, how: dict[str, Any]
    ) -> Tensor:
        self.layers.append((key, value))
        self.windows.add(window)
        output, _ = grouped_attention(
            module, query, key, value, None, segments=self.segments, sliding_window=window, **how
        )
        return output


class _Continuing:
    """Attention of one new token of each row: it adds their keys and values to those of the rows."""

    def __init__(self, cache: RowCache, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions
        self.rows = torch.arange(len(positions), device=positions.device)
        self.seen = int(positions.max()) + 1
        self.called = 0
        self.masks: dict[int | None, Tensor] = {}

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None, how: dict[str, Any]
    ) -> Tensor:
        states = self.cache.layers[self.called]
        self.called += 1
        for kept, new in zip(states, (key, value), strict=True):
            kept[self.rows, :, self.positions] = new[:, :, 0]
        keys, values = (kept[: len(self.rows), :, : self.seen] for kept in states)
        # The queries of heads that share keys and values are those of several positions: SDPA reads the keys once.
        packed = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        output = _attend(packed, keys, values, self._mask(window, query.dtype), **how)
        return output.reshape(len(query), 1, query.shape[1], -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(R, 1, 1, S) numbers to add to scores: 0 for positions that a row's newest token sees, else −∞."""
        if window not in self.masks:
            at, newest = torch.arange(self.seen, device=self.positions.device), self.positions[:, None]
            hidden = at > newest if window is None else (at > newest) | (at <= newest - window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.masks[window] = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self.masks[window]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """(R, H_kv, G, D) for queries (R, H_kv, G, D), keys and values (R, H_kv, S, D); sinks `s_aux` (H_kv · G,)."""
    if softcap is None and s_aux is None:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores if softcap is None else torch.tanh(scores / softcap) * softcap) + mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, *query.shape[1:3], 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat((scores, sinks), dim=3)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights[..., : key.shape[2]] @ value


def _decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    decoding: _Reading | _Continuing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for `transformers.AttentionInterface`: what the object `decoding` computes; (B, N, H, D).

    Raises ValueError if the model does not pass that object on, or gives attention what is not known here.
    """
    if decoding is None:
        raise ValueError("its layers do not pass keyword arguments on to attention")
    unknown = [name for name, given in others.items() if given is not None and name not in KNOWN]
    if unknown or attention_mask is not None:
        raise ValueError(f"it gives attention {', '.join(unknown) or 'a mask'}, which is not known here")
    how = {name: others.get(name) for name in ("scaling", "softcap", "s_aux")}
    return decoding.attend(module, query, key, value, sliding_window, how), None


# No mask function is registered under this name, so transformers builds no mask and passes None.
AttentionInterface.register(NAME, _decoding_attention)
