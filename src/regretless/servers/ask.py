"""Asks one server many questions concurrently. Every reply is cached before it is parsed.

What can be read is asked once. What cannot is asked again in a later run, once in each.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from regretless.core.errors import DataError, RegretlessError, ServerError
from regretless.core.files import fingerprint
from regretless.core.progress import Advance, bar
from regretless.servers.limits import Budget, Spending
from regretless.servers.reply import NO_LOGPS, BadReplyError, Endpoint, Reply
from regretless.servers.reply_store import CLAIM_SECONDS, ReplyStore
from regretless.servers.server_settings import ServerConfig
from regretless.servers.transport import Client, Unanswered

T = TypeVar("T")
MOST_FAILURES = 10
"""Consecutive questions without a usable reply after which the server counts as down."""
MOST_REFUSALS = 100
"""Refusals without an answer after which the server may refuse everything: they are quick and free, and the longest
prompts, which are refused together, may come first."""


SHOWN = 300
"""Characters of an unreadable reply that a message shows."""
SECONDS_BETWEEN_LOOKS = 0.1
"""Wait before another look at a question that somebody else is asking."""


class UnreadableError(Exception):
    """A reply that lacks what was asked for. The message is a fixed phrase, so that it can be counted."""


@dataclass(frozen=True)
class Question(Generic[T]):
    """A question, and how to parse the reply."""

    label: str
    """Short description, for people."""
    body: Callable[[int, str], Mapping[str, Any]]
    """The request for an attempt (1, 2, …) and a code that cannot be guessed without seeing the request. Equal
    arguments give equal requests."""
    read: Callable[[Reply, int, str], T]
    """Parses the reply to the request of this attempt and code. Raises UnreadableError."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """Outcome of a question."""

    value: T | None
    problem: str | None = None
    """Why there is no value, as a fixed phrase."""
    key: str | None = None
    """Key of the parsed reply in the reply cache."""
    attempts: int = 0
    """Number of replies parsed."""


@dataclass
class Answers(Generic[T]):
    """Outcomes of many questions, in their order."""

    answers: list[Answer[T]]
    stopped: RegretlessError | None = None
    """Why not everything was asked: the budget is spent, or the server is down or refuses everything."""
    reused: int = 0
    """Number of replies from the cache."""
    elsewhere: Counter[str] = field(default_factory=Counter)
    """Number of those that another address than the present one gave, by address."""
    unreadable: Counter[str] = field(default_factory=Counter)
    """Number of unreadable replies, by problem; each led to another attempt or to an unknown result."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first unreadable reply and its question, by problem."""
    trouble: Counter[str] = field(default_factory=Counter)
    """Number of repeated requests, by reason."""
    refusals: dict[str, str] = field(default_factory=dict)
    """The first refused question and what the server said, by reason."""
    spent: Spending = field(default_factory=Spending)
    """Total spending on this model in the reply cache."""


NOT_ASKED = "not asked"


def key_of(question: Question[Any], attempt: int, endpoint: Endpoint = "chat") -> str:
    """Key in the reply cache of the reply to a question's request of this attempt.

    It has no address: the same model is often served elsewhere the next time. `Answers.elsewhere` counts such replies.
    """
    return fingerprint([endpoint, attempt, question.body(attempt, "")])


def ask_all(
    questions: Sequence[Question[T]],
    *,
    config: ServerConfig,
    model: str,
    most_tokens: int,
    attempts: int,
    replies: Path,
    description: str,
    endpoint: Endpoint = "chat",
) -> Answers[T]:
    """Ask a server all questions, at most `config.concurrency` at a time, and parse its replies.

    model: name under which spending is counted. most_tokens: upper bound on the tokens of a reply. attempts: how often
    a question with unreadable replies is asked in total. replies: the reply cache; cached questions are not asked
    again, and an interruption loses only the requests in flight.
    A server that is down or refuses everything, a rejected key or a spent budget stops the asking; answers so far
    remain (`Answers.stopped`).
    Raises ConfigError if the API key is missing, DataError if the cache is some other file.
    """
    with ReplyStore(replies) as store:
        spent = store.spent(model)
        budget = Budget(config, spent, store.ledger(model), counted=replace(spent))
        result = Answers[T]([Answer(None, NOT_ASKED)] * len(questions), spent=spent)
        with bar(description, total=len(questions), note=lambda: describe(config, spent)) as advance:
            asker = _Asker(questions, config, endpoint, most_tokens, attempts, store, result, advance)
            asyncio.run(asker.run(budget))
    return result


def describe(config: ServerConfig, spent: Spending) -> str:
    """Requests, tokens and cost so far, as text."""
    cost, most = spent.cost(config), spent.most_cost(config)
    tokens = (spent.prompt_tokens + spent.completion_tokens) / 1000
    unreported = f" and at most {spent.unreported_tokens / 1000:.1f}k unreported" if spent.unreported_tokens else ""
    text = f"{spent.requests} requests, {tokens:.1f}k tokens{unreported}"
    if most is None:
        return text
    if cost is None:
        return f"{text}, at most ${most:.2f}"
    return f"{text}, ${cost:.2f}" + (f" to ${most:.2f}" if spent.unreported_tokens else "")


