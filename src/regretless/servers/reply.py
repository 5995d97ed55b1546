"""What a server's reply says, read once and typed: nothing else of a reply is ever looked at."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticUseDefault

from regretless.core.text_gate import clean_text, one_line
from regretless.data.schema import POSITIVE_TOLERANCE, Id, Logp, logps_problem

Endpoint = Literal["chat", "completions"]
MOST_TOKENS = 10_000_000
"""Tokens that one request can read or write: longer than any model's context. A server that reports more is not
believed."""
LONGEST_NUMBER = 20
"""Digits of the longest integer that a reply may need."""
LONGEST_REASON = 64
ID_PREFIX = "token_id:"
"""Before an id that stands in the place of a token's text."""
NO_COMPLETION, NO_LOGPS = "reply is not a completion", "reply has no log-probabilities"
UNREAD_WITH_IDS = ("logprobs",)
UNREAD = (*UNREAD_WITH_IDS, "token_ids", "prompt_token_ids")


class BadReplyError(Exception):
    """A reply that cannot be used. `kind` is a fixed phrase, countable; the message says where and why."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(textwrap.shorten(one_line(detail), 300))
        self.kind = kind


def _cleaned(value: Any) -> Any:
    return clean_text(value) if isinstance(value, str) else value


def _believed(value: Any, read: Any) -> Any:
    try:
        return read(value)
    except ValidationError:
        raise PydanticUseDefault from None


Words = Annotated[str, BeforeValidator(_cleaned)]
"""Text that any file can hold."""
Reason = Annotated[str, Field(max_length=LONGEST_REASON), BeforeValidator(_cleaned)]
TokenCount = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
TopLogp = Annotated[float, Field(le=POSITIVE_TOLERANCE)]
"""Nats, of a token that might have been written: minus infinity for an impossible one. NaN exceeds
any bound here."""


class _Part(BaseModel):
    """A part of a reply: the fields that are read, of the type they are read as. All others are left alone."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), hide_input_in_errors=True
    )


class ReplyMessage(_Part):
    """A chat message."""

    content: Words | None = None
    reasoning_content: Words | None = None
    reasoning: Words | None = None


class TopToken(_Part):
    """One of the likeliest tokens at a place."""

    token: Words
    logprob: TopLogp


class Token(_Part):
    """A token that was written; `logprob` in nats."""

    token: Words
    logprob: Logp
    id: Id | None = None
    top_logprobs: list[TopToken] | None = None


class Logprobs(_Part):
    """Log-probabilities: `content` of a chat, the other lists of a completion."""

    content: list[Token] | None = None
    tokens: list[Words] | None = None
    token_logprobs: list[Logp] | None = None
    top_logprobs: list[dict[Words, TopLogp] | None] | None = None


class ReplyChoice(_Part):
    """An answer."""

    message: ReplyMessage | None = None
    text: Words | None = None
    finish_reason: Reason | None = None
    logprobs: Logprobs | None = None
    token_ids: list[Id] | None = None
    prompt_token_ids: list[Id] | None = None

    @property
    def strings(self) -> list[str] | None:
        """The answer's tokens as text."""
        if self.logprobs is None:
            return None
        entries = self.logprobs.content
        return self.logprobs.tokens if entries is None else [entry.token for entry in entries]

    @property
    def logps(self) -> list[float] | None:
        """Nats per token of the answer. Rounding can put a certain token a hair above 0; here it is not."""
        if self.logprobs is None:
            return None
        entries = self.logprobs.content
        given = self.logprobs.token_logprobs if entries is None else [entry.logprob for entry in entries]
        return None if given is None else [min(value, 0.0) for value in given]

    @property
    def ids(self) -> list[int] | None:
        """The answer's token ids, in any of the places where servers put them."""
        if self.token_ids is not None:
            return self.token_ids
        entries = None if self.logprobs is None else self.logprobs.content
        found = [entry.id for entry in entries or () if entry.id is not None]
        if entries and len(found) == len(entries):
            return found
        strings = self.strings
        if strings and all(string.startswith(ID_PREFIX) for string in strings):
            written = [string.removeprefix(ID_PREFIX) for string in strings]
            if all(number.isdecimal() and len(number) < LONGEST_NUMBER for number in written):
                return list(map(int, written))
        return None

    @property
    def likeliest(self) -> list[TopToken]:
        """The likeliest first tokens of the answer, highest first; empty where it does not tell."""
        logprobs = self.logprobs or Logprobs()
        first: list[TopToken] = []
        if logprobs.content:
            first = logprobs.content[0].top_logprobs or []
        elif logprobs.top_logprobs:
            first = [TopToken(token=token, logprob=value) for token, value in (logprobs.top_logprobs[0] or {}).items()]
        return sorted(first, key=lambda top: -top.logprob)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problem = logps_problem("logprobs", self.strings if self.ids is None else self.ids, self.logps)
        if problem is not None:
            raise ValueError(problem)
        return self


