"""What a server may say: everything that is read of a reply is typed, and one bad reply is one request's failure."""

from __future__ import annotations

import copy
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regretless.core.errors import ServerError
from regretless.evaluation.chat.verdicts import two_token_preference
from regretless.servers.ask import Answers, Question, UnreadableError, ask_all
from regretless.servers.reply import BadReplyError, Reply
from regretless.servers.server_settings import ServerConfig
from scripted_server import Act, Request, failure, serving

HUGE = "9" * 5000
"""Digits that Python refuses to read as an integer."""
DEEP = "[" * 100_000 + "]" * 100_000
TOP = [{"token": "5", "logprob": -0.1}, {"token": "M", "logprob": -2.5}]
GOOD: dict[str, Any] = {
    "choices": [
        {
            "message": {"content": "5"},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "5", "logprob": -0.1, "id": 3, "top_logprobs": TOP}]},
            "token_ids": [3],
        }
    ],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 100, "completion_tokens": 20},
}
BODY = {"model": "m", "logprobs": True, "return_token_ids": True}


def changed(*place: Any, to: Any) -> str:
    """The good reply as JSON with one value changed; a text in angle brackets stands for JSON of its own."""
    reply = copy.deepcopy(GOOD)
    part = reply
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = to
    text = json.dumps(reply)
    return text.replace('"<huge>"', HUGE).replace('"<deep>"', DEEP).replace('"<1e999>"', "1e999")


def asked(url: str, folder: Path, count: int = 3) -> Answers[int]:
    def read(reply: Reply, attempt: int, code: str) -> int:
        if not reply.content.isdigit():
            raise UnreadableError("no number")
        return int(reply.content)

    def question(number: int) -> Question[int]:
        return Question(f"q{number}", lambda *_: {**BODY, "messages": [{"role": "user", "content": f"{number}"}]}, read)

    config = ServerConfig.parse(
        {"base_url": url, "retry_seconds": 0.001, "max_tries": 2, "max_tokens": 100_000, "concurrency": 1}, "server"
    )
    return ask_all(
        list(map(question, range(count))),
        config=config,
        model="m",
        most_tokens=10,
        attempts=1,
        replies=folder / "replies.sqlite",
        description="ask",
    )


USAGES: list[Any] = [
    {"prompt_tokens": 10**30, "completion_tokens": 1},
    {"prompt_tokens": 5, "completion_tokens": [1]},
    {"prompt_tokens": -5, "completion_tokens": 1},
    {"prompt_tokens": True, "completion_tokens": 1},
    {"prompt_tokens": 1.5, "completion_tokens": 1},
    {"prompt_tokens": math.nan, "completion_tokens": 1},
    {"prompt_tokens": "7", "completion_tokens": 1},
    {"prompt_tokens": "<huge>", "completion_tokens": 1},
    {"prompt_tokens": "<1e999>", "completion_tokens": 1},
    {"prompt_tokens": None, "completion_tokens": None},
    {"completion_tokens": 3},
    None,
    [1, 2],
    "many",
    7,
]


@pytest.mark.parametrize("usage", USAGES, ids=str)
def test_usage_when_it_is_nonsense_is_taken_for_none_and_the_most_is_charged(usage: Any, tmp_path: Path) -> None:
    with serving(lambda request: Act(changed("usage", to=usage).encode())) as server:
        result = asked(server.url, tmp_path)
    assert [answer.value for answer in result.answers] == [5, 5, 5]
    most = 10 + len(json.dumps(server.requests[0].body))
    assert vars(result.spent) == {
        "requests": 3,
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "charged_tokens": pytest.approx(3 * most, abs=30),
    }


