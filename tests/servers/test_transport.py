from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import sqlite3
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from regretless.core.errors import BudgetError, ServerError
from regretless.servers.ask import Answers, Question, UnreadableError, ask_all
from regretless.servers.limits import Budget, Pace, Spending
from regretless.servers.reply_store import ReplyStore
from regretless.servers.server_settings import ServerConfig
from regretless.servers.transport import Client, Reply, Unanswered, asked_wait
from scripted_server import Act, Request, answer, completion, failure, serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def once(config: ServerConfig, times: int = 1, spent: Spending | None = None) -> tuple[list[Reply], Client]:
    """The replies to some equal requests sent at the same time, and the client that sent them."""

    async def ask() -> tuple[list[Reply], Client]:
        async with Client(config, Budget(config, spent or Spending())) as client:
            return list(await asyncio.gather(*(client.ask("chat", BODY, 10) for _ in range(times)))), client

    return asyncio.run(ask())


def server_config(url: str, **changes: Any) -> ServerConfig:
    return ServerConfig.parse({"base_url": url, "retry_seconds": 0.01, **changes}, "server")


@pytest.mark.parametrize("form", ["seconds", "milliseconds", "date"])
def test_retry_after_when_given_holds_back_all_requests(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(request: Request) -> Act:
        if request.number:
            return answer("yes")
        date = formatdate(time.time() + 3, usegmt=True)  # in whole seconds, rounded down
        return failure(
            429,
            headers={"seconds": {"Retry-After": "1"}, "date": {"Retry-After": date}}.get(
                form, {"Retry-After-Ms": "1000", "Retry-After": "30"}
            ),
        )

    pauses: list[float] = []

    with serving(script) as server:

        async def ask() -> None:
            refused = asyncio.Event()
            pause = Pace.pause

            def noted(self: Pace, seconds: float) -> None:
                pause(self, seconds)
                pauses.append(seconds)
                refused.set()

            monkeypatch.setattr(Pace, "pause", noted)
            config = server_config(server.url)
            async with Client(config, Budget(config, Spending())) as client:
                first = asyncio.create_task(client.ask("chat", BODY, 10))
                await refused.wait()
                await asyncio.gather(first, *(client.ask("chat", BODY, 10) for _ in range(3)))

        asyncio.run(ask())
    refused, *others = (request.at for request in server.requests)
    assert len(others) == 4
    (seconds,) = pauses
    assert 0 < seconds <= 3 if form == "date" else seconds == 1
    assert min(others) - refused >= seconds, "what was not refused waits as well"


def test_requests_per_minute_when_set_spreads_retries_too() -> None:
    with serving(lambda request: failure(500) if request.number % 2 else answer("yes")) as server:
        once(server_config(server.url, requests_per_minute=60 / 0.05, concurrency=8), times=6)
    starts = [request.at for request in server.requests]
    assert len(starts) > 8
    assert starts[-1] - starts[0] > 0.05 * (len(starts) - 1) * 0.9


def test_concurrency_is_the_most_requests_under_way(tmp_path: Path) -> None:
    together = threading.Barrier(5)

    def script(request: Request) -> Act:
        together.wait(timeout=60)  # no request is answered before there are five
        return answer("5", delay=0.02)

    with serving(script) as server:
        result = asked(server_config(server.url, concurrency=5), tmp_path, 40)
    assert [item.value for item in result.answers] == [5] * 40
    assert server.most_at_once == 5


def asked(config: ServerConfig, folder: Path, count: int) -> Answers[int]:
    def read(reply: Reply, attempt: int, code: str) -> int:
        if not reply.content.isdigit():
            raise UnreadableError("no number")
        return int(reply.content)

    def question(number: int) -> Question[int]:
        return Question(
            f"q{number}",
            lambda attempt, code: {**BODY, "messages": [{"role": "user", "content": f"{number} {attempt} {code}"}]},
            read,
        )

    return ask_all(
        [question(number) for number in range(count)],
        config=config,
        model="m",
        most_tokens=10,
        attempts=2,
        replies=folder / "replies.sqlite",
        description="ask",
    )


def test_replies_when_another_address_gave_them_then_they_are_kept_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(lambda request: answer("5")) as server, serving(lambda request: answer("2")) as other:
        here, there = server_config(server.url), server_config(other.url)
        assert asked(here, tmp_path, 3).elsewhere == {}
        moved = asked(there, tmp_path, 4)
        assert [item.value for item in moved.answers] == [5, 5, 5, 2]
        assert (moved.reused, moved.elsewhere) == (3, {server.url: 3})
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert asked(ServerConfig(), tmp_path, 4).elsewhere == {other.url: 1}, "wherever the address is given"
        assert (len(server.requests), len(other.requests)) == (3, 1)
        replies = tmp_path / "replies.sqlite"
        with contextlib.closing(sqlite3.connect(replies)) as file:  # as an earlier version wrote it
            file.execute("ALTER TABLE replies DROP COLUMN address")
        monkeypatch.delenv("OPENAI_BASE_URL")
        known = asked(ServerConfig(), tmp_path, 4)
        assert (known.reused, known.elsewhere) == (4, {})


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (failure(500), "HTTP 500"),
        (failure(429), "HTTP 429"),
        (Act(b"<html>"), "reply is not a completion"),
        (Act(b"[1]"), "reply is not a completion"),
        (Act(b'{"choices": [{"text": "no chat"}]}'), "reply is not a completion"),
        (Act(b'{"error": {"message": "busy"}}'), "reply is an error message"),
        (answer("yes", fraction=0.4), "connection failed or dropped"),
        (Act(drop=True), "connection failed or dropped"),
        (answer("yes", delay=1.0), "timed out"),
    ],
)
def test_request_when_it_fails_in_passing_is_tried_again_and_then_given_up(act: Act, kind: str) -> None:
    with serving(lambda request: answer("yes") if request.number == 2 else act) as server:
        config = server_config(server.url, max_tries=3, timeout_seconds=0.3)
        (reply,), client = once(config)
        assert (reply.content, client.trouble) == ("yes", {kind: 2})
        with pytest.raises(Unanswered, match=f"no reply: 3 tries; the last one: {kind}"):
            once(config)


