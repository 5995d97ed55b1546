"""Shared-prefix rows: many responses in a row, with each prompt and each common prefix once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regretless.modeling.prefix_tree import hosts, prefix_tree

Ids = tuple[int, ...]
"""Token ids of a text. In a response, a token that the model reads and did not write (a tool's output, a later
question, the header of a message) is context, written as its complement: ~id, which is negative. Context is attended
to like all tokens, and no log-probability belongs to it. As part of the ids it is compared, hashed and stored with
them."""
Item = tuple[Ids, Ids]
"""A prompt and a response to it."""


def as_context(ids: Iterable[int]) -> Ids:
    """Tokens as context of a response."""
    return tuple(~token for token in ids)


def is_context(token: int) -> bool:
    """Whether a token of a response is context."""
    return token < 0


def own_ids(ids: Iterable[int]) -> Ids:
    """The tokens of a response that the model wrote; each has a log-probability."""
    return tuple(token for token in ids if not is_context(token))


def read_ids(ids: Iterable[int]) -> Ids:
    """All tokens of a response as the model reads them."""
    return tuple(~token if is_context(token) else token for token in ids)


@dataclass(frozen=True)
class Segment:
    """Tokens of a row that follow one another in all their sequences.

    A prompt, a beginning that responses share, or what a response has of its own. Segments are in depth-first order:
    behind each one are all those that continue it.
    """

    length: int
    parent: int | None = None
    """Number of the segment that it continues; None for a prompt."""


def tokens_before(segments: Iterable[Segment]) -> list[int]:
    """For each segment the tokens before it in its sequences: those of all segments that it continues."""
    ends: list[int] = []
    starts: list[int] = []
    for segment in segments:
        starts.append(0 if segment.parent is None else ends[segment.parent])
        ends.append(starts[-1] + segment.length)
    return starts


@dataclass(frozen=True)
class Layout:
    """A row of N tokens, and the positions in it that predict the M distinct tokens of the responses.

    A token that several responses begin with is one of the M; where they part, one position predicts a token of each.
    A response's last token is predicted but never read, so it is not part of the row. Plain rows (`modeling.rows`) are
    B rows of N tokens, one sequence in each.
    """

    input_ids: Tensor
    """(1, N) token ids, or (B, N) in plain rows."""
    position_ids: Tensor
    """(1, N) positions in their sequences; every segment continues those of its parent."""
    segments: tuple[Segment, ...]
    """Empty in plain rows."""
    predict: Tensor
    """(M,) index of the token that predicts each response token that is not context; rows follow one another."""
    targets: Tensor
    """(M,) these response tokens."""
    lengths: tuple[int, ...] = ()
    """Plain rows: tokens of each row in front of its padding."""
    listed: Tensor | None = None
    """(M, K) ids of tokens whose log-probabilities are wanted in the place of each response token, or None."""
    counted: Tensor | None = None
    """(B·N,) bool: tokens that the load-balancing loss of a mixture of experts is about; None if it is not computed."""

    @property
    def tokens(self) -> int:
        """Tokens the model reads, padding included."""
        return self.input_ids.numel()

    @property
    def is_plain(self) -> bool:
        """Whether each sequence has a row of its own."""
        return not self.segments

    def to(self, device: torch.device) -> Layout:
        """The same layout with its tensors on a device."""
        names = ("input_ids", "position_ids", "predict", "targets", "listed", "counted")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def lay_out(items: Sequence[Item]) -> tuple[Layout, list[Tensor]]:
    """Row for (prompt, response) token pairs, and for each item the index of its own tokens among the M predicted ones.

    Equal prompts are laid out once, equal responses to a prompt once, and so is a beginning that several of them share
    (`prefix_tree`). A response that is a prefix of another one to the same prompt needs no positions of its own.

    Raises ValueError for an empty prompt, since the first response token needs a token before it, and for a response
    without a token of its own.
    """
    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    segments: list[Segment] = []
    indices: dict[Item, Tensor] = {}
    for prompt, responses in by_prompt(items).items():
        if not prompt or any(all(map(is_context, response)) for response in responses):
            raise ValueError("expected at least one prompt token and one response token that is not context")
        # The prompt.
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        segments.append(Segment(len(prompt)))
        # The branches behind it. Of the prompt and of each branch: its last token in the row, its segment, and the
        # index up to its end.
        start = (len(ids) - 1, len(segments) - 1, torch.empty(0, dtype=torch.long))
        ends: list[tuple[int, int, Tensor]] = []
        host = hosts(responses)
        for branch in prefix_tree([response for response in responses if host[response] == response]):
            last, parent, index = start if branch.parent is None else ends[branch.parent]
            tokens = branch.tokens
            read = tokens[:-1] if branch.is_end else tokens
            # The tokens that it predicts.
            before = (last, *range(len(ids), len(ids) + len(tokens) - 1))
            written = own_ids(tokens)
            index = torch.cat((index, torch.arange(len(targets), len(targets) + len(written))))
            predict.extend(at for at, token in zip(before, tokens, strict=True) if not is_context(token))
            targets.extend(written)
            # The tokens that the model reads.
            positions.extend(range(len(prompt) + branch.start, len(prompt) + branch.start + len(read)))
            ids.extend(read_ids(read))
            if read:
                segments.append(Segment(len(read), parent))
            ends.append((len(ids) - 1, len(segments) - 1, index))
            if branch.is_end:
                indices[prompt, branch.response] = index
        # Responses that begin another one.
        for response in responses:
            indices[prompt, response] = indices[prompt, host[response]][: len(own_ids(response))]
    layout = Layout(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        segments=tuple(segments),
        predict=torch.tensor(predict),
        targets=torch.tensor(targets),
    )
    return layout, [indices[item] for item in items]


def by_prompt(items: Iterable[Item]) -> dict[Ids, list[Ids]]:
    """The distinct responses to each prompt, all in order of their first appearance."""
    groups: dict[Ids, dict[Ids, None]] = {}
    for prompt, response in items:
        groups.setdefault(prompt, {})[response] = None
    return {prompt: list(responses) for prompt, responses in groups.items()}


def token_count(items: Iterable[Item]) -> int:
    """Ids of a row with these items (an upper bound: responses' last tokens are counted too)."""
    total = 0
    for prompt, responses in by_prompt(items).items():
        host = hosts(responses)
        branches = prefix_tree([response for response in responses if host[response] == response])
        total += len(prompt) + sum(branch.stop - branch.start for branch in branches)
    return total