CHOICE = ("choices", 0)
ENTRY = (*CHOICE, "logprobs", "content", 0)
BAD = {
    "choices.0": changed("choices", to=[None]),
    "choices: Input": changed("choices", to={"0": GOOD["choices"][0]}),
    "choices: List should have at least 1 item": changed("choices", to=[]),
    "choices: Input should be a valid list, got None": changed("choices", to=None),
    "choices.0.message: Input": changed(*CHOICE, "message", to=["5"]),
    "choices.0.message: required": changed(*CHOICE, "message", to=None),
    "message.content": changed(*CHOICE, "message", "content", to=5),
    "content: Input should be a valid string, got {'": changed(*CHOICE, "message", "content", to={"text": "5"}),
    "finish_reason: Input": changed(*CHOICE, "finish_reason", to=["stop"]),
    "finish_reason: String": changed(*CHOICE, "finish_reason", to="stop" * 1000),
    "logprobs": changed(*CHOICE, "logprobs", to=[-0.1]),
    "content.0.token": changed(*ENTRY, "token", to=None),
    "logprob: Input should be a valid number": changed(*ENTRY, "logprob", to="-0.1"),
    "logprob: Input should be a finite": changed(*ENTRY, "logprob", to=math.nan),
    "greater than or equal to -1": changed(*ENTRY, "logprob", to=-1e39),
    "less than or equal to 0.001, got 0.5": changed(*ENTRY, "logprob", to=0.5),
    "top_logprobs.1.logprob: Input should be .*, got nan": changed(*ENTRY, "top_logprobs", 1, "logprob", to=math.nan),
    "top_logprobs.1.logprob: Input should be less .*, got 3.0": changed(*ENTRY, "top_logprobs", 1, "logprob", to=3.0),
    "token_ids.0: Input should be greater": changed(*CHOICE, "token_ids", to=[-1]),
    "token_ids.0: Input should be less": changed(*CHOICE, "token_ids", to=[2**31]),
    "token_ids.0: Input should be a valid integer": changed(*CHOICE, "token_ids", to=[3.0]),
    "token_ids.0: Input should be a valid integer, got nan": changed(*CHOICE, "token_ids", to=["<huge>"]),
    "expected one value per token, got 1 values for 2": changed(*CHOICE, "token_ids", to=[3, 4]),
    "prompt_token_ids": changed("prompt_token_ids", to=[None]),
    "not valid JSON: .*recursion": changed("usage", to="<deep>"),
    "not valid JSON: Exp": "<html>",
    "reply: Input should be a valid dictionary": "[1]",
}


@pytest.mark.parametrize("problem", BAD)
def test_reply_when_malformed_fails_alone_is_named_and_is_not_kept(problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadReplyError, match=problem):
        Reply(BAD[problem], "chat", BODY)

    def script(request: Request) -> Act:
        return Act((BAD[problem] if request.user == "1" else json.dumps(GOOD)).encode())

    with serving(script) as server:
        result = asked(server.url, tmp_path)
        assert [answer.value for answer in result.answers] == [5, None, 5]
        assert result.stopped is None and result.answers[1].problem == "no reply"
        assert result.trouble == {"reply is not a completion": 2}
        # Kept by an earlier version: asked for again, and the run goes on.
        with sqlite3.connect(tmp_path / "replies.sqlite") as file:
            file.execute("UPDATE replies SET reply = ? WHERE label LIKE 'q2%'", (BAD[problem],))
        server.script = lambda request: Act(json.dumps(GOOD).encode())
        assert [answer.value for answer in asked(server.url, tmp_path).answers] == [5, 5, 5]
    assert len(server.requests) == 4 + 2


def test_fields_that_no_request_asks_for_are_not_looked_at() -> None:
    reply = changed(*CHOICE, "logprobs", to="none of these")
    assert Reply(reply, "chat", {}).choice.logps is None
    reply = changed(*CHOICE, "token_ids", to="none of these")
    assert Reply(reply, "chat", {}).choice.ids is None
    with pytest.raises(BadReplyError, match="token_ids"):
        Reply(reply, "chat", {"return_token_ids": True})