HTML = {"Content-Type": "text/html; charset=utf-8"}
EVENTS = {"Content-Type": "text/event-stream"}


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (Act(b"<html>gateway", headers=HTML), r"content type text/html; .* it begins with '<html>gateway'"),
        (Act(b'data: {"id": 1}\n\n', headers=EVENTS), r"""content type text/event-stream, .*'data: {"id": 1}\\n"""),
        (Act(b"nonsense", headers={"Content-Type": "application/json"}), r"completion \(not valid JSON: .*'nonsense'"),
    ],
)
def test_reply_when_it_is_no_json_then_its_type_and_beginning_are_told(act: Act, problem: str) -> None:
    with serving(lambda request: act) as server, pytest.raises(Unanswered, match=problem):
        once(server_config(server.url, max_tries=1))


def test_reply_when_it_begins_with_a_byte_order_mark_then_it_is_read() -> None:
    with serving(lambda request: Act(b"\xef\xbb\xbf" + answer("yes").body)) as server:
        assert once(server_config(server.url))[0][0].content == "yes"


def test_spending_when_a_reply_is_lost_counts_what_it_may_have_cost() -> None:
    acts = [Act(drop=True), failure(500), answer("yes", usage=None), answer("yes", usage=(7, 2))]
    most = 10 + len('{"model": "m", "messages": [{"role": "user", "content": "hello"}]}')
    with serving(lambda request: acts[request.number]) as server:
        spent = Spending()
        once(server_config(server.url), spent=spent)
        assert spent == Spending(requests=3, charged_tokens=2 * most)
        once(server_config(server.url), spent=spent)
        assert spent == Spending(4, 7, 2, 2 * most + 9)


def test_budget_when_two_processes_share_a_file_holds_for_both(tmp_path: Path) -> None:
    async def both(limits: dict[str, int], settled: Spending) -> tuple[list[str], list[Spending], Spending]:
        """Requests of 10 tokens by turns, until both budgets are spent: who was admitted, and what each knows."""
        config = ServerConfig.parse(limits, "server")
        file = tmp_path / f"{'-'.join(limits)}.sqlite"
        with ReplyStore(file) as first, ReplyStore(file) as second:
            stores = {"a": first, "b": second}
            budgets = {name: Budget(config, Spending(), store.ledger("m")) for name, store in stores.items()}
            admitted: list[str] = []
            stopped: list[Spending] = []
            for _ in range(8):
                for name in list(budgets):
                    try:
                        await budgets[name].reserve(10)
                        admitted.append(name)
                        assert first.spent("m").charged_tokens == second.spent("m").charged_tokens >= 10
                        await budgets[name].settle(10, settled)
                    except BudgetError:
                        stopped.append(budgets.pop(name).spent)
            return admitted, stopped, first.spent("m")

    admitted, known, total = asyncio.run(both({"max_requests": 5}, Spending(0, 3, 1, 4)))
    assert "".join(admitted) == "ababa"
    assert [total, *known] == [Spending(5, 15, 5, 20)] * 3
    admitted, known, total = asyncio.run(both({"max_tokens": 25}, Spending(0, 3, 1, 4)))
    assert "".join(admitted) == "abab", "16 used, and 10 more do not fit"
    assert [total, *known] == [Spending(4, 12, 4, 16)] * 3


