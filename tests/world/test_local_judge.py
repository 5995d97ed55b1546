"""The judge of smoke runs; that its replies can be read is shown by the recipes that ask it (test_recipes.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from regretless.data.columns import Message
from regretless.servers.ask import Answers, Question, ask_all
from regretless.servers.server_settings import ServerConfig
from regretless.world.local_judge import KEY_VARIABLE, serving


def ask(folder: Path, texts: list[str]) -> Answers[str]:
    def question(text: str) -> Question[str]:
        def body(_attempt: int, code: str) -> dict[str, Any]:
            shown = f"<<<begin answer {code}>>>\n{text}\n<<<end answer {code}>>>\nRating {code}: [[5]]"
            messages: list[Message] = [{"role": "user", "content": shown if text else "a prompt of somebody else's"}]
            return {"model": "judge", "messages": messages}

        return Question(text, body, lambda reply, _, code: reply.content.replace(code, "code"))

    folder.mkdir()
    server = ServerConfig(api_key_env=KEY_VARIABLE)
    replies = folder / "replies.sqlite"
    return ask_all(
        [question(text) for text in texts],
        config=server,
        model="judge",
        most_tokens=9,
        attempts=1,
        replies=replies,
        description="",
    )


def test_lots_when_drawn_vary_with_the_text_and_are_the_same_under_another_code_and_port(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(30)]
    with serving() as judge:
        first = [answer.value for answer in ask(tmp_path / "a", texts).answers]
        assert judge.asked == {"grades": 30}
    with serving() as judge:
        again = [answer.value for answer in ask(tmp_path / "b", texts[::-1]).answers]
    assert first == again[::-1]
    assert len(set(first)) > 5 and all(str(value).startswith("Random.\nRating code: [[") for value in first)


def test_prompt_when_it_is_not_one_of_the_packages_is_refused(tmp_path: Path) -> None:
    with serving() as judge:
        assert [answer.problem for answer in ask(tmp_path / "a", [""]).answers] == ["refused with HTTP 400"]
        assert not judge.asked


def test_environment_when_the_judge_has_gone_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://mine/v1")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), serving() as judge:
        assert os.environ["OPENAI_BASE_URL"] == judge.url
        raise RuntimeError
    assert dict(os.environ) == before