def test_text_when_it_holds_half_a_character_is_repaired_and_other_characters_stay() -> None:
    raw = changed(*CHOICE, "message", "content", to="a\ud800b \ud83d\ude00 \x00\x1b\u2028")
    assert "\\ud800" in raw
    assert Reply(raw, "chat", BODY).content == "a\ufffdb \U0001f600 \x00\x1b\u2028"
    assert Reply(changed(*ENTRY, "token", to="\udc80"), "chat", BODY).choice.strings == ["\ufffd"]


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["<huge>", "<1e999>", "\ud800", "token_id:7", "token_id:x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "token", "logprob", "id", "\ud800"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES: list[tuple[Any, ...]] = [
    ("choices",),
    CHOICE,
    *((*CHOICE, name) for name in ("message", "finish_reason", "logprobs", "token_ids", "text", "prompt_token_ids")),
    *((*CHOICE, "message", name) for name in ("content", "reasoning", "reasoning_content")),
    *((*CHOICE, "logprobs", name) for name in ("content", "tokens", "token_logprobs", "top_logprobs")),
    ENTRY,
    *((*ENTRY, name) for name in ("token", "logprob", "id", "top_logprobs")),
    (*ENTRY, "top_logprobs", 1),
    ("prompt_token_ids",),
    ("usage",),
    ("usage", "prompt_tokens"),
    ("anything",),
]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PLACES), ANYTHING, st.sampled_from(["chat", "completions"]))
def test_reply_whatever_it_says_is_refused_or_can_be_written_and_counted(place: Any, value: Any, endpoint: Any) -> None:
    try:
        reply = Reply(changed(*place, to=value), endpoint, BODY)
    except BadReplyError as error:
        str(error).encode()
        return
    choice = reply.choice
    texts = [reply.content, reply.thoughts, reply.finish_reason or "", *(choice.strings or [])]
    "".join([*texts, *(top.token for top in choice.likeliest)]).encode()
    ids = [*(choice.ids or []), *(reply.prompt_token_ids or [])]
    assert all(type(token) is int and 0 <= token < 2**31 for token in ids)
    assert choice.logps is not None and all(-1e30 <= value <= 0 for value in choice.logps)
    assert len(choice.logps) == len(choice.strings if choice.ids is None else choice.ids)  # type: ignore[arg-type]
    assert reply.usage is None or 0 <= reply.usage.prompt_tokens <= 10_000_000
    try:
        preference = two_token_preference([(top.token, top.logprob) for top in choice.likeliest], "5", "M", 5)
    except UnreadableError:
        return
    assert 0 <= preference <= 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_when_a_server_answers_with_one_takes_the_prompts_nowhere(status: int, tmp_path: Path) -> None:
    with serving(lambda request: Act(json.dumps(GOOD).encode())) as other:

        def script(request: Request) -> Act:
            return failure(status, headers={"Location": f"{other.url}/chat/completions\x1b[2J"})

        with serving(script) as server:
            result = asked(server.url, tmp_path)
            assert isinstance(result.stopped, ServerError)
            said = str(result.stopped)
            assert f"HTTP {status}, a redirect to {other.url}/chat/completions" in said and "\x1b" not in said
            assert "set base_url to the new address" in said
        assert len(server.requests) == 1 and other.requests == []


@pytest.mark.parametrize("wait", ["inf", "1e999", "nan", "-5", "soon", "Fri, 31 Dec 99999 23:59:59 GMT"])
def test_asked_wait_when_it_is_nonsense_is_not_waited_for(wait: str, tmp_path: Path) -> None:
    def script(request: Request) -> Act:
        return Act(json.dumps(GOOD).encode()) if request.number else failure(429, headers={"Retry-After": wait})

    with serving(script) as server:
        result = asked(server.url, tmp_path, count=1)
    assert (result.answers[0].value, result.trouble) == (5, {"HTTP 429": 1})


def compared(text: str | None, tokens: list[Any], finish_reason: str = "stop") -> str | None:
    """How the tokens of a reply differ from its text; a token is a string, or a string and its bytes."""
    written = [
        {"token": token} if isinstance(token, str) else {"token": token[0], "bytes": token[1]} for token in tokens
    ]
    choice = {
        "message": {"content": text},
        "finish_reason": finish_reason,
        "logprobs": {"content": [{**token, "logprob": -0.5} for token in written]},
    }
    return Reply(json.dumps({"choices": [choice]}), "chat", {"logprobs": True}).text_problem


