"""Parsers of a judge's reply: a preference between two tokens, a verdict on two answers, a rating of one."""

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
"""Arena-Hard's labels: how much better A is. The second row states the same in terms of B."""
THREE_WAY: Mapping[str, int] = {"A": 1, "B": -1, "C": 0}
"""MT-Bench's labels of pairwise judgments."""
BRACKETS = r"\[\[([^\[\]\n]+)\]\]"
RATING = re.compile(r"(\d+(?:\.\d+)?)(?: ?/ ?10)?")
LOWEST, HIGHEST = 1, 10


def two_token_preference(top: Mapping[str, float], wanted: str, other: str) -> float:
    """Probability of `wanted` relative to `other` in a judge's next token.

    top: log-probabilities (nats) of the most likely tokens. A token that is not listed, or that has minus infinity,
    counts as impossible. Raises UnreadableError if both are impossible.
    """
    logps = {token: top[token] for token in (wanted, other) if top.get(token, -math.inf) > -math.inf}
    if not top:
        raise UnreadableError("no log-probabilities of an answer")
    if not logps:
        raise UnreadableError("neither answer among the most likely tokens")
    if len(logps) == 1:
        return float(wanted in logps)
    return float(expit(logps[wanted] - logps[other]))


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
    before = "" if code is None else re.escape(code) + r"[^\[\]\n]*"
    return [text.strip() for text in re.findall(before + BRACKETS, reply)]


def _only(candidates: Sequence[T], what: str) -> T:
    if len(set(candidates)) != 1:
        raise UnreadableError(f"several {what}s" if candidates else f"no {what}")
    return candidates[0]
