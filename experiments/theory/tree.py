"""Token trees: prompts, the tokens that may follow them, and every response written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

END = -1
"""Child of a token after which the response is over."""


@dataclass(frozen=True, eq=False)
class Level:
    """Consecutive contexts with the edges that leave them."""

    contexts: slice
    edges: slice
    starts: IntArray
    """First edge of each context, counted from the level's first edge."""

    def sum(self, values: FloatArray) -> FloatArray:
        """Sum over the tokens of each context, (contexts,); values: (edges,)."""
        return np.add.reduceat(values, self.starts)

    def logsumexp(self, values: FloatArray) -> FloatArray:
        """log Σ exp over the tokens of each context, (contexts,); values: (edges,) nats, one finite in each context."""
        top = np.maximum.reduceat(values, self.starts)
        counts = np.diff(self.starts, append=len(values))
        return np.asarray(top + np.log(self.sum(np.exp(values - np.repeat(top, counts)))))


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Prompts with all their continuations: a deterministic, finite decision process over N contexts and E edges.

    A context is a prompt with the tokens written so far, an edge a token that may come next. Contexts are numbered
    level by level, the prompts first; edges lie in the order of the contexts they leave, and the contexts they reach
    are numbered in that same order. So every level is one slice of contexts and one of edges.

    Raises ValueError for arrays that break this numbering, or a context without a token.
    """

    source: IntArray
    """Context that each edge leaves, (E,)."""
    child: IntArray
    """Context that each edge reaches, (E,), or END."""

    def __post_init__(self) -> None:
        for name in ("source", "child"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        if self.source.ndim != 1 or self.source.shape != self.child.shape or not self.source.size:
            raise ValueError(f"TokenTree: expected two (E ≥ 1,) arrays, got {self.source.shape}, {self.child.shape}")
        if self.source[0] != 0 or not np.isin(np.diff(self.source), (0, 1)).all():
            raise ValueError("TokenTree.source: expected 0, 0, …, 1, 1, …: contexts in order, each with a token")
        inner = self.child != END
        reached = self.child[inner]
        if self.prompts < 1 or not np.array_equal(reached, np.arange(self.prompts, self.contexts)):
            raise ValueError("TokenTree.child: expected every context but the prompts reached once, in order")
        if (reached <= self.source[inner]).any():
            raise ValueError("TokenTree.child: a token leads back to a context at or before the one it leaves")

    @property
    def edges(self) -> int:
        """Number of edges E."""
        return len(self.source)

    @property
    def contexts(self) -> int:
        """Number of contexts N."""
        return int(self.source[-1]) + 1

    @property
    def prompts(self) -> int:
        """Number of prompts; they are the contexts 0 … prompts − 1."""
        return self.contexts - int((self.child != END).sum())

    @cached_property
    def first(self) -> IntArray:
        """First edge of each context, (N,)."""
        return np.searchsorted(self.source, np.arange(self.contexts)).astype(np.int64)

    @cached_property
    def parent(self) -> IntArray:
        """Edge that reaches each context, (N,); −1 for prompts."""
        parent = np.full(self.contexts, -1, dtype=np.int64)
        inner = np.flatnonzero(self.child != END)
        parent[self.child[inner]] = inner
        return parent

    @cached_property
    def whole(self) -> Level:
        """All contexts and edges at once."""
        return Level(slice(0, self.contexts), slice(0, self.edges), self.first)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The contexts of equally many tokens, prompts first."""
        levels, start, stop = [], 0, self.prompts
        while start < stop:
            edges = slice(int(self.first[start]), int(self.first[stop]) if stop < self.contexts else self.edges)
            levels.append(Level(slice(start, stop), edges, self.first[start:stop] - edges.start))
            start, stop = stop, stop + int((self.child[edges] != END).sum())
        return tuple(levels)

    @cached_property
    def level(self) -> IntArray:
        """Tokens written before each context, (N,)."""
        return np.repeat(np.arange(len(self.levels)), [len(each.starts) for each in self.levels]).astype(np.int64)

    @cached_property
    def prompt(self) -> IntArray:
        """Prompt that each context continues, (N,)."""
        prompt = np.arange(self.contexts)
        for level in self.levels[1:]:
            prompt[level.contexts] = prompt[self.source[self.parent[level.contexts]]]
        return prompt

    @cached_property
    def ends(self) -> IntArray:
        """Edges that end a response, (R,); response number i is the one that ends with the i-th."""
        return np.flatnonzero(self.child == END).astype(np.int64)

    def at_child(self, values: FloatArray) -> FloatArray:
        """Value of the context that each edge reaches, (E,), zero at the end; values: (N,)."""
        return np.where(self.child == END, 0.0, values[self.child])

    def backup(
        self, reward: FloatArray, discount: float, value: Callable[[Level, FloatArray], FloatArray]
    ) -> tuple[FloatArray, FloatArray]:
        """Dynamic programming from the ends to the prompts: Q (E,) and V (N,).

        Q = reward + discount · V(child), with V = 0 at the end; value(level, q) makes V of a level from its Q.
        """
        q, v = reward.astype(np.float64), np.zeros(self.contexts)
        for level in reversed(self.levels):
            child = self.child[level.edges]
            q[level.edges] += discount * np.where(child == END, 0.0, v[child])
            v[level.contexts] = value(level, q[level.edges])
        return q, v

    @cached_property
    def responses(self) -> Responses:
        """Every response, written out edge by edge."""
        lengths = self.level[self.source[self.ends]] + 1
        edges = np.full((len(self.ends), int(lengths.max())), -1, dtype=np.int64)
        rows, current = np.arange(len(self.ends)), self.ends
        for back in range(edges.shape[1]):
            edges[rows, lengths[rows] - 1 - back] = current
            current = self.parent[self.source[current]]
            rows, current = rows[current >= 0], current[current >= 0]
        return Responses(self, edges)