class Usage(_Part):
    """Tokens read and written, reasoning included."""

    prompt_tokens: TokenCount
    completion_tokens: TokenCount


class _Body(_Part):
    choices: Annotated[list[ReplyChoice], Field(min_length=1)]
    usage: Annotated[Usage | None, WrapValidator(_believed)] = None
    """A hint: one that makes no sense is taken for none."""
    prompt_token_ids: list[Id] | None = None


class Reply:
    """What a server answered to a request."""

    def __init__(self, text: str, endpoint: Endpoint, request: Mapping[str, Any]) -> None:
        """Read a reply. text: the JSON that the server sent. request: what was sent to it; of what the server says
        about single tokens, only what the request asks for is read.

        Raises BadReplyError for anything but a reply whose first answer is well-formed in all that is read.
        """
        self.text = text
        asks_for_logps = bool(request.get("logprobs"))
        unread = () if asks_for_logps else UNREAD_WITH_IDS if request.get("return_token_ids") else UNREAD
        body = _parsed(text, unread)
        self.choice = body.choices[0]
        """The first answer."""
        self.usage = body.usage
        """What the request has cost, if the server reports something that can be believed."""
        self.prompt_token_ids = self.choice.prompt_token_ids or body.prompt_token_ids
        """What the model read, if the server says so."""
        answer = ("message", self.choice.message) if endpoint == "chat" else ("text", self.choice.text)
        if answer[1] is None:
            raise BadReplyError(NO_COMPLETION, f"choices.0.{answer[0]}: required, not given")
        # An answer that a filter has ended need not have any.
        if asks_for_logps and self.choice.logps is None and self.finish_reason != "content_filter":
            raise BadReplyError(NO_LOGPS, "the request asks for log-probabilities, the reply has none")

    @property
    def content(self) -> str:
        """Text of the answer; empty when there is none."""
        choice = self.choice
        return (choice.text if choice.message is None else choice.message.content) or ""

    @property
    def thoughts(self) -> str:
        """What a reasoning model thought, where the server keeps it apart from the answer; empty where it does not."""
        message = self.choice.message or ReplyMessage()
        return message.reasoning_content or message.reasoning or ""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended: stop, length, content_filter and others."""
        return self.choice.finish_reason


def _parsed(text: str, unread: Collection[str]) -> _Body:
    """The reply without the fields that are not read. Raises BadReplyError."""
    try:
        # A number that is too long for anything here is none; Python itself raises at one of 4300 digits.
        data = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST_NUMBER else math.nan)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(NO_COMPLETION, f"not valid JSON: {error}") from None
    if isinstance(data, dict):
        data = _without(data, unread)
        if isinstance(data.get("choices"), list):
            # One answer is asked for, and what else is there is not read.
            data["choices"] = [_without(choice, unread) for choice in data["choices"][:1]]
    try:
        return _Body.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(map(str, found["loc"])) or "reply"
        message = found["msg"].removeprefix("Value error, ")
        got = "" if found["type"] in ("missing", "value_error") else f", got {found['input']!r:.40}"
        raise BadReplyError(NO_COMPLETION, f"{place}: {message}{got}") from None


def _without(part: Any, unread: Collection[str]) -> Any:
    return {name: value for name, value in part.items() if name not in unread} if isinstance(part, dict) else part
