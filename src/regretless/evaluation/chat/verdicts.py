"""Parsers of a judge's reply: a preference between two tokens, a verdict on two answers, a rating of one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from string import whitespace
from typing import TypeVar

from regretless.servers.ask import UnreadableError
from regretless.servers.reply import VOCABULARY_MARKS

T = TypeVar("T")
FIVE_WAY: Mapping[str, int] = {
    **{"A>>B": 2, "A>B": 1, "A=B": 0, "B>A": -1, "B>>A": -2},
    **{"B<<A": 2, "B<A": 1, "B=A": 0, "A<B": -1, "A<<B": -2},
}
"""Arena-Hard's labels: how much better A is. The second row states the same in terms of B."""
BRACKETS = r"\[\[([^\[\]\n]+)\]\]"
RATING = re.compile(r"(\d+(?:\.\d+)?)(?: ?/ ?10)?")
LOWEST, HIGHEST = 1, 10
AROUND_TOKENS = whitespace + "".join(VOCABULARY_MARKS)
"""Characters around an answer in a token. Some servers write the space before a word as their vocabulary does."""
LEAST_SHARE = 0.5
"""Least probability of both answers together. With less, the judge was about to write something else, often a refusal,
and the rest says little about its preference."""


def two_token_preference(top: Sequence[tuple[str, float]], wanted: str, other: str, requested: int) -> float:
    """Probability of `wanted` relative to `other` in a judge's next token.

    top: the most likely tokens with their log-probabilities (nats); `requested` of them were asked for. Tokens that
    differ in surrounding white space alone are the same answer, and their probabilities are added. An answer that is
    not listed, or that has minus infinity, counts as impossible, as in the published evaluation.
    Raises UnreadableError if both are impossible, if both together are less likely than everything else, or if one is
    not listed although the list is shorter than requested: then it may have been left out.
    """
    if not top:
        raise UnreadableError("no log-probabilities of an answer")
    shares: dict[str, float] = {}
    for token, logp in top:
        text = token.strip(AROUND_TOKENS)
        shares[text] = shares.get(text, 0.0) + math.exp(logp)
    ours, theirs = shares.get(wanted, 0.0), shares.get(other, 0.0)
    if ours + theirs == 0:
        raise UnreadableError("neither answer among the most likely tokens")
    if ours + theirs < LEAST_SHARE:
        raise UnreadableError("answers less likely than other tokens")
    if len(top) < requested and not {wanted, other} <= shares.keys():
        raise UnreadableError("fewer tokens than requested, and only one answer among them")
    return ours / (ours + theirs)


def parse_label(reply: str, labels: Mapping[str, int], code: str | None = None) -> int:
    """Value of the label in double brackets that is the reply's verdict.

    code: text before the genuine verdict, on its line, if the judge was asked to write it.
    Raises UnreadableError if there is no label, or if several disagree: a judge may quote an answer that contains a
    label.
    """
    return _only([labels[text] for text in _bracketed(reply, code) if text in labels], "verdict")


def parse_rating(reply: str, code: str | None = None) -> float:
    """The rating from 1 to 10 in double brackets that is the reply's verdict; see `parse_label`."""
    ratings = [match[1] for text in _bracketed(reply, code) if (match := RATING.fullmatch(text))]
    rating = _only([float(number) for number in ratings], "rating")
    if not LOWEST <= rating <= HIGHEST:
        raise UnreadableError("rating is not on the scale")
    return rating


def _bracketed(reply: str, code: str | None) -> list[str]:
    # Up to the next code: what is behind a code that is repeated is read once.
    before = "" if code is None else rf"{re.escape(code)}(?:(?!{re.escape(code)})[^\[\]\n])*"
    return [text.strip() for text in re.findall(before + BRACKETS, reply)]


def _only(candidates: Sequence[T], what: str) -> T:
    if len(set(candidates)) != 1:
        raise UnreadableError(f"several {what}s" if candidates else f"no {what}")
    return candidates[0]
