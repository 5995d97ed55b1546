"""A server's reply, parsed once into typed fields; all other fields are ignored."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
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

from regretless.core.text_cleaning import clean_text, one_line
from regretless.data.columns import POSITIVE_TOLERANCE, Id, Logp
from regretless.data.schema import logps_problem

Endpoint = Literal["chat", "completions"]
MOST_TOKENS = 10_000_000
"""Upper bound on the tokens of one request, longer than any model's context. Larger reported numbers are
discarded."""
UNREPORTED = -9999.0
"""What OpenAI writes for the log-probability of a token that is not among the 20 most likely ones: it is unknown."""
LONGEST_NUMBER = 20
"""Most digits of an integer in a reply."""
LONGEST_REASON = 64
BEGINNING = 60
"""Characters of a reply that a message shows."""
ID_PREFIX = "token_id:"
"""Prefix of an id that replaces the text of a token."""
NO_COMPLETION, NO_LOGPS = "reply is not a completion", "reply has no log-probabilities"
ERROR_REPLY = "reply is an error message"
AMBIGUOUS_END = "stop"
"""What most call the end that the model itself chose, and the end at a stop string as well."""
STOP_STRING = "stop_sequence"
"""What others call the end at a stop string."""
NATURAL_ENDS = frozenset({AMBIGUOUS_END, "eos", "eos_token", "end_turn", STOP_STRING})
"""What servers call the end of an answer that is complete."""
CUTS = frozenset({"length", "max_tokens", "content_filter"})
"""What servers call an end that came from outside."""
VOCABULARY_MARKS = ("Ġ", "▁")
"""What vocabularies write for a space, the first one as part of an alphabet of its own for all bytes."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPECIAL_TOKEN = re.compile(rb"<[^<>\s]+>|\[[A-Z_/]+\]")
"""How vocabularies write tokens that are no text: <|im_end|>, </s>, [SEP]."""
UNFIXED = bytes(range(33)) + b"\x7f"
"""White space and control characters: servers strip and change them."""
NOT_ASCII = bytes(range(128, 256))
REPLACEMENT_CHARACTER = "\ufffd".encode()
"""What servers write for a part of a character."""
UNREAD_WITH_IDS = ("logprobs",)
UNREAD = (*UNREAD_WITH_IDS, "token_ids", "prompt_token_ids")


def id_in(token: str) -> int | None:
    """The id that a server has written in the place of a token's text, if it has."""
    number = token.removeprefix(ID_PREFIX)
    return int(number) if number != token and number.isdecimal() and len(number) < LONGEST_NUMBER else None


class BadReplyError(Exception):
    """A reply that cannot be used. `kind` is a fixed phrase, so that it can be counted; the message has the details."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(textwrap.shorten(one_line(detail), 300))
        self.kind = kind


def _cleaned(value: Any) -> Any:
    return clean_text(value) if isinstance(value, str) else value


def _plausible(value: Any, read: Any) -> Any:
    try:
        return read(value)
    except ValidationError:
        raise PydanticUseDefault from None


Words = Annotated[str, BeforeValidator(_cleaned)]
"""Text that any file can store."""
Reason = Annotated[str, Field(max_length=LONGEST_REASON), BeforeValidator(_cleaned)]
TokenCount = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
StopReason = Annotated[int | str | None, WrapValidator(_plausible)]
"""The stop string, or the id of the end token, that ended the answer; null: the model's end token."""
TopLogp = Annotated[float, Field(le=POSITIVE_TOLERANCE)]
"""Nats, for a token that could have been generated: minus infinity for an impossible one. NaN exceeds any bound
here."""


class _ReplyPart(BaseModel):
    """A part of a reply: the fields that are read, with strict types. Other fields are ignored."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), hide_input_in_errors=True
    )


class ReplyMessage(_ReplyPart):
    """A chat message."""

    content: Words | None = None
    reasoning_content: Words | None = None
    reasoning: Words | None = None


class TopToken(_ReplyPart):
    """One of the most likely tokens at a position."""

    token: Words
    logprob: TopLogp


class Token(_ReplyPart):
    """A generated token; `logprob` in nats."""

    token: Words
    bytes: Annotated[list[Annotated[int, Field(ge=0, le=255)]] | None, WrapValidator(_plausible)] = None
    """The token's bytes; a token may be a part of a character. Implausible ones count as missing."""
    logprob: Logp
    id: Id | None = None
    top_logprobs: list[TopToken] | None = None


