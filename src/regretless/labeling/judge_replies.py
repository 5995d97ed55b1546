"""Parser of a judge's reply with ratings: exactly one block per text, or an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from regretless.servers.ask import UnreadableError

HEADING = re.compile(r"^[ \t*_#]*output for text (\d{1,6})(?:[ \t]*\[(\w*)\])?[ \t*_:]*$", re.IGNORECASE | re.MULTILINE)
FIELD = re.compile(r"[ \t*_-]*(type|rationale?|rating)[ \t*_]*:(.*)", re.IGNORECASE)
NUMBER = re.compile(r"([1-5])(?:\.0)?(?: ?/ ?5| out of 5)?(?: ?\([^()\d]*\))?", re.IGNORECASE)
NOT_APPLICABLE = re.compile(r"n ?/ ?a|not applicable", re.IGNORECASE)
WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Rating:
    """The judge's rating of one text."""

    value: int | None
    """1 to 5; None if the judge states that the aspect does not apply."""
    types: str | None
    """Numbers of the named types, as written."""
    rationale: str
    """The judge's reasons."""


def parse_ratings(reply: str, texts: Sequence[str], code: str | None, *, not_applicable: bool) -> list[Rating]:
    """Ratings of all texts, in the order in which the judge received them.

    reply: the judge's text; nothing else is parsed. texts: the texts that it received, to detect quotations. code:
    required in its headings, or None. not_applicable: whether N/A is a rating.

    A text that imitates a block cannot rate itself. If the judge quotes it, the quotation lacks the code; with a prompt
    without a code, it makes one block too many or repeats the text's words. A quoted rating inside a block is a second
    rating, or is at a position where none belongs.
    Raises UnreadableError unless there is exactly one block with one rating for each text, in order.
    """
    answer = reply.replace("\r\n", "\n")
    headings = [match for match in HEADING.finditer(answer) if code is None or match[2] == code]
    numbers = [int(match[1]) for match in headings]
    if numbers != list(range(1, len(texts) + 1)):
        raise UnreadableError("no output blocks" if not numbers else "not one output block per text, in order")
    starts = [match.start() for match in headings]
    blocks = [answer[start:end] for start, end in zip(starts, [*starts[1:], len(answer)], strict=True)]
    texts_words = [_words(text) for text in texts]
    return [_rating(block, texts_words, not_applicable) for block in blocks]


def _rating(block: str, texts: Sequence[str], not_applicable: bool) -> Rating:
    lines = [line for line in block.split("\n") if line.strip()]
    matches = [FIELD.fullmatch(line) for line in lines]
    names = [match[1].casefold() if match else "" for match in matches]
    if names.count("rating") != 1:
        raise UnreadableError("several ratings in a block" if "rating" in names else "no rating in a block")
    at = names.index("rating")
    # Line 0 is the heading. Prose directly before the fields or after the rating: the rating may be a quotation.
    if not names[1] or not (names[at + 1 :] or ["end"])[0]:
        raise UnreadableError("text between the fields of a block")
    if any(_words("\n".join(lines[: at + 1])) in text for text in texts):
        raise UnreadableError("output block repeats a text")
    values = {name: match[2].strip(" \t*_") for name, match in zip(names, matches, strict=True) if match}
    rating_text = values["rating"].strip("[]<>. ")
    number = NUMBER.fullmatch(rating_text)
    if number is None and not (not_applicable and NOT_APPLICABLE.fullmatch(rating_text)):
        raise UnreadableError("rating is not on the scale")
    reasons = [match[2].strip() for name, match in zip(names, matches, strict=True) if match and "rational" in name]
    return Rating(int(number[1]) if number else None, values.get("type"), "\n".join(reasons))


def _words(text: str) -> str:
    """The words only, so that markup and line breaks cannot hide a quotation."""
    return " ".join(["", *WORD.findall(text.casefold()), ""])