def test_reservation_of_a_process_counts_for_others_and_for_later_runs_if_it_is_killed(tmp_path: Path) -> None:
    config = ServerConfig.parse({"max_tokens": 25}, "server")

    async def reserve(tokens: int) -> Spending:
        # Not settled, as in a process that is killed.
        with ReplyStore(tmp_path / "replies.sqlite") as store:
            spent = store.spent("m")
            await Budget(config, spent, store.ledger("m"), replace(spent)).reserve(tokens)
            return spent

    assert asyncio.run(reserve(20)) == Spending(requests=1), "its own reservation is not usage yet"
    with pytest.raises(BudgetError, match=r"max_tokens=25: 20 are used, and the next request may need up to 6$"):
        asyncio.run(reserve(6))
    assert asyncio.run(reserve(5)) == Spending(requests=2, charged_tokens=20)
    with ReplyStore(tmp_path / "replies.sqlite") as store:
        assert store.spent("m") == Spending(requests=2, charged_tokens=25), "the refused one left nothing"


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (failure(401, "bad key"), "rejects every request: .*bad key"),
        (failure(429, "you exceeded your quota", code="insufficient_quota"), "rejects every request: .*quota"),
        (failure(429, "come back", headers={"Retry-After": "86400"}), "asks to wait 86400 seconds"),
    ],
)
def test_server_when_no_request_can_succeed_is_asked_once(act: Act, problem: str) -> None:
    with serving(lambda request: act) as server:
        with pytest.raises(ServerError, match=rf"server 127\.0\.0\.1:\d+ {problem}"):
            once(server_config(server.url))
        assert len(server.requests) == 1


def test_server_when_nobody_listens_costs_nothing_and_is_named(tmp_path: Path) -> None:
    with serving(lambda request: answer("5")) as server:
        url = server.url
    result = asked(server_config(url, max_tries=2), tmp_path, 30)
    assert isinstance(result.stopped, ServerError)
    assert f"server 127.0.0.1:{url[17:-3]} does not answer: 10 questions in a row failed" in str(result.stopped)
    assert result.spent.charged_tokens == 0


def test_questions_when_another_process_has_answered_some_are_not_asked_again(tmp_path: Path) -> None:
    with serving(lambda request: answer("5" if request.number < 6 else "none")) as server:
        config = server_config(server.url, concurrency=1)
        first = asked(config, tmp_path, 4)
        second = asked(config, tmp_path, 8)
    assert first.reused == 0 and second.reused == 4
    assert [item.value for item in second.answers] == [5] * 6 + [None] * 2
    assert [(item.problem, item.attempts) for item in second.answers[6:]] == [("no number", 2)] * 2
    assert len(server.requests) == 6 + 2 * 2
    with ReplyStore(tmp_path / "replies.sqlite") as store, ReplyStore(tmp_path / "replies.sqlite") as same:
        assert store.code("a") == same.code("a") != store.code("b")
        assert store.spent("m").requests == len(server.requests)
    with ReplyStore(tmp_path / "other.sqlite") as other, ReplyStore(tmp_path / "replies.sqlite") as store:
        assert other.code("a") != store.code("a"), "nobody can know a code beforehand"


def test_questions_when_three_judges_share_their_replies_then_each_is_asked_once(tmp_path: Path) -> None:
    with serving(lambda request: answer("5", delay=0.02)) as server:
        config = server_config(server.url, concurrency=8)
        with ThreadPoolExecutor(3) as threads:
            results = [threads.submit(asked, config, tmp_path, 40) for _ in range(3)]
            values = [[item.value for item in result.result().answers] for result in results]
    assert values == [[5] * 40] * 3
    assert len(server.requests) == 40