class Logprobs(_ReplyPart):
    """Log-probabilities: `content` in chat completions, the other lists in text completions."""

    content: list[Token] | None = None
    tokens: list[Words] | None = None
    token_logprobs: list[Logp] | None = None
    top_logprobs: list[dict[Words, TopLogp] | None] | None = None


class ReplyChoice(_ReplyPart):
    """An answer."""

    message: ReplyMessage | None = None
    text: Words | None = None
    finish_reason: Reason | None = None
    stop_reason: StopReason = None
    matched_stop: StopReason = None
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
    def written(self) -> list[bytes] | None:
        """The answer's tokens as the bytes that they stand for; None if the reply has no such strings."""
        strings = self.strings
        if strings is None or any(string.startswith(ID_PREFIX) for string in strings):
            return None
        entries = None if self.logprobs is None else self.logprobs.content
        of_entries = [None] * len(strings) if entries is None else [entry.bytes for entry in entries]
        return [
            _bytes_of(string) if codes is None else bytes(codes)
            for string, codes in zip(strings, of_entries, strict=True)
        ]

    @property
    def logps(self) -> list[float] | None:
        """Log-probability of each token of the answer (nats). Values slightly above 0 from rounding are set to 0."""
        if self.logprobs is None:
            return None
        entries = self.logprobs.content
        values = self.logprobs.token_logprobs if entries is None else [entry.logprob for entry in entries]
        return None if values is None else [min(value, 0.0) for value in values]

    @property
    def ids(self) -> list[int] | None:
        """The answer's token ids, from any of the fields in which servers return them."""
        if self.token_ids is not None:
            return self.token_ids
        entries = None if self.logprobs is None else self.logprobs.content
        ids = [entry.id for entry in entries or () if entry.id is not None]
        if entries and len(ids) == len(entries):
            return ids
        ids = [number for string in self.strings or () if (number := id_in(string)) is not None]
        return ids if ids and len(ids) == len(self.strings or ()) else None

    @property
    def likeliest(self) -> list[TopToken]:
        """The most likely first tokens of the answer, highest first; empty if the reply has none."""
        return next(iter(self.listed), [])

    @property
    def listed(self) -> list[list[TopToken]]:
        """The most likely tokens in the place of each token, highest first; empty if the reply has none."""
        logprobs = self.logprobs or Logprobs()
        if logprobs.content:
            listed = [token.top_logprobs or [] for token in logprobs.content]
        else:
            entries = [(entry or {}).items() for entry in logprobs.top_logprobs or ()]
            listed = [[TopToken(token=token, logprob=value) for token, value in entry] for entry in entries]
        return [sorted(tops, key=lambda top: -top.logprob) for tops in listed]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problem = logps_problem("logprobs", self.strings if self.ids is None else self.ids, self.logps)
        if problem is not None:
            raise ValueError(problem)
        return self


class Usage(_ReplyPart):
    """Prompt and completion tokens, reasoning included."""

    prompt_tokens: TokenCount
    completion_tokens: TokenCount


class _Body(_ReplyPart):
    choices: Annotated[list[ReplyChoice], Field(min_length=1)]
    usage: Annotated[Usage | None, WrapValidator(_plausible)] = None
    """Optional: an implausible value counts as missing."""
    prompt_token_ids: list[Id] | None = None


