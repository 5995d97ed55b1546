"""The benchmarks' files, local or on the hub, and the responses to their questions."""

from __future__ import annotations

import http.client
import re
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from regretless.core.errors import ConfigError, DataError
from regretless.core.files import atomic_path, fingerprint
from regretless.core.hub import one_attempt, why
from regretless.data.columns import Response
from regretless.data.rejected_rows import Refusal
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows

HUB_FILE = re.compile(r"hf://(datasets|spaces|models)/([^/]+/[^/]+)/(.+)")
DOWNLOAD_PATIENCE = 60
"""Seconds without data before a download fails."""
IDS_NAMED = 5
"""Most ids listed in a message."""


def is_remote(where: str) -> bool:
    """True if a setting names a file on the hub or on another server."""
    return where.startswith(("hf://", "https://", "http://"))


def local_path(where: str) -> Path:
    """Path of a file; a remote file is downloaded once and then read from the hub's cache folder.

    Raises ConfigError if it cannot be downloaded.
    """
    if not is_remote(where):
        return Path(where).expanduser()
    return _hub_file(where) if where.startswith("hf://") else _fetched(where)


def _hub_file(where: str) -> Path:
    match = HUB_FILE.fullmatch(where)
    if match is None:
        raise ConfigError(
            f"{where}: expected hf://datasets/<owner>/<name>/<file>, or spaces or models instead of datasets"
        )
    # Imported here: the import takes a moment, and local files do not need it.
    import huggingface_hub

    kind, repository, name = match.groups()
    try:
        with one_attempt(where) as offline:
            return Path(huggingface_hub.hf_hub_download(repository, name, repo_type=kind.removesuffix("s")))
    except (OSError, huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError) as error:
        reason = why(error, offline)
        raise ConfigError(
            f"{where}: cannot be downloaded ({reason}); download it elsewhere and set the path instead"
        ) from error


def _fetched(address: str) -> Path:
    from huggingface_hub.constants import HF_HOME

    name = unquote(urlsplit(address).path).rpartition("/")[2]
    path = Path(HF_HOME) / "regretless" / fingerprint(address) / name
    if not path.is_file():
        try:
            with (
                urllib.request.urlopen(address, timeout=DOWNLOAD_PATIENCE) as reply,
                atomic_path(path) as temporary,
                temporary.open("wb") as handle,
            ):
                shutil.copyfileobj(reply, handle)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{address}: cannot be downloaded ({error}); download it elsewhere and set the path instead"
            ) from error
    return path


def read_table(where: str, columns: Sequence[str], limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of a benchmark's file, with at least these columns.

    Raises DataError for an unusable row or an empty file: dropping a row would change the benchmark.
    """
    rows: list[dict[str, Any]] = []
    for number, row in read_rows(local_path(where)):
        if limit is not None and len(rows) == limit:
            break
        if isinstance(row, Refusal):
            raise DataError(str(row))
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            raise DataError(f"{where}:{number}: missing column(s) {', '.join(missing)}; found {', '.join(sorted(row))}")
        rows.append(row)
    if not rows:
        raise DataError(f"{where}: expected at least one row, found none")
    return rows


def read_answers(paths: Sequence[Path]) -> dict[str, Response]:
    """Responses of all files by prompt id. Raises DataError for unusable rows and for a second response to a prompt."""
    answers: dict[str, Response] = {}
    problems: list[str] = []
    for path in paths:
        rows, refused = read_responses(path)
        problems += [str(refusal) for refusal in refused]
        for row in rows:
            if row.prompt_id in answers:
                problems.append(f"{row.origin}: second response to {row.prompt_id}; sample with n=1")
            answers[row.prompt_id] = row
    if problems:
        raise DataError("\n  - ".join([f"responses: {len(problems)} problem(s)", *problems[:IDS_NAMED]]))
    return answers


def check_answers(answers: Mapping[str, Response], asked: Mapping[str, str], where: str) -> None:
    """Check that every question has a response, and that each response was written for that exact question.

    asked: prompt id to the text of the question. Raises DataError, because a missing or mismatched answer would shift
    the result unnoticed.
    """
    missing = [prompt_id for prompt_id in asked if prompt_id not in answers]
    stray = [prompt_id for prompt_id in answers if prompt_id not in asked]
    other = [key for key, text in asked.items() if key in answers and _last_text(answers[key]) != text]
    problems = [
        f"{len(ids)} {what}: {', '.join(ids[:IDS_NAMED])}{', …' if len(ids) > IDS_NAMED else ''}"
        for what, ids in (
            ("question(s) without a response", missing),
            ("response(s) to no question of this benchmark", stray),
            ("response(s) to another text than the question's", other),
        )
        if ids
    ]
    if problems:
        raise DataError(
            "\n  - ".join([f"{where}: the responses do not match these questions; sample them again", *problems])
        )


def _last_text(answer: Response) -> str:
    return answer.prompt if isinstance(answer.prompt, str) else answer.prompt[-1]["content"]
