"""One question to an OpenAI-compatible server, retried until it is answered, refused or given up."""

from __future__ import annotations

import asyncio
import json
import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Self

import tenacity

from regretless.core.errors import ServerError
from regretless.core.secrets import HIDDEN, SHORTEST
from regretless.core.text_cleaning import one_line
from regretless.servers.limits import Budget, Pace, Spending
from regretless.servers.reply import NO_LOGPS, BadReplyError, Endpoint, Reply
from regretless.servers.server_settings import ServerConfig

if TYPE_CHECKING:
    import openai

TEMPORARY = {408, 409, 425, 429}
"""Status codes below 500 that may change on retry."""
HOPELESS = {401, 403, 404}
"""Status codes that every further request would also get: bad key, permission, address or model."""
WAIT = re.compile(r"\d{1,12}(\.\d*)?", re.ASCII)
"""A number of seconds, or of milliseconds, that a server asks to wait."""
BYTES_OF_ANY_REPLY, BYTES_PER_TOKEN, BYTES_PER_TOKEN_WITH_LOGPS = 1 << 20, 128, 4096
"""A reply of more bytes cannot be that of so many tokens: a log-probability comes with those of other tokens, ..."""
LISTED = 20
"""... at most so many, unless a request asks for more."""
TOO_LARGE = "reply is too large"
BYTES_IN_A_TOKEN = 64
"""A reported number of tokens below one for so many bytes is not believed: a token of a text has about four of them,
and one of spaces many."""
TEMPLATE_TOKENS = 1024
"""Tokens that a server's chat template may add to a request."""
OUT_OF_CREDIT = "insufficient_quota"
LONGEST_WAIT = 600.0
"""Seconds; if a server asks for a longer pause, the run stops."""
LONGEST_BACKOFF = 60.0


class Unanswered(Exception):
    """A question without an answer. `reason` is a fixed phrase, so that it can be counted; the message has details."""

    def __init__(self, reason: str, detail: str, *, is_refusal: bool) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.is_refusal = is_refusal
        """True if the server works but refuses this request; false if the last try failed."""


class _TemporaryError(Exception):
    """A failure that may be temporary, so the request is retried. `kind` is a fixed phrase, so that it can be counted;
    the message may have details."""

    def __init__(self, kind: str, *, may_be_billed: bool, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind
        self.may_be_billed = may_be_billed
        """True if an answer may have been generated and lost in transit."""


class Client:
    """Asks one server, within its rate limit and a budget; an async context manager.

    Retries happen here and not in the `openai` package, because each try must wait for the rate limit and count against
    the budget, and because unusable replies are retried as well.
    """

    def __init__(self, config: ServerConfig, budget: Budget) -> None:
        """Raises ConfigError when the API key is missing."""
        # Imported here: the import takes half a second, and most commands use no server.
        import openai

        self._errors = openai
        self.config, self.budget = config, budget
        self.trouble: Counter[str] = Counter()
        """Number of failures by kind, whether or not a retry succeeded."""
        self._pace = Pace(config.requests_per_minute)
        key = config.api_key()
        self._hide = _Hide(key)
        self._api = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=key or "none",
            max_retries=0,
            timeout=config.timeout_seconds,
            http_client=_bounded_client(),
            default_headers={"Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def ask(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        most_tokens: int,
        check: Callable[[Reply], None] = lambda reply: None,
    ) -> Reply:
        """The server's reply to a request.

        body: the request as sent. most_tokens: upper bound on the completion tokens. check: raises BadReplyError for a
        well-formed reply that cannot be used; it is retried like a malformed one.
        Raises Unanswered if this request is refused or all its tries failed, ServerError if further requests are
        pointless, BudgetError if the budget does not allow it.
        """
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TemporaryError),
            stop=tenacity.stop_after_attempt(self.config.max_tries),
            wait=tenacity.wait_exponential_jitter(
                multiplier=self.config.retry_seconds, max=LONGEST_BACKOFF, jitter=self.config.retry_seconds
            ),
            reraise=True,
        )
        asked = max(body.get("top_logprobs") or 0, int(body.get("logprobs") or 0))
        per_token, read = (
            BYTES_PER_TOKEN_WITH_LOGPS * math.ceil(asked / LISTED) if asked else BYTES_PER_TOKEN,
            _most_tokens_read(body),
        )
        _most_bytes.set(BYTES_OF_ANY_REPLY + BYTES_PER_TOKEN * read + most_tokens * per_token)
        try:
            return await retrying(self._try, endpoint, body, read + most_tokens, check)
        except _TemporaryError as error:
            detail = f"{self.config.max_tries} tries; the last one: {error}"
            reason = NO_LOGPS if error.kind == NO_LOGPS else "no reply"
            raise Unanswered(reason, detail, is_refusal=False) from None

    async def _try(
        self, endpoint: Endpoint, body: Mapping[str, Any], most: int, check: Callable[[Reply], None]
    ) -> Reply:
        await self.budget.reserve(most)
        used = Spending(charged_tokens=most)
        try:
            await self._pace.turn()
            reply = await self._send(endpoint, body)
            if reply.usage is not None and _is_plausible(reply, body, most):
                read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
                used = Spending(0, read, written, charged_tokens=read + written)
            check(reply)
            return reply
        except BadReplyError as error:
            self.trouble[error.kind] += 1
            raise _TemporaryError(error.kind, may_be_billed=True, detail=str(error)) from None
        except _TemporaryError as error:
            self.trouble[error.kind] += 1
            used = Spending(charged_tokens=most if error.may_be_billed else 0)
            raise
        except (Unanswered, ServerError):
            used = Spending()
            raise
        finally:
            await self.budget.settle(most, used)

    async def _send(self, endpoint: Endpoint, body: Mapping[str, Any]) -> Reply:
        """Send one request. Raises _TemporaryError, BadReplyError, Unanswered or ServerError."""
        api = self._api
        create: Any = (api.chat.completions if endpoint == "chat" else api.completions).with_raw_response.create
        named = ("model", "messages" if endpoint == "chat" else "prompt")
        rest = {name: value for name, value in body.items() if name not in named}
        try:
            async with asyncio.timeout(self.config.timeout_seconds):
                raw = await create(**{name: body[name] for name in named}, extra_body=rest)
        # `from None` throughout: the original errors quote the server's message, which may contain the key.
        except (TimeoutError, self._errors.APITimeoutError):
            raise _TemporaryError("timed out", may_be_billed=True) from None
        except self._errors.APIStatusError as error:
            raise self._as_exception(error) from None
        except self._errors.APIConnectionError as error:
            if isinstance(error.__cause__, BadReplyError):  # some versions of the package wrap all exceptions
                raise error.__cause__ from None
            never_sent = type(error.__cause__).__name__ == "ConnectError"
            raise _TemporaryError("connection failed or dropped", may_be_billed=not never_sent) from None
        text = self._hide(raw.content.decode("utf-8-sig", errors="replace"))
        try:
            return Reply(text, endpoint, body)
        except BadReplyError as error:
            if "json" in (kind := raw.headers.get("content-type", "none")):
                raise
            raise BadReplyError(error.kind, f"content type {kind}, expected application/json: {error}") from None

    def _as_exception(self, error: openai.APIStatusError) -> Exception:
        """The exception for a status code, depending on what it implies for this request and all others."""
        code, wait = error.status_code, asked_wait(error.response.headers)
        message = textwrap.shorten(one_line(self._hide(str(error))), 300)
        if code in HOPELESS or error.code == OUT_OF_CREDIT:
            return ServerError(f"{self.label} rejects every request: {message}")
        if 300 <= code < 400:
            target = textwrap.shorten(one_line(self._hide(error.response.headers.get("location", "elsewhere"))), 300)
            return ServerError(
                f"{self.label} answers with HTTP {code}, a redirect to {target}; prompts and key are sent only to "
                "base_url: set base_url to the new address if it is right"
            )
        if code not in TEMPORARY and code < 500:
            return Unanswered(f"refused with HTTP {code}", message, is_refusal=True)
        if wait > LONGEST_WAIT:
            return ServerError(f"{self.label} asks to wait {wait:.0f} seconds: {message}; run again after that")
        if wait > 0:
            self._pace.pause(wait)
        return _TemporaryError(f"HTTP {code}", may_be_billed=False)

    @property
    def label(self) -> str:
        """Host and port of the server, for messages."""
        url = self._api.base_url
        return f"server {url.host}" + (f":{url.port}" if url.port else "")