@dataclass(frozen=True, eq=False)
class Responses:
    """All R responses of a tree as rows of edges, padded with −1 to T columns."""

    tree: TokenTree
    edges: IntArray
    """(R, T)."""

    @cached_property
    def mask(self) -> BoolArray:
        """True at tokens, (R, T)."""
        return np.asarray(self.edges >= 0)

    @cached_property
    def lengths(self) -> IntArray:
        """Tokens of each response, (R,)."""
        return np.asarray(self.mask.sum(axis=1))

    @cached_property
    def prompt(self) -> IntArray:
        """Prompt of each response, (R,)."""
        return self.tree.prompt[self.tree.source[self.edges[:, 0]]]

    def gather(self, values: FloatArray) -> FloatArray:
        """Values of the edges along each response, (R, T), zero at padding; values: (E,)."""
        return np.where(self.mask, values[self.edges], 0.0)

    def log_prob(self, policy: FloatArray) -> FloatArray:
        """Log-probability of each response under a policy (E,), (R,) nats."""
        return np.asarray(self.gather(policy).sum(axis=1))

    def future(self, values: FloatArray, discount: float = 1.0) -> FloatArray:
        """Σ_{l>0} discount^l values[t + l] at every token t, (R, T); values: (R, T), zero at padding."""
        total = np.zeros_like(values)
        for t in range(values.shape[1] - 2, -1, -1):
            total[:, t] = discount * (values[:, t + 1] + total[:, t + 1])
        return total

    def mean_given_edge(self, policy: FloatArray, values: FloatArray) -> FloatArray:
        """Mean over the responses through each edge, (E,): the edge is written, then the policy (E,) goes on.

        values: (R, T), at column t what belongs to the response's t-th edge. Responses that the policy never writes
        count nothing, whatever their value.
        """
        weight = np.exp(self.future(self.gather(policy)))
        with np.errstate(invalid="ignore"):
            weighted = np.where(weight > 0, weight * values, 0.0)
        total = np.bincount(self.edges[self.mask], weights=weighted[self.mask], minlength=self.tree.edges)
        return total.astype(np.float64)
