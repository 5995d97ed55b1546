"""Stop strings: a response ends before the first one in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import AnyStr

from transformers import PreTrainedTokenizerBase

from regretless.data.codec import CUT_CHARACTER
from regretless.data.columns import PER_TOKEN, first_values
from regretless.sampling.base import Completion

MARGIN = 8
"""Tokens that are decoded before those that can belong to a stop string: the first ones of a text lose a space, or are
a part of a character."""


class StopStrings:
    """Finds stop strings in generated tokens; special tokens count as they are written.

    Only generated tokens are decoded, so a stop string in the prompt, or at its border, is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        # A token stands for a byte or more.
        self.window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def end_with(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """For each row of generated token ids whether its last token completes a stop string, if none came before."""
        tails = self._decode([row[-self.window :] for row in rows])
        return [
            # Bytes that begin within a character may hide the characters behind them.
            (CUT_CHARACTER in tail or self._start(tail) is not None) and self._start(self._text(row)) is not None
            for row, tail in zip(rows, tails, strict=True)
        ]

    def cut(self, ids: Sequence[int]) -> tuple[int, str] | None:
        """Number of tokens wholly before the first stop string, and the text before it; None if there is none.

        The text includes the beginning of a token that the stop string begins within; what follows the stop string has
        no influence. ids: generated tokens, without an end-of-sequence token.
        """
        for special in (True, False):
            count = self._completed(ids, special)
            if count is None:
                continue
            text = self._text(ids[:count], special)
            before = text[: self._start(text)]
            while not before.startswith(spelled := self._text(ids[:count], special)):
                count -= 1
            return count, self._text(ids[:count], special=False) + before[len(spelled) :]
        return None

    def _completed(self, ids: Sequence[int], special: bool) -> int | None:
        """The number of tokens that the first complete stop string takes; None if there is none."""
        text = self._text(ids, special)
        ends = range(1, len(ids) + 1)
        # A part of a character may hide those before it.
        if special and (self._start(text) is not None or CUT_CHARACTER in text):
            return next((end for end in ends if self.end_with([ids[:end]])[0]), None)
        if self._start(text) is None:
            return None
        return next(end for end in ends if self._start(self._text(ids[:end], special)) is not None)

    def applied(self, completion: Completion) -> Completion:
        """A response with token ids as it is before its first stop string; unchanged if it has none."""
        ids = completion.token_ids or []
        cut = self.cut(ids[:-1] if completion.finish_reason == "stop" else ids) if self.strings else None
        return completion if cut is None else before_stop(completion, *cut)

    def _start(self, text: str) -> int | None:
        return first_of(text, self.strings)

    def _text(self, ids: Sequence[int], special: bool = True) -> str:
        return self._decode([ids], special)[0]

    def _decode(self, rows: Sequence[Sequence[int]], special: bool = True) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(
            [[int(token) for token in row] for row in rows],
            skip_special_tokens=not special,
            clean_up_tokenization_spaces=False,
        )
        return texts


def first_of(text: AnyStr, strings: Sequence[AnyStr]) -> int | None:
    """Where the first of the strings begins in a text; None if it has none."""
    return min((start for string in strings if (start := text.find(string)) >= 0), default=None)


def wholly_before(tokens: Sequence[bytes], start: int) -> int:
    """Number of tokens that end at byte `start` of their text or before."""
    return sum(end <= start for end in accumulate(map(len, tokens)))


def before_stop(completion: Completion, count: int | None, text: str) -> Completion:
    """A response that a stop string ended: its first `count` tokens (None: unknown which), and its text."""
    pieces = completion.token_ids or completion.tokens or ()
    cut = {
        name: None if count is None else first_values(getattr(completion, name), count, len(pieces))
        for name in (*PER_TOKEN, "sampled_logps")
    }
    return replace(completion, **cut, text=text, finish_reason="stop_string")