class _Hide:
    """Removes the API key from texts: some servers quote it in their error messages."""

    def __init__(self, key: str | None) -> None:
        self._forms = {key, json.dumps(key)[1:-1]} if key and len(key) >= SHORTEST else set()

    def __call__(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return text


_most_bytes: ContextVar[int] = ContextVar("most_bytes")


def _bounded_client() -> Any:
    """A client of the openai package whose replies end with an error beyond `_most_bytes`, and compressed ones at once.

    What is not compressed cannot become many times as large.
    """
    import openai

    class Bounded(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            response: Any = await super().send(request, **(options | {"stream": True}))
            blocks: list[bytes] = []
            try:
                if (coding := response.headers.get("content-encoding", "identity")) != "identity":
                    raise BadReplyError(TOO_LARGE, f"it is compressed, as {coding:.40}, and may be of any size")
                left = _most_bytes.get()
                async for block in response.aiter_raw():
                    blocks.append(block)
                    left -= len(block)
                    if left < 0:
                        raise BadReplyError(TOO_LARGE, f"it has more than {_most_bytes.get()} bytes")
            finally:
                await response.aclose()
            content = b"".join(blocks)
            return type(response)(response.status_code, headers=response.headers, content=content, request=request)

    # A redirect would send the prompts to any address that a server names.
    return Bounded(follow_redirects=False)


def _is_plausible(reply: Reply, body: Mapping[str, Any], most: int) -> bool:
    """False for a reported usage that the texts of request and reply contradict: it may have cost anything up to the
    most."""
    assert reply.usage is not None
    prompt = body.get("prompt", [message.get("content") for message in body.get("messages", ())])
    fewest = len(prompt) if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt) else None
    if fewest is None:
        fewest = -(-len(json.dumps(prompt, ensure_ascii=False).encode()) // BYTES_IN_A_TOKEN)
    answer = reply.content + reply.thoughts
    tokens = reply.choice.ids or reply.choice.strings or ()
    fewest_written = max(len(tokens), -(-len(answer.encode()) // BYTES_IN_A_TOKEN))
    read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return (
        fewest <= read <= _most_tokens_read(body) + TEMPLATE_TOKENS
        and fewest_written <= written <= max(most, len(answer.encode())) + TEMPLATE_TOKENS
    )


def _most_tokens_read(body: Mapping[str, Any]) -> int:
    """Upper bound on the prompt tokens of a request: a tokenizer never makes more tokens than there are bytes."""
    return len(json.dumps(body, ensure_ascii=False).encode())


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 if it does not ask."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        if WAIT.fullmatch(asked := headers.get(name, "").strip()):
            return float(asked) / unit
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
        # Without a zone, it is GMT, as all of HTTP's dates.
        return max(0.0, (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
