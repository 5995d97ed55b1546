"""What a judge's reply says: a preference between two tokens, a verdict between two answers, a rating of one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from scipy.special import expit

from regretless.servers.ask import UnreadableError

T = TypeVar("T")
FIVE_WAY: Mapping[str, int] = {
    **{"A>>B": 2, "A>B": 1, "A=B": 0, "B>A": -1, "B>>A": -2},
    **{"B<<A": 2, "B<A": 1, "B=A": 0, "A<B": -1, "A<<B": -2},
}
"""Arena-Hard's labels: how much better A is. The second row says the same from the other side."""
THREE_WAY: Mapping[str, int] = {"A": 1, "B": -1, "C": 0}
"""MT-Bench's labels of pairwise judgments."""
BRACKETS = r"\[\[([^\[\]\n]+)\]\]"
RATING = re.compile(r"(\d+(?:\.\d+)?)(?: ?/ ?10)?")
LOWEST, HIGHEST = 1, 10


def two_token_preference(top: Mapping[str, float], wanted: str, other: str) -> float:
    """Probability of `wanted` against `other` in a judge's next token.

    top: log-probabilities (nats) of the most likely tokens. One that is not among them counts as impossible, as does
    one with minus infinity. Raises UnreadableError when both are impossible.
    """
    found = {token: top[token] for token in (wanted, other) if top.get(token, -math.inf) > -math.inf}
    if not top:
        raise UnreadableError("no log-probabilities of an answer")
    if not found:
        raise UnreadableError("neither answer among the most likely tokens")
    if len(found) == 1:
        return float(wanted in found)
    return float(expit(found[wanted] - found[other]))


def parse_label(reply: str, labels: Mapping[str, int], code: str | None = None) -> int:
    """Meaning of the label in double brackets that a reply gives as its verdict.

    code: what stands before the genuine verdict, on its line, where the judge was asked for that.
    Raises UnreadableError when there is none, or when there are several that do not mean the same: a judge may quote
    an answer that holds a label.
    """
    return _only([labels[text] for text in _bracketed(reply, code) if text in labels], "verdict")


def parse_rating(reply: str, code: str | None = None) -> float:
    """The rating from 1 to 10 in double brackets that a reply gives; see `parse_label`."""
    given = [match[1] for text in _bracketed(reply, code) if (match := RATING.fullmatch(text))]
    rating = _only([float(number) for number in given], "rating")
    if not LOWEST <= rating <= HIGHEST:
        raise UnreadableError("rating is not on the scale")
    return rating


def _bracketed(reply: str, code: str | None) -> list[str]:
    before = "" if code is None else re.escape(code) + r"[^\[\]\n]*"
    return [text.strip() for text in re.findall(before + BRACKETS, reply)]


def _only(found: Sequence[T], what: str) -> T:
    if len(set(found)) != 1:
        raise UnreadableError(f"several {what}s" if found else f"no {what}")
    return found[0]
