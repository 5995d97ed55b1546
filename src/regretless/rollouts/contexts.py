"""The contexts in which continuations begin: the beginnings of a response, unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from transformers import PreTrainedTokenizerBase

from regretless.core.errors import DataError
from regretless.core.files import fingerprint
from regretless.data.codec import codec_of
from regretless.data.columns import Response
from regretless.data.prompts import PromptRow
from regretless.data.schema import Unusable, read_gold

At = Literal["lines", "tokens", "steps"]


@dataclass(frozen=True)
class Context:
    """A prompt and the first tokens of a response to it. Responses that begin equally share their contexts."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]

    @cached_property
    def name(self) -> str:
        """Its identity: nothing but its token ids."""
        return fingerprint([self.prompt, self.written])[:24]


@dataclass(frozen=True)
class Measured:
    """A response whose regret is to be measured, in T units."""

    response: Response
    outcome: float
    """Its return R: 1 or 0."""
    ends: tuple[int, ...]
    """Tokens of the response at the end of each unit, (T,); the last is its length."""

    @cached_property
    def contexts(self) -> list[Context]:
        """The contexts in which the units begin, (T,): s_0, the prompt, to s_{T−1}."""
        ids = tuple(self.response.token_ids or ())
        prompt = tuple(self.response.prompt_token_ids or ())
        return [Context(prompt, ids[:start]) for start in (0, *self.ends[:-1])]

    def prompts(self) -> Iterator[tuple[Context, PromptRow]]:
        """Its contexts, and each as a prompt whose answer is verified like the response."""
        gold = read_gold(vars(self.response))
        for context in self.contexts:
            ids = context.prompt + context.written
            yield context, PromptRow(context.name, self.response.prompt, gold, token_ids=ids)


def unit_ends(ids: Sequence[int], positions: Sequence[float], at: At, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens at the end of each unit of a response, the last being all of them.

    positions: fractions of the tokens; a unit ends at each, or at the end of a line that is nearest to it. Ends that
    coincide count once, so that a response with few lines has fewer units.
    """
    ends = line_ends(ids, tokenizer) if at == "lines" else list(range(1, len(ids)))
    wanted = (fraction * len(ids) for fraction in positions)
    nearest = {min(ends, key=lambda end: (abs(end - place), end)) for place in wanted} if ends else set()
    return [*sorted(nearest), len(ids)]


def step_ends(response: Response, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens at the end of each step of a response, the last being all of them. Raises Unusable."""
    if response.step_ends is None:
        raise Unusable("step_ends: missing, so where its steps end is unknown; set rollout.at to lines or tokens")
    ids = tuple(response.token_ids or ())
    try:
        *ends, last = codec_of(tokenizer).tokens_at(ids, response.response, response.step_ends)
    except DataError as reason:
        raise Unusable(str(reason)) from None
    return [*checked_ends(ends, last, "step_ends")[:-1], len(ids)]


def line_ends(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Numbers of tokens, below all, after which a line of the text has ended: behind a line break, and white space."""
    texts = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return [place for place, text in enumerate(texts[:-1], 1) if "\n" in text and not text.rpartition("\n")[2].strip()]


def unit_characters(measured: Measured, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Characters of a response's text at the end of each unit; a character that a unit divides comes behind it."""
    ids, ends = measured.response.token_ids or [], measured.ends[:-1]
    texts = tokenizer.batch_decode(
        [ids[:end] for end in ends], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [*(len(text.rstrip("�")) for text in texts), len(measured.response.response)]


def checked_ends(ends: object, length: int, column: str) -> list[int]:
    """Ends of units that a row gives, with that of the last unit behind them. Raises Unusable for others."""
    fits = isinstance(ends, list) and all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
    if not fits or any(low >= high for low, high in zip([0, *ends], [*ends, length], strict=True)):  # type: ignore[misc]
        raise Unusable(
            f"{column}: expected rising numbers of tokens between 0 and {length}, the response's own, at which units "
            f"end, got {ends!r:.60}"
        )
    return [*ends, length]  # type: ignore[misc]
