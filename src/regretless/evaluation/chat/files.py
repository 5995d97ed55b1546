"""The benchmarks' files, local or on the hub, and the responses that belong to their questions."""

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
from regretless.data.records import Response
from regretless.data.refusals import Refusal
from regretless.data.responses import read_responses
from regretless.data.rows import read_rows

HUB_FILE = re.compile(r"hf://(datasets|spaces|models)/([^/]+/[^/]+)/(.+)")
DOWNLOAD_PATIENCE = 60
"""Seconds without any byte before a download is given up."""
IDS_NAMED = 5
"""Ids named in a message."""


def is_remote(where: str) -> bool:
    """Whether a setting names a file on the hub or on another server."""
    return where.startswith(("hf://", "https://", "http://"))


def local_path(where: str) -> Path:
    """Path of a file; one that lies elsewhere is fetched once, and then taken from the hub's cache folder.

    Raises ConfigError when it cannot be had.
    """
    if not is_remote(where):
        return Path(where).expanduser()
    return _hub_file(where) if where.startswith("hf://") else _fetched(where)


def _hub_file(where: str) -> Path:
    found = HUB_FILE.fullmatch(where)
    if found is None:
        raise ConfigError(f"{where}: expected hf://datasets/<owner>/<name>/<file>, or spaces or models in its place")
    # Imported here: it takes a moment, and local files need none of it.
    import huggingface_hub

    kind, repository, name = found.groups()
    try:
        with one_attempt(where) as offline:
            return Path(huggingface_hub.hf_hub_download(repository, name, repo_type=kind.removesuffix("s")))
    except (OSError, huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError) as error:
        reason = why(error, offline)
        raise ConfigError(f"{where}: cannot be fetched ({reason}); download it elsewhere and give its path") from error


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
            raise ConfigError(f"{address}: cannot be fetched ({error}); download it and give its path") from error
    return path


def read_table(where: str, columns: Sequence[str], limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of a benchmark's file, with at least these columns.

    Raises DataError when a row cannot be used or there is none: a benchmark with a hole in it is another benchmark.
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
    """Responses of all files by prompt id. Raises DataError for unusable rows and second answers to a prompt."""
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
    """Check that there is an answer to every question, and that each was given to that very question.

    asked: prompt id to the question's text. Raises DataError: an answer that is missing or belongs elsewhere would
    shift the result without a sign.
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
            "\n  - ".join([f"{where}: the responses do not belong to these questions; sample them anew", *problems])
        )


def _last_text(answer: Response) -> str:
    return answer.prompt if isinstance(answer.prompt, str) else answer.prompt[-1]["content"]
