"""A scripted judge that can read this package's own layout, and responses for it to rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regretless.data.columns import Response
from regretless.data.rows import write_records
from regretless.labeling.judge import JudgeConfig
from scripted_server import Act, Request, answer

TEXT = re.compile(r"<<<begin text (\d+) (\w+)>>>\n(.*?)\n<<<end text \1 \2>>>", re.DOTALL)
ASPECT_WORDS = {
    "instruction_following": "do what was asked",
    "helpfulness": "how much does the text help",
    "honesty": "sure of itself",
    "truthfulness": "keep to what is true",
}


def aspect_of(request: Request) -> str:
    """Which aspect a request asks for."""
    return next(name for name, words in ASPECT_WORDS.items() if words in request.user)


def texts_of(request: Request) -> list[str]:
    """The texts that a request shows, in its order."""
    return [text for _, _, text in TEXT.findall(request.user)]


def blocks(request: Request, ratings: Sequence[str]) -> str:
    """A reply in the asked-for form."""
    code = TEXT.findall(request.user)[0][1]
    typed = "Type: 1, 2\nRationale: because.\n" if "Type:" in request.user else ""
    return "\n".join(
        f"#### Output for Text {number} [{code}]\n{typed}Rating: {rating}\nRationale: reason {rating}.\n"
        for number, rating in enumerate(ratings, 1)
    )


def judge_by(rate: Callable[[str, str], str]) -> Callable[[Request], Act]:
    """A script that rates each text with `rate(text, aspect)`."""
    return lambda request: answer(blocks(request, [rate(text, aspect_of(request)) for text in texts_of(request)]))


def last_digit(text: str, _aspect: str) -> str:
    """The rating that a text like `some words 4` deserves."""
    return text[-1]


def write_responses(path: Path, prompts: int, texts: Callable[[int], Sequence[str]]) -> Path:
    """A file of responses: `texts(number)` are those to prompt p<number>."""
    rows = [
        Response(
            prompt_id=f"p{number}",
            response_id=f"p{number}-{place}",
            prompt=[{"role": "user", "content": f"question {number}"}],
            response=text,
            model=f"model {place}",
        )
        for number in range(prompts)
        for place, text in enumerate(texts(number))
    ]
    write_records(path, rows)
    return path


def settings(url: str, server: dict[str, Any] | None = None, **changes: Any) -> JudgeConfig:
    """Settings for a scripted judge that does not wait long."""
    quick = {"base_url": url, "retry_seconds": 0.01, "concurrency": 4, **(server or {})}
    return JudgeConfig.parse({"model": "judge-1", "server": quick, **changes}, "judge")
