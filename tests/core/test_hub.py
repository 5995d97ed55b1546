"""The hub, played by a server on loopback: one attempt where it does not answer, and what it says about names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi, errors

from regretless.core.hub import may_be_repository
from regretless.training.train_config import TrainConfig
from tiny_model import save_tiny_model

LOADS = """
import sys, time
from regretless.core.errors import RegretlessError
from regretless.evaluation.chat.files import local_path
from regretless.modeling.load import ModelConfig, load_model, load_tokenizer
from regretless.data.prompts import PromptSource, load_prompts
from regretless.data.sources import open_source
import datasets  # two seconds that are not the hub's

for load in (
    lambda: load_tokenizer(ModelConfig(name_or_path="owner/model")),
    lambda: load_model(ModelConfig(name_or_path="owner/model")),
    lambda: load_prompts(PromptSource(dataset="owner/data")),
    lambda: open_source("owner/data"),
    lambda: local_path("hf://datasets/owner/data/file.csv"),
):
    try:
        print("loaded", type(load()).__name__, flush=True)
    except RegretlessError as error:
        print("refused", str(error).splitlines()[0], flush=True)
"""


def python(code: str, endpoint: str, home: Path, *arguments: str) -> list[str]:
    """Lines that a program prints whose hub is at `endpoint`."""
    # A proxy of this machine would answer in the hub's place.
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stderr
    return done.stdout.splitlines()


@contextmanager
def silent() -> Iterator[tuple[str, list[Any]]]:
    """Address of a server that takes connections and says nothing, and the connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[Any] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        for connection in taken:
            connection.close()
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_hub_when_it_says_nothing_then_it_is_asked_once_for_everything(tmp_path: Path) -> None:
    with silent() as (endpoint, taken):
        said = python(LOADS, endpoint, tmp_path)
        assert len(said) == 5
        assert all(line.startswith("refused") and "does not answer within 5 seconds" in line for line in said), said
        assert len(taken) == 1


@pytest.mark.slow
def test_hub_when_nothing_listens_then_every_load_says_so_without_trying_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    said = python(LOADS, endpoint, tmp_path)
    assert all(line.startswith("refused") and f"{endpoint} cannot be reached" in line for line in said), said


@pytest.mark.slow
def test_model_in_the_cache_when_the_hub_does_not_answer_then_it_is_loaded_from_there(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    reference = snapshot.parents[1] / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text("abc")
    save_tiny_model(snapshot)
    with silent() as (endpoint, taken):
        said = python(LOADS, endpoint, tmp_path)
        assert said[:2] == ["loaded Qwen2Tokenizer", "loaded Qwen3ForCausalLM"] or said[1] == "loaded Qwen3ForCausalLM"
        assert said[0].startswith("loaded")
        assert len(taken) == 1


class _Hub(BaseHTTPRequestHandler):
    """Knows owner/model, its branch `main`, and owner/gated, whose terms nobody has accepted."""

    def do_HEAD(self) -> None:
        self._reply(200, {})

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = {"id": "x", "sha": "abc", "gated": False, "siblings": []}
        if path in ("/api/models/owner/model", "/api/datasets/owner/data", "/api/models/owner/model/revision/main"):
            self._reply(200, known)
        elif path == "/api/models/owner/gated":
            self._reply(200, known | {"gated": "manual"})
        elif path == "/api/models/owner/gated/auth-check":
            self._reply(403, {}, "GatedRepo")
        elif path.startswith("/api/models/owner/model/revision/"):
            self._reply(404, {}, "RevisionNotFound")
        elif path == "/api/models/owner/broken":
            self._reply(500, {})
        else:
            self._reply(404, {}, "RepoNotFound")

    def _reply(self, code: int, value: Any, error: str = "") -> None:
        body = b"" if self.command == "HEAD" else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_hub_when_asked_about_names_then_it_says_which_cannot_be_used(hub: str, tmp_path: Path) -> None:
    code = """
from regretless.core.hub import Repository, missing
asked = [Repository("model", "owner/model"), Repository("model", "owner/model", "main"),
    Repository("model", "owner/model", "nope"), Repository("model", "owner/gated"), Repository("model", "owner/broken"),
    Repository("model", "owner/mdoel"), Repository("dataset", "owner/data"), Repository("dataset", "owner/model")]
for repository, problem in missing(asked).items(): print(repository.name, repository.revision, problem)
"""
    said = sorted(python(code, hub, tmp_path))
    assert len(said) == 4, said
    assert said[0].startswith("owner/gated None the hub's model owner/gated has terms that you have not accepted")
    assert said[1].startswith("owner/mdoel None there is no such file or folder, and no such model on the hub")
    assert said[2].startswith("owner/model None there is no such file or folder, and no such data set")
    assert said[3] == "owner/model nope the hub's model owner/model has no revision nope"


def test_names_when_they_look_like_paths_then_the_hub_is_not_asked() -> None:
    assert all(map(may_be_repository, ("gpt2", "Qwen/Qwen3-0.6B-Base", "owner/data.v1")))
    for path in ("/a/b", "./a", "../a", "~/a", "a/b/c", "pairs.jsonl", "data/pairs.parquet", "", "a b", "{run}/x"):
        assert not may_be_repository(path)


def answered(code: int) -> errors.HfHubHTTPError:
    return errors.HfHubHTTPError("no", response=httpx.Response(code, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("offline", "who", "said"),
    [
        (True, {}, "offline mode is on"),
        (False, errors.LocalTokenNotFoundError("none"), "no token is logged in"),
        (False, answered(401), "the hub refuses the token"),
        (False, answered(503), None),
        (False, {"auth": {"accessToken": {"role": "read"}}}, "the token may only read"),
        (False, {"auth": {"accessToken": {"role": "write"}}}, None),
        (False, {"auth": {"accessToken": {"role": "fineGrained"}}}, None),
    ],
)
def test_training_that_uploads_when_the_hub_would_refuse_it_then_it_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, offline: bool, who: Any, said: str | None
) -> None:
    asked = []

    def whoami(api: HfApi) -> Any:
        asked.append(api.token)
        if isinstance(who, Exception):
            raise who
        return who

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("regretless.core.hub._look", lambda endpoint: None)
    monkeypatch.setattr("regretless.core.hub._looks", {})
    monkeypatch.setattr(HfApi, "whoami", whoami)
    given = {"push_to_hub": True, "hub_model_id": "owner/model", "hub_token": "hf_given"}
    problems = [
        problem for problem in TrainConfig.parse(given, "train").problems_here("repo") if "push_to_hub" in problem
    ]
    assert [problem.startswith(f"push_to_hub: {said}") for problem in problems] == ([True] if said else [])
    assert asked == ([] if offline else ["hf_given"])
    asked.clear()
    assert not TrainConfig.parse({}, "train").problems_here("repo") and not asked
