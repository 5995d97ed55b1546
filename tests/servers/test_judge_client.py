"""What a judge answered, apart from what it thought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from judge_helpers import settings
from regretless.core.errors import ConfigError
from regretless.evaluation.chat.alpaca_eval import AlpacaEvalConfig
from regretless.servers.ask import Answers, Question, UnreadableError, describe
from regretless.servers.judge_client import answer_of, ask_judge, bill
from regretless.servers.limits import Spending
from regretless.servers.reply import Reply
from scripted_server import answer, serving


def reply(content: str, finish_reason: str | None = "stop") -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return Reply(json.dumps({"choices": [choice]}), "chat", {})


def test_answer_when_thoughts_are_in_front_of_it_then_no_draft_is_part_of_it() -> None:
    assert answer_of(reply("<think>[[A]], or rather</think> no </think>\n[[B]]")) == "\n[[B]]"
    assert answer_of(reply("[[B]]", None)) == "[[B]]"


def test_answer_when_the_reply_was_cut_then_it_is_unreadable() -> None:
    with pytest.raises(UnreadableError, match="reply ended early: length"):
        answer_of(reply("[[B]]", "length"))


def test_answer_when_the_server_has_another_word_for_the_end_is_read() -> None:
    assert answer_of(reply("[[B]]", "eos_token")) == "[[B]]"


@pytest.mark.parametrize(
    ("spent", "dollars", "said"),
    [
        (Spending(2, 1000, 100, 1100), {"dollars": 0.0012}, "2 requests, 1.1k tokens, $0.00"),
        (
            Spending(2, 1_000_000, 500_000, 2_500_000),
            {"dollars": 2.0, "dollars_at_most": 4.0},
            "2 requests, 1500.0k tokens and at most 1000.0k unreported, $2.00 to $4.00",
        ),
        # No reply said what it used.
        (
            Spending(2, 0, 0, 3_000_000),
            {"dollars": None, "dollars_at_most": 6.0},
            "2 requests, 0.0k tokens and at most 3000.0k unreported, at most $6.00",
        ),
        (Spending(2, 0, 0, 0), {"dollars": 0.0}, "2 requests, 0.0k tokens, $0.00"),
    ],
)
def test_bill_when_the_server_does_not_report_its_tokens_has_an_upper_bound(
    spent: Spending, dollars: dict[str, Any], said: str
) -> None:
    config = settings("http://127.0.0.1:1/v1", {"prompt_price": 1.0, "completion_price": 2.0})
    found = bill(config, Answers([], spent=spent))
    assert {name: value for name, value in found.items() if name.startswith("dollars")} == pytest.approx(dollars)
    assert describe(config.server, spent) == said
    unpriced = bill(settings("http://127.0.0.1:1/v1"), Answers([], spent=spent))
    assert unpriced["dollars"] is None and "dollars_at_most" not in unpriced
    without = settings("http://127.0.0.1:1/v1")
    assert bill(without, Answers([], spent=spent))["dollars"] is None
    assert "$" not in describe(without.server, spent)


def test_parameters_when_another_setting_determines_them_then_they_are_refused_with_all_other_problems() -> None:
    names = (
        "model",
        "messages",
        "stream",
        "n",
        "best_of",
        "max_tokens",
        "max_completion_tokens",
        "tokens",
        "temperature",
        "top_k",
    )
    server = {"limit_parameter": "tokens"}
    with pytest.raises(ConfigError) as error:
        settings("http://127.0.0.1:1/v1", server, parameters=dict.fromkeys(names, 3), attempts=0)
    problem = (
        "parameters: expected parameters without a setting of their own; remove model (the judge's name has its own "
        "setting), messages (they are the question), stream (a reply is read as a whole), n (a request has one reply), "
        "best_of (a request has one reply), max_tokens (set max_reply_tokens), max_completion_tokens (set "
        "max_reply_tokens), tokens (set max_reply_tokens), temperature (set temperature itself)"
    )
    assert error.value.problems == [problem, "attempts: input should be greater than or equal to 1 (got 0)"]
    wanted = {"logprobs": False, "top_logprobs": 2}
    assert settings("http://127.0.0.1:1/v1", parameters=wanted).parameters == wanted
    given = {"questions": "q.json", "judge": "j", "parameters": {**wanted, "reasoning_effort": "low"}}
    problem = r"remove logprobs \(the answers are read from them\), top_logprobs \(set top_logprobs itself\), reasoning"
    with pytest.raises(ConfigError, match=problem):
        AlpacaEvalConfig.parse({"benchmark": "alpaca_eval", **given}, "alpaca_eval")


def test_judge_when_stored_replies_are_of_another_address_then_a_note_says_which_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "judge", "messages": [{"role": "user", "content": "?"}]}
    questions = [Question("q", lambda attempt, code: body, lambda reply, attempt, code: answer_of(reply))]
    with serving(lambda request: answer("5")) as first, serving(lambda request: answer("2")) as second:
        for server in (first, second):
            assert ask_judge(settings(server.url), questions, tmp_path / "judge").answers[0].value == "5"
        said = " ".join("".join(capsys.readouterr()).split())
        note = f"1 stored replies are of {first.url}, and this judge is at {second.url}; if another model has this name"
        assert said.count(note) == 1