@dataclass
class _Asker(Generic[T]):
    questions: Sequence[Question[T]]
    config: ServerConfig
    endpoint: Endpoint
    most_tokens: int
    attempts: int
    store: ReplyStore
    result: Answers[T]
    advance: Advance
    failures: int = 0
    """Consecutive questions whose tries all failed."""
    refusals: int = 0
    """Questions that the server refused."""
    has_answered: bool = False
    """True once a reply could be used."""
    is_in_doubt: bool = False
    """True if the first questions were refused: no more are taken until those in flight are answered or refused."""

    async def run(self, budget: Budget) -> None:
        async with Client(self.config, budget) as client:
            waiting = iter(enumerate(self.questions))
            renewing = asyncio.create_task(self._renew_claims())
            try:
                await self._ask(client, waiting)
                if self.is_in_doubt:
                    await self._ask_rest(client, list(waiting))
            finally:
                renewing.cancel()
            self.result.trouble = client.trouble

    async def _renew_claims(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 4)
            self.store.renew()

    async def _ask_rest(self, client: Client, rest: list[tuple[int, Question[T]]]) -> None:
        """Ask what is left after many refusals; if none is answered, first questions from all over it, then no more."""
        self.is_in_doubt = False
        if rest and not self.has_answered:
            every = slice(None, None, -math.ceil(len(rest) / MOST_REFUSALS))
            spread = rest[every]
            del rest[every]
            await self._ask(client, iter(spread))
            if not self.has_answered and self.result.stopped is None:
                self.result.stopped = DataError(
                    f"{client.label} answered no question and refused {self.refusals}, the first ones and others from "
                    "all over the rest"
                )
        await self._ask(client, iter(rest))

    async def _ask(self, client: Client, waiting: Iterator[tuple[int, Question[T]]]) -> None:
        if self.result.stopped is not None:
            return
        # A fixed number of workers: one task for each of many thousand questions would hold all of them in memory.
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self.config.concurrency, len(self.questions))):
                workers.create_task(self._work(client, waiting))

    async def _work(self, client: Client, waiting: Iterator[tuple[int, Question[T]]]) -> None:
        for number, question in waiting:
            try:
                self.result.answers[number] = await self._answer(client, question)
            except RegretlessError as error:
                # Requests in flight finish: they are already paid for.
                self.result.stopped = self.result.stopped or error
            if self.result.stopped is not None:
                return
            self.advance(1)
            if self.is_in_doubt:
                return

    async def _answer(self, client: Client, question: Question[T]) -> Answer[T]:
        problem, is_asked = "", False
        # The last attempt once more, where earlier runs made all of them: the next reply may be readable.
        for number, attempt in enumerate([*range(1, self.attempts + 1), self.attempts], 1):
            again = number > self.attempts
            if again and is_asked:
                break
            key = key_of(question, attempt, self.endpoint)
            code = self.store.code(key)
            try:
                body = question.body(attempt, code)
                reply, is_new = await self._reply(client, question, key, body, attempt, again=again)
                is_asked = is_asked or is_new
                return Answer(question.read(reply, attempt, code), None, key, attempt)
            except UnreadableError as error:
                problem = str(error)
                self.result.unreadable[problem] += 1
                self.result.examples.setdefault(problem, f"{question.label}: {reply.content[:SHOWN]!r}")
            except Unanswered as error:
                self._count_failure(client, question.label, error)
                return Answer(None, error.reason, None, attempt - 1)
        return Answer(None, problem, key, self.attempts)

    async def _reply(
        self,
        client: Client,
        question: Question[T],
        key: str,
        body: Mapping[str, Any],
        attempt: int,
        *,
        again: bool,
    ) -> tuple[Reply, bool]:
        """The reply to a request, and whether it was asked for now; `again`: a cached one is replaced."""
        cached = None if again else self._cached(key, body)
        if cached is None:
            # Another process with the same replies may be asking this, or this one, for an equal question.
            while not self.store.claim(key):
                if self.result.stopped is not None:
                    raise self.result.stopped
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                if again or (cached := self._cached(key, body)) is None:
                    reply = await client.ask(self.endpoint, body, self.most_tokens)
                    self.store.put(key, f"{question.label} attempt {attempt}", reply.text, self.config.named_address)
                    self.failures = 0
                    self.has_answered = True
                    return reply, True
            finally:
                self.store.release(key)
        self.result.reused += 1
        given_by = self.store.address(key)
        if given_by not in (None, self.config.named_address):
            self.result.elsewhere[str(given_by)] += 1
        self.has_answered = True
        assert cached is not None
        return cached, False

    def _cached(self, key: str, body: Mapping[str, Any]) -> Reply | None:
        """The cached reply of a key; None if there is none, or if it cannot be used and must be requested again."""
        text = self.store.get(key)
        try:
            return None if text is None else Reply(text, self.endpoint, body)
        except BadReplyError:
            return None

    def _count_failure(self, client: Client, label: str, error: Unanswered) -> None:
        """Raise ServerError if so many consecutive questions failed that the server is down, or if it seems to lack
        log-probabilities. Note if it has refused so many, and answered none, that it may refuse all."""
        if error.reason == NO_LOGPS and not self.has_answered:
            raise ServerError(
                f"{client.label} returns no log-probabilities, which the answers are read from; choose a model that "
                "supports them (OpenAI's reasoning models do not)"
            ) from None
        if error.is_refusal:
            self.result.refusals.setdefault(error.reason, f"{label}: {error}")
            self.failures = 0
            self.refusals += 1
            if self.refusals == MOST_REFUSALS and not self.has_answered:
                self.is_in_doubt = True
            return
        self.failures += 1
        if self.failures >= MOST_FAILURES:
            raise ServerError(
                f"{client.label} does not answer: {self.failures} questions in a row failed; {error}; "
                "check that it is running, and run again: replies so far are cached"
            ) from None