def test_tokens_when_they_have_ids_then_only_a_text_that_is_missing_is_a_problem() -> None:
    def problem(text: str | None) -> str | None:
        tokens = [{"token": token, "logprob": -0.5} for token in ("\ufffd", "E")]
        choice = {"message": {"content": text}, "finish_reason": "length", "logprobs": {"content": tokens}}
        reply = {"choices": [{**choice, "token_ids": [5, 6]}]}
        return Reply(json.dumps(reply), "chat", {"logprobs": True}).text_problem

    # As vLLM writes broken characters: the text has one more letter than the tokens.
    assert problem("\ufffdOE") is None
    assert problem(None) == "token 1 is 'E', and the text has nothing there"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a red fox", ["a", " red", " fox"]),
        ("a red fox", ["a", " red", " fox", "<|im_end|>"]),
        ("a red fox", ["a", " red", " fox", "end"]),  # whatever the model ended with
        ("", ["<|im_end|>"]),
        (None, ["</s>"]),
        ("red fox", [" red", " fox"]),
        ("red fox", ["\n\n", "red", " fox", " ", "\n", "<|return|>"]),
        ("red", ["<|channel|>", "red", "<|end|>", "<|return|>"]),
        ("red<b>fox</b>", ["red", "<b>", "fox", "</b>", "<end>"]),
        ("hello world", ["hello", "world"]),  # SentencePiece, each token decoded alone
        ("red fox", ["▁red", "▁fox", "</s>"]),  # as the vocabulary spells them
        ("caf\u00e9 au", ["caf\u00c3\u00a9", "\u0120au"]),
        ("red", ["red", "<｜end▁of▁sentence｜>"]),
        ("so \U0001f642!", ["so", " \ufffd", "\ufffd", "!"]),
        ("so \U0001f642!", ["so", "", "", "!"]),
        ("so \U0001f642!", ["so", " <0xF0>", "<0x9F>", "<0x99>", "<0x82>", "!"]),
        ("so \U0001f642!", ["so", [" \\xf0\\x9f", [32, 240, 159]], ["\\x99\\x82", [153, 130]], "!"]),
        ("so", ["so", ["\ufffd", [240, 159]]]),  # cut within a character
        ("so\ufffd", ["so", ["\ufffd", [240, 159]]]),
        ("so", [["so", [115, "x"]], "<end>"]),  # implausible bytes
        ("so", ["token_id:17", "token_id:2"]),
        ("é à", ["é", " à"]),
    ],
)
def test_tokens_when_servers_write_them_in_their_ways_are_those_of_the_text(
    text: str | None, tokens: list[Any]
) -> None:
    assert compared(text, tokens) is None


@pytest.mark.parametrize(
    ("text", "tokens", "finish_reason", "problem"),
    [
        ("a red fox", ["a", " red"], "stop", "no token stands for the end of the text, 'fox'"),
        ("a red fox", ["a", " fox", "<end>"], "stop", "token 1 is 'fox', and the text has 'redfox' there"),
        ("a red fox", ["a", " red", " fox", " is"], "length", "token 3 is 'is', and the text has nothing there"),
        (None, ["{", '"name"', "}"], "tool_calls", "token 0 is '{', and the text has nothing there"),
        (None, ["so", " it", "<end>"], "stop", "token 0 is 'so', and the text has nothing there"),
        ("fox", ["<think>", "so", "</think>", "fox"], "stop", "token 1 is 'so', and the text has 'fox' there"),
        ("é à", ["é"], "stop", "no token stands for the end of the text, 'à'"),
        ("ab", [["ab", [97]]], "length", "no token stands for the end of the text, 'b'"),
        ("so \U0001f642 it", ["so", " \ufffd"], "stop", "no token stands for the end of the text, 'it'"),
    ],
)
def test_tokens_when_they_are_not_those_of_the_text_say_where(
    text: str | None, tokens: list[Any], finish_reason: str, problem: str
) -> None:
    assert compared(text, tokens, finish_reason) == problem


def test_tokens_when_there_are_thousands_are_compared_in_one_pass() -> None:
    tokens = [" \ufffd", "\ufffd", "x"] * 20_000
    assert compared("\U0001f642x" * 20_000, tokens) is None
    assert compared("\U0001f642x" * 20_001, tokens) == "no token stands for the end of the text, 'x'"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"message": "upstream overloaded", "code": 502}, "upstream overloaded"),
        ("upstream overloaded", "upstream overloaded"),
        ({"code": 502}, "{'code': 502}"),
    ],
)
def test_reply_when_it_is_an_error_with_the_code_of_success_repeats_the_servers_words(error: Any, said: str) -> None:
    for reply in ({"error": error}, {"error": error, "choices": []}, {"error": error, "choices": None}):
        with pytest.raises(BadReplyError) as found:
            Reply(json.dumps(reply), "chat", BODY)
        assert (found.value.kind, str(found.value)) == ("reply is an error message", said)
    assert Reply(json.dumps({**GOOD, "error": None}), "chat", BODY).content == "5"
