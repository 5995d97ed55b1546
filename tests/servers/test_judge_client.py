"""What a judge answered, apart from what it thought."""

from __future__ import annotations

import json

import pytest

from regretless.servers.ask import UnreadableError
from regretless.servers.judge_client import answer_of
from regretless.servers.reply import Reply


def reply(content: str, finish_reason: str | None = "stop") -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return Reply(json.dumps({"choices": [choice]}), "chat", {})


def test_answer_when_thoughts_are_in_front_of_it_then_no_draft_is_part_of_it() -> None:
    assert answer_of(reply("<think>[[A]], or rather</think> no </think>\n[[B]]")) == "\n[[B]]"
    assert answer_of(reply("[[B]]", None)) == "[[B]]"


def test_answer_when_the_reply_was_cut_then_it_is_unreadable() -> None:
    with pytest.raises(UnreadableError, match="reply ended early: length"):
        answer_of(reply("[[B]]", "length"))
