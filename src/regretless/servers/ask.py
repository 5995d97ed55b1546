"""Many questions to one server: side by side, every reply kept before it is read, nothing asked twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from regretless.core.errors import RegretlessError, ServerError
from regretless.core.files import fingerprint
from regretless.core.terminal import bar
from regretless.servers.limits import Budget, Spending
from regretless.servers.reply import NO_LOGPS, BadReplyError, Endpoint, Reply
from regretless.servers.reply_store import ReplyStore
from regretless.servers.server_settings import ServerConfig
from regretless.servers.transport import Client, Unanswered

T = TypeVar("T")
MOST_FAILURES = 10
"""Questions in a row whose tries all failed, before the server counts as down."""


class UnreadableError(Exception):
    """A reply that does not say what was asked for. The message is a fixed phrase, countable."""


@dataclass(frozen=True)
class Question(Generic[T]):
    """Something to ask, and how to read the reply."""

    label: str
    """What it is about, for people."""
    body: Callable[[int, str], Mapping[str, Any]]
    """The request for an attempt (1, 2, …) and a code that nobody can guess who has not seen the request. Equal
    arguments give equal requests."""
    read: Callable[[Reply, int, str], T]
    """What a reply to the request for this attempt and code says. Raises UnreadableError."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What came of a question."""

    value: T | None
    problem: str | None = None
    """Why there is no value, as a fixed phrase."""
    key: str | None = None
    """Where the reply that was read lies in the file of kept replies."""
    attempts: int = 0
    """Replies read."""


@dataclass
class Answers(Generic[T]):
    """What came of many questions, in their order."""

    answers: list[Answer[T]]
    stopped: RegretlessError | None = None
    """Why not everything was asked: the budget is used up, or the server is down."""
    reused: int = 0
    """Replies that had been kept from before."""
    unreadable: Counter[str] = field(default_factory=Counter)
    """Replies that did not say what was asked for, by problem; each led to another attempt or to an unknown."""
    trouble: Counter[str] = field(default_factory=Counter)
    """Requests that were tried again, by reason."""
    spent: Spending = field(default_factory=Spending)
    """All that this model has cost in the same file of kept replies."""


NOT_ASKED = "not asked"


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
    """Ask a server all questions, `config.concurrency` at a time, and read its replies.

    model: names what the spending is counted for. most_tokens: the most that the server may write in a reply.
    attempts: how often a question whose reply cannot be read is asked in all. replies: the file of kept replies;
    what it holds is not asked again, and a kill loses no more than the requests under way.
    A server that is down, a refused key and a spent budget end the asking, not the answers: see `Answers.stopped`.
    Raises ConfigError when the API key is missing, DataError when the file of replies is something else.
    """
    with ReplyStore(replies) as store:
        spent = store.spent(model)
        budget = Budget(config, spent, lambda spending: store.spend(model, spending))
        result = Answers[T]([Answer(None, NOT_ASKED)] * len(questions), spent=spent)
        with bar(description, total=len(questions), note=lambda: describe(config, spent)) as advance:
            asker = _Asker(questions, config, endpoint, most_tokens, attempts, store, result, advance)
            asyncio.run(asker.run(budget))
    return result


def describe(config: ServerConfig, spent: Spending) -> str:
    """Requests, tokens and cost so far, for people."""
    cost = config.cost(spent.prompt_tokens, spent.completion_tokens)
    tokens = (spent.prompt_tokens + spent.completion_tokens) / 1000
    return f"{spent.requests} requests, {tokens:.1f}k tokens" + ("" if cost is None else f", ${cost:.2f}")


@dataclass
class _Asker(Generic[T]):
    questions: Sequence[Question[T]]
    config: ServerConfig
    endpoint: Endpoint
    most_tokens: int
    attempts: int
    store: ReplyStore
    result: Answers[T]
    advance: Callable[[int], None]
    failures: int = 0
    """Questions in a row whose tries all failed."""
    has_answered: bool = False
    """Whether any reply could be used."""

    async def run(self, budget: Budget) -> None:
        async with Client(self.config, budget) as client:
            waiting = iter(enumerate(self.questions))
            # Workers that take the next question: a task for each of many thousand questions would hold them all.
            async with asyncio.TaskGroup() as workers:
                for _ in range(min(self.config.concurrency, len(self.questions))):
                    workers.create_task(self._work(client, waiting))
            self.result.trouble = client.trouble

    async def _work(self, client: Client, waiting: Iterator[tuple[int, Question[T]]]) -> None:
        for number, question in waiting:
            try:
                self.result.answers[number] = await self._answer(client, question)
            except RegretlessError as error:
                # Requests under way are let finish: they are paid for.
                self.result.stopped = self.result.stopped or error
            if self.result.stopped is not None:
                return
            self.advance(1)

    async def _answer(self, client: Client, question: Question[T]) -> Answer[T]:
        problem = ""
        for attempt in range(1, self.attempts + 1):
            key = fingerprint([self.endpoint, attempt, question.body(attempt, "")])
            code = self.store.code(key)
            try:
                reply = await self._reply(client, question, key, question.body(attempt, code), attempt)
                return Answer(question.read(reply, attempt, code), None, key, attempt)
            except UnreadableError as error:
                problem = str(error)
                self.result.unreadable[problem] += 1
            except Unanswered as error:
                self._count_failure(client, error)
                return Answer(None, error.reason, None, attempt - 1)
        return Answer(None, problem, key, self.attempts)

    async def _reply(
        self, client: Client, question: Question[T], key: str, body: Mapping[str, Any], attempt: int
    ) -> Reply:
        kept = self._kept(key, body)
        if kept is not None:
            self.result.reused += 1
            self.has_answered = True
            return kept
        reply = await client.ask(self.endpoint, body, self.most_tokens)
        self.store.put(key, f"{question.label} attempt {attempt}", reply.text)
        self.failures = 0
        self.has_answered = True
        return reply

    def _kept(self, key: str, body: Mapping[str, Any]) -> Reply | None:
        """The reply kept under a key; None where there is none, or one that cannot be used and is asked for again."""
        text = self.store.get(key)
        try:
            return None if text is None else Reply(text, self.endpoint, body)
        except BadReplyError:
            return None

    def _count_failure(self, client: Client, error: Unanswered) -> None:
        """Raise ServerError when so many questions in a row failed that the server is down, or it seems not to have
        what is needed."""
        if error.reason == NO_LOGPS and not self.has_answered:
            raise ServerError(
                f"{client.label} gives no log-probabilities, and the answers are read from them; choose a model that "
                "has them (OpenAI's reasoning models do not)"
            ) from None
        self.failures = 0 if error.is_refusal else self.failures + 1
        if self.failures >= MOST_FAILURES:
            raise ServerError(
                f"{client.label} does not answer: {self.failures} questions in a row failed; {error}; "
                "see that it runs, and run again: replies so far are kept"
            ) from None
