"""Many responses in one row: every prompt once, every distinct response once, prefixes of a response for free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Ids = tuple[int, ...]
"""Token ids of a text."""
Item = tuple[Ids, Ids]
"""A prompt and a response to it."""


@dataclass(frozen=True)
class Segment:
    """One prompt and the responses that continue it, as lengths (tokens) in the order of the row."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A row of N tokens, and the positions in it that predict the M tokens of the distinct responses.

    A response's last token is predicted but never read, so it is not part of the row.
    """

    input_ids: Tensor
    """(1, N) token ids."""
    position_ids: Tensor
    """(1, N) positions; they restart after the prompt for every response."""
    segments: tuple[Segment, ...]
    predict: Tensor
    """(M,) index in the row of the token that predicts each response token."""
    targets: Tensor
    """(M,) the response tokens."""

    @property
    def tokens(self) -> int:
        """Tokens the model reads: N."""
        return int(self.input_ids.shape[1])

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tensors on a device."""
        tensors = (self.input_ids, self.position_ids, self.predict, self.targets)
        moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
        return Layout(moved[0], moved[1], self.segments, moved[2], moved[3])


@dataclass(frozen=True)
class Placement:
    """Position of a response's tokens among the M predicted ones: `start … start + length`."""

    start: int
    length: int


def lay_out(items: Sequence[Item]) -> tuple[Layout, list[Placement]]:
    """Row for (prompt, response) token pairs, and each item's position among the predicted tokens.

    Equal prompts are laid out once, equal responses to a prompt once, and a response that is a prefix of another one to
    the same prompt needs no positions of its own.

    Raises ValueError for an empty prompt or response: the first response token needs a token before it.
    """
    groups: dict[Ids, dict[Ids, None]] = {}
    for prompt, response in items:
        if not prompt or not response:
            raise ValueError("expected at least one prompt token and one response token")
        groups.setdefault(prompt, {})[response] = None

    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    segments: list[Segment] = []
    places: dict[Item, Placement] = {}
    for prompt, responses in groups.items():
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        last_prompt_token = len(ids) - 1
        host = hosts(list(responses))
        lengths: list[int] = []
        for response in responses:
            if host[response] != response:
                continue
            places[prompt, response] = Placement(len(targets), len(response))
            predict.append(last_prompt_token)
            predict.extend(range(len(ids), len(ids) + len(response) - 1))
            targets.extend(response)
            positions.extend(range(len(prompt), len(prompt) + len(response) - 1))
            ids.extend(response[:-1])
            if len(response) > 1:
                lengths.append(len(response) - 1)
        for response in responses:
            places[prompt, response] = Placement(places[prompt, host[response]].start, len(response))
        segments.append(Segment(len(prompt), tuple(lengths)))
    layout = Layout(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        segments=tuple(segments),
        predict=torch.tensor(predict),
        targets=torch.tensor(targets),
    )
    return layout, [places[item] for item in items]


def hosts(responses: list[Ids]) -> dict[Ids, Ids]:
    """For each distinct response the longest one that begins with it: itself, unless it is a prefix of another."""
    host: dict[Ids, Ids] = {}
    following: Ids = ()
    # In sorted order a response is directly followed by one that it is a prefix of, if there is any.
    for response in sorted(responses, reverse=True):
        is_prefix = following[: len(response)] == response
        host[response] = host[following] if is_prefix else response
        following = response
    return host


def token_count(items: Sequence[Item]) -> int:
    """Ids of a row with these items (an upper bound: responses' last tokens are counted too)."""
    groups: dict[Ids, dict[Ids, None]] = {}
    for prompt, response in items:
        groups.setdefault(prompt, {})[response] = None
    total = 0
    for prompt, responses in groups.items():
        host = hosts(list(responses))
        total += len(prompt) + sum(len(response) for response in responses if host[response] == response)
    return total
