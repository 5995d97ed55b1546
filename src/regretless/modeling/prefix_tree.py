"""Prefix tree of the responses to a prompt; a response that is a prefix of another adds no branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]
SHARED_AT_LEAST = 16
"""Responses whose first tokens differ earlier than this stand side by side: many answers open with the same few words,
and to share those would save next to nothing, while each branch is one more call of attention on a CPU."""


@dataclass(frozen=True)
class Branch:
    """Tokens `start … stop` of a response: a beginning that several share, or what one response has of its own."""

    parent: int | None
    """Number of the branch that ends where this one starts; None directly behind the prompt."""
    response: Tokens
    """The response; of several, the first that has them."""
    start: int
    stop: int

    @property
    def tokens(self) -> Tokens:
        """The tokens themselves, one or more."""
        return self.response[self.start : self.stop]

    @property
    def is_end(self) -> bool:
        """Whether the response ends here."""
        return self.stop == len(self.response)


def hosts(responses: Sequence[Tokens]) -> dict[Tokens, Tokens]:
    """For each distinct response the longest one that begins with it: itself, unless it is a prefix of another."""
    host: dict[Tokens, Tokens] = {}
    following: Tokens = ()
    # In sorted order a response is directly followed by one that it is a prefix of, if there is any.
    for response in sorted(responses, reverse=True):
        is_prefix = following[: len(response)] == response
        host[response] = host[following] if is_prefix else response
        following = response
    return host


def prefix_tree(responses: Sequence[Tokens]) -> list[Branch]:
    """Branches of distinct responses, none of which begins another one, in depth-first order.

    Behind each branch are all those that continue it. Branches that continue the same one, or directly the prompt, are
    in the order of the first responses that have them: without shared beginnings, in that of the responses.
    """
    alike: dict[Tokens, list[Tokens]] = {}
    for response in responses:
        alike.setdefault(beginning(response), []).append(response)
    branches: list[Branch] = []
    for together in alike.values():
        ordered = sorted(together)
        rank = {response: number for number, response in enumerate(ordered)}
        waiting: list[tuple[int | None, int, list[int]]] = [(None, 0, [rank[response] for response in together])]
        while waiting:
            parent, start, group = waiting.pop()
            # What the first and the last in sorted order share, all between them have.
            alone = len(group) == 1
            stop = len(ordered[group[0]]) if alone else _shared(ordered[min(group)], ordered[max(group)], start)
            branches.append(Branch(parent, ordered[group[0]], start, stop))
            if alone:
                continue
            following: dict[int, list[int]] = {}
            for number in group:
                following.setdefault(ordered[number][stop], []).append(number)
            branch = len(branches) - 1
            waiting += [(branch, stop, continued) for continued in reversed(following.values())]
    return branches


def beginning(response: Tokens) -> Tokens:
    """The tokens by which responses are in one tree or in another."""
    return response[:SHARED_AT_LEAST]


def _shared(first: Tokens, second: Tokens, at_least: int) -> int:
    """Tokens that two responses begin with alike; the first `known` are."""
    low, high = at_least, min(len(first), len(second))
    # By halves, because slices are compared without a step of Python for each token.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
