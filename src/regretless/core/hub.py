"""The Hugging Face hub: one check whether it answers, before its libraries retry; and facts about repositories."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

SECONDS = 5.0
"""Time limit for a hub that does not answer."""
REMEMBERED = 60.0
"""Seconds for which the result of one check is valid."""
SIDE_BY_SIDE = 8
NO_CONNECTION = re.compile(r"offline|connect|reach|locate|cached", re.IGNORECASE)
REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
LOCAL_SUFFIXES = {
    *(".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".txt", ".yaml", ".yml", ".jinja", ".j2"),
    *(".safetensors", ".bin", ".pt", ".arrow"),
}


class Repository(NamedTuple):
    """A repository on the hub."""

    kind: Literal["model", "dataset"]
    name: str
    revision: str | None = None


_looks: dict[str, tuple[float, str | None]] = {}
_looking = threading.Lock()


def may_be_repository(name: str) -> bool:
    """True if a name could be on the hub: `name` or `owner/name`, not a path or a file name."""
    return REPOSITORY.fullmatch(name) is not None and Path(name).suffix not in LOCAL_SUFFIXES


def out_of_reach() -> str | None:
    """Why the hub cannot be used, or None if it answers anything. One request, at most `SECONDS`."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "offline mode is on (HF_HUB_OFFLINE)"
    with _looking:
        when, problem = _looks.get(constants.ENDPOINT, (-math.inf, None))
        if time.monotonic() - when >= REMEMBERED:
            problem = _look(constants.ENDPOINT)
            _looks[constants.ENDPOINT] = time.monotonic(), problem
        return problem


def _look(endpoint: str) -> str | None:
    from huggingface_hub import get_session

    problems: list[str | None] = []

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=SECONDS)
            problems.append(None)
        except Exception as error:  # whatever network, proxy and certificates can raise
            problems.append(f"{endpoint} cannot be reached: {error}")

    # A thread, because no time limit of the client holds for the look-up of a name.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return problems[0] if problems else f"{endpoint} does not answer within {SECONDS:g} seconds"


@contextlib.contextmanager
def one_attempt(source: str | Path) -> Iterator[str | None]:
    """A block that may load `source` from the hub; yields why the hub cannot be used, or None.

    Without a network, each request would be retried for half a minute, and a model needs several requests. So the
    libraries are set to offline mode within the block: they use their caches, or fail at once.
    Nothing is checked for a source on this machine.
    """
    problem = None if Path(source).exists() else out_of_reach()
    if problem is None:
        yield None
        return
    before = _set_offline(True)
    try:
        yield problem
    finally:
        _set_offline(before)


def _set_offline(value: bool) -> bool:
    """Set the libraries' offline mode; returns the previous values."""
    from huggingface_hub import constants

    before = bool(constants.HF_HUB_OFFLINE)
    constants.HF_HUB_OFFLINE = value
    # `datasets` has its own copy. It is not imported for this: if it is not loaded, it does not load anything.
    if (copy := sys.modules.get("datasets.config")) is not None:
        copy.HF_HUB_OFFLINE = value  # type: ignore[attr-defined]
    return before


def why(error: Exception, problem: str | None) -> str:
    """Why something could not be loaded, in one line. problem: the value of `one_attempt`."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    # torch's errors about weights have a heading of their own.
    said = f"{first} {more[0].strip()}" if more and first.endswith(":") else first
    # A message about a connection that was not even tried would mislead.
    return said if problem is None else problem if NO_CONNECTION.search(said) else f"{said} ({problem})"


def missing(repositories: Collection[Repository]) -> dict[Repository, str]:
    """Problems with repositories: no such name or revision, or its terms are not accepted.

    One concurrent request for each; a repository without an answer in time is omitted. Empty without a network.
    """
    if not repositories or out_of_reach() is not None:
        return {}
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    asked = {pool.submit(_problem, repository): repository for repository in dict.fromkeys(repositories)}
    answered, _ = wait(asked, timeout=2 * SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    problems = {asked[future]: future.result() for future in answered if future.exception() is None}
    return {repository: problem for repository, problem in problems.items() if problem is not None}


def no_upload(token: str | None) -> str | None:
    """Why nothing can be uploaded to the hub with this token (None: the one that is logged in), or None if it can.

    One request, at most twice `SECONDS`; without an answer in time to the question who this is, None.
    """
    if (problem := out_of_reach()) is not None:
        return problem
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(_token_problem, token)
    wait([asked], timeout=2 * SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    return asked.result() if asked.done() and asked.exception() is None else None


def _token_problem(token: str | None) -> str | None:
    from huggingface_hub import HfApi, errors

    try:
        access: Any = HfApi(token=token).whoami().get("auth", {}).get("accessToken", {})
    except errors.LocalTokenNotFoundError:
        return "no token is logged in; run `hf auth login`"
    except errors.HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403)
        return "the hub refuses the token; run `hf auth login`" if refused else None
    return "the token may only read; log in with one that may write" if access.get("role") == "read" else None


def _problem(repository: Repository) -> str | None:
    from huggingface_hub import HfApi, errors

    api = HfApi()
    kind = repository.kind.replace("dataset", "data set")
    try:
        info: Any = api.repo_info(
            repository.name, repo_type=repository.kind, revision=repository.revision, timeout=SECONDS
        )
        if info.gated:
            api.auth_check(repository.name, repo_type=repository.kind)
    except errors.GatedRepoError:
        return (
            f"the hub's {kind} {repository.name} has terms that you have not accepted; accept them on its page, and "
            "log in with `hf auth login`"
        )
    except errors.RepositoryNotFoundError:
        return (
            f"there is no such file or folder, and no such {kind} on the hub; check its name, and log in with "
            "`hf auth login` for a private one"
        )
    except errors.RevisionNotFoundError:
        return f"the hub's {kind} {repository.name} has no revision {repository.revision}"
    return None