class Reply:
    """What a server answered to a request."""

    def __init__(self, text: str, endpoint: Endpoint, request: Mapping[str, Any]) -> None:
        """Parse a reply. text: the JSON from the server. request: what was sent; log-probabilities and token ids are
        read only if the request asks for them.

        Raises BadReplyError unless the reply's first answer is well-formed in every field that is read.
        """
        self.text = text
        asks_for_logps = bool(request.get("logprobs"))
        unread = () if asks_for_logps else UNREAD_WITH_IDS if request.get("return_token_ids") else UNREAD
        body = _parsed(text, unread)
        self.choice = body.choices[0]
        """The first answer."""
        self.usage = body.usage
        """Usage of the request, if the server reports a plausible one."""
        self.prompt_token_ids = self.choice.prompt_token_ids or body.prompt_token_ids
        """The prompt's token ids, if the server returns them."""
        answer = ("message", self.choice.message) if endpoint == "chat" else ("text", self.choice.text)
        if answer[1] is None:
            raise BadReplyError(NO_COMPLETION, f"choices.0.{answer[0]}: required, not given")
        # An answer that a content filter stopped may lack it.
        if asks_for_logps and self.choice.logps is None and self.finish_reason != "content_filter":
            raise BadReplyError(NO_LOGPS, "the request asks for log-probabilities, the reply has none")

    @property
    def content(self) -> str:
        """Text of the answer; empty if there is none."""
        choice = self.choice
        return (choice.text if choice.message is None else choice.message.content) or ""

    @property
    def text_problem(self) -> str | None:
        """How the tokens of the log-probabilities differ from the text (`problem_between`)."""
        # vLLM's text of broken characters is not that of its tokens, and its ids say what was written.
        has_ids = self.choice.ids is not None and self.content
        return None if has_ids else self.problem_between(self.choice.written, self.content)

    def problem_between(self, tokens: Sequence[bytes] | None, text: str) -> str | None:
        """How tokens differ from a text; None if they do not, or cannot be compared.

        Not compared are white space, which servers strip, and characters beyond ASCII where some are incomplete. Tokens
        that are no text may be missing in it: special ones, and the last one, if the model ended there.
        """
        if tokens is None:
            return None
        joined, written = b"".join(tokens), text.encode()
        words = b"".join(token for token in tokens if SPECIAL_TOKEN.fullmatch(token) is None)
        if any(mark.encode() in words and mark not in text for mark in VOCABULARY_MARKS):
            return None
        # A token of a part of a character is written as U+FFFD, as nothing, or as its bytes.
        is_whole = b"" not in tokens and REPLACEMENT_CHARACTER not in joined + written and _is_text(joined)
        ignored = UNFIXED if is_whole else UNFIXED + NOT_ASCII
        rest = written.translate(None, ignored)
        offset = 0
        for number, token in enumerate(tokens):
            piece = token.translate(None, ignored)
            is_end = number == len(tokens) - 1 and self.has_ended
            if rest.startswith(piece, offset):
                offset += len(piece)
            elif not is_end and SPECIAL_TOKEN.fullmatch(token.strip()) is None:
                return f"token {number} is {_shown(token)}, and the text has {_shown(rest[offset:])} there"
        return f"no token stands for the end of the text, {_shown(rest[offset:])}" if offset < len(rest) else None

    @property
    def has_ended(self) -> bool:
        """True if the answer is complete: the model itself ended it, or a stop string did."""
        return self.finish_reason in NATURAL_ENDS

    def ended_at(self, strings: Collection[str]) -> bool | None:
        """Whether the server says that one of these stop strings ended the answer; None if it does not say."""
        if self.finish_reason != AMBIGUOUS_END:
            return self.finish_reason == STOP_STRING
        said = self.choice.model_fields_set & {"stop_reason", "matched_stop"}
        return any(getattr(self.choice, name) in strings for name in said) if said else None

    @property
    def thoughts(self) -> str:
        """Thoughts of a reasoning model, if the server returns them separately from the answer; else empty."""
        message = self.choice.message or ReplyMessage()
        return message.reasoning_content or message.reasoning or ""

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended: stop, length, content_filter and others."""
        return self.choice.finish_reason


def _parsed(text: str, unread: Collection[str]) -> _Body:
    """The reply without the fields that are ignored. Raises BadReplyError."""
    try:
        # A number with too many digits becomes NaN; Python itself raises at 4300 digits.
        data = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < LONGEST_NUMBER else math.nan)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(NO_COMPLETION, f"not valid JSON: {error}; it begins with {text[:BEGINNING]!r}") from None
    if isinstance(data, dict):
        if data.get("error") and not data.get("choices"):
            # Some servers report a failure with the status code of success.
            said = data["error"]
            message = said.get("message") if isinstance(said, dict) else None
            raise BadReplyError(ERROR_REPLY, clean_text(str(message or said)))
        data = _without(data, unread)
        if isinstance(data.get("choices"), list):
            # One answer is requested, and any other is ignored.
            data["choices"] = [_without(choice, unread) for choice in data["choices"][:1]]
    try:
        return _Body.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or "reply"
        message = problem["msg"].removeprefix("Value error, ")
        got = "" if problem["type"] in ("missing", "value_error") else f", got {problem['input']!r:.40}"
        raise BadReplyError(NO_COMPLETION, f"{field}: {message}{got}") from None


def _without(part: Any, unread: Collection[str]) -> Any:
    return {name: value for name, value in part.items() if name not in unread} if isinstance(part, dict) else part


def _bytes_of(string: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(string)
    return string.encode() if byte is None else bytes.fromhex(byte[1])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(data: bytes) -> str:
    return repr(textwrap.shorten(data.decode(errors="replace"), 40, placeholder="…")) if data else "nothing"
