"""Responses to a benchmark's prompts, a scripted judge that can read this package's templates, and settings for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from regretless.data.columns import Response
from regretless.data.prompts import PromptRow
from regretless.data.rows import write_records
from scripted_server import Request

PART = re.compile(r"<<<begin ([\w' ]+) (\w+)>>>\n(.*?)\n<<<end \1 \2>>>", re.DOTALL)


def respond(path: Path, prompts: Iterable[PromptRow], text: Callable[[PromptRow], str]) -> Path:
    """A file of responses to prompts."""
    rows = [
        Response(
            prompt_id=row.prompt_id,
            response_id=f"{row.prompt_id}-0",
            prompt=row.prompt,
            response=text(row),
            finish_reason="length" if text(row).endswith("…") else "stop",
        )
        for row in prompts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_records(path, rows)
    return path


def parts_of(request: Request) -> dict[str, str]:
    """What a request shows between its marks, by the name of the part."""
    return {name: content for name, _, content in PART.findall(request.user)}


def code_of(request: Request) -> str:
    """The code that marks the parts of a request."""
    return str(PART.findall(request.user)[0][1])


def server(url: str, **changes: Any) -> dict[str, Any]:
    """Settings of a scripted server that is not waited for long."""
    return {"base_url": url, "retry_seconds": 0.01, "concurrency": 4, **changes}