def test_store_when_another_closes_it_while_it_is_opened_then_it_is_opened_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [sqlite3.OperationalError("database is locked") for _ in range(2)]
    for error in busy:
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY

    class Contended(sqlite3.Connection):
        def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
            if "journal_mode" in statement and busy:
                raise busy.pop()
            return super().execute(statement, *arguments)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Contended))
    with ReplyStore(tmp_path / "replies.sqlite") as store:
        assert not busy and store.get("a") is None


def test_question_when_the_process_that_asks_it_was_killed_then_another_one_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplyStore(tmp_path / "replies.sqlite") as killed, ReplyStore(tmp_path / "replies.sqlite") as other:
        assert killed.claim("a") and not killed.claim("a") and not other.claim("a") and other.claim("b")
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 20)
        killed.renew()
        monkeypatch.setattr(time, "time", lambda: now + 40)
        assert not killed.claim("a") and killed.claim("b")  # only one of the two was renewed
        monkeypatch.setattr(time, "time", lambda: now + 60)
        assert other.claim("a")
        killed.release("a")
        assert not killed.claim("a"), "it is the other one's by now"
        other.release("a")
        assert killed.claim("a")


@pytest.mark.parametrize(
    ("usage", "believed"),
    [
        ((0, 0), False),
        ((0, 20), False),
        ((100, 0), False),
        ((9_999_999, 20), False),
        ((100, 9_999_999), False),
        ((100, 20), True),
        ((1000, 80), True),
    ],
)
def test_usage_when_the_texts_contradict_it_then_the_most_is_charged(usage: tuple[int, int], believed: bool) -> None:
    spent = Spending()
    with serving(lambda request: answer("word " * 60, usage=usage)) as server:
        once(server_config(server.url, max_tries=1), spent=spent)
    reported = (spent.prompt_tokens, spent.completion_tokens)
    assert reported == (usage if believed else (0, 0))
    assert spent.charged_tokens == (sum(usage) if believed else len(json.dumps(BODY)) + 10)


def test_usage_when_the_reply_has_its_tokens_then_they_are_counted() -> None:
    words = {"content": [{"token": "a", "logprob": -1.0}] * 9}
    choice = {"message": {"role": "assistant", "content": "a" * 9}, "finish_reason": "stop", "logprobs": words}
    for written, reported in ((8, 0), (9, 9)):
        spent = Spending()
        with serving(lambda request, written=written: completion(choice, usage=(50, written))) as server:  # type: ignore[misc]
            config = server_config(server.url, max_tries=1)

            async def ask(config: ServerConfig = config, spent: Spending = spent) -> Reply:
                async with Client(config, Budget(config, spent)) as client:
                    return await client.ask("chat", {**BODY, "logprobs": True}, 10)

            asyncio.run(ask())
        assert spent.completion_tokens == reported


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (answer("x" * (2 << 20)), r"reply is too large \(it has more than \d+ bytes\)"),
        (
            Act(gzip.compress(bytes(200 << 20), 1), headers={"Content-Encoding": "gzip"}),
            "too large .*it is compressed, as gzip",
        ),
        (
            Act(gzip.compress(bytes(200 << 20), 1), 500, {"Content-Encoding": "gzip"}),
            "too large .*it is compressed, as gzip",
        ),
    ],
)
def test_reply_when_it_is_larger_than_its_tokens_then_it_is_not_read_to_its_end(act: Act, reason: str) -> None:
    with serving(lambda request: act) as server, pytest.raises(Unanswered, match=reason):
        tracemalloc.start()
        try:
            once(server_config(server.url, max_tries=2))
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 100 << 20
    assert [request.headers["accept-encoding"] for request in server.requests] == ["identity"] * 2


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("7", 7),
        (" 1.5 ", 1.5),
        ("1_0_0_0", 0),
        ("-5", 0),
        ("1e9", 0),
        ("inf", 0),
        ("nan", 0),
        ("\u0661", 0),
        ("9" * 400, 0),
        ("999999999999", 999999999999),
        ("Thu, 01 Jan 1970 00:16:40 GMT", 900),
        ("Thu, 01 Jan 1970 00:16:40 -0000", 900),
        ("Thu, 01 Jan 1970 00:00:40 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 +0000", 253402300699),
        ("Mon, 99 Foo 2020 00:00:00 GMT", 0),
    ],
)
def test_wait_when_a_server_asks_for_it_is_a_number_or_a_date(
    asked: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 100.0)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert asked_wait({"retry-after": asked}) == seconds
    finally:
        monkeypatch.undo()
        time.tzset()
