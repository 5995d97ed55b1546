"""What `regretless push` and the trainer send: read from the requests that a hub on this machine receives."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from regretless.cli import publish
from regretless.core.errors import ConfigError
from regretless.core.versions import version
from regretless.training.model_card import CARD, Facts, write_card
from regretless.training.upload import is_public, listing, uploads

SECRET = "the prompt of a customer"
PRIVATE = (
    *("pairs.parquet", "pairs.jsonl", "refused.jsonl", "pair_scores.jsonl", "responses.parquet", "replies.sqlite"),
    *("training.log", "trainer_state.json", "training_args.bin", "manifest.json", "pending.json", "card.json"),
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "log_state.json", "recipe.yaml", ".env", "notes.txt"),
    *("optimizer.safetensors", "reference.safetensors", "model.safetensors.bak", "events.out.tfevents.1"),
    *("checkpoint-2/optimizer.pt", "checkpoint-2/model.safetensors", "runs/x/events.out.tfevents.2", "pairs/index.npz"),
    *("wandb/run/files/media/table.json", "report/report.html", "report.html", "_final/model.safetensors"),
)
"""Files that a model's folder may hold, and that never go up."""
PUBLIC = {
    *("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", CARD),
    "additional_chat_templates/tool_use.jinja",
}
FACTS = Facts(
    name="base-dpo",
    objective="dpo",
    title="DPO",
    paper="arXiv:2305.18290",
    formula="loss",
    hyperparameters={},
    arguments={},
    adapter=None,
    base="base",
    base_on_hub=False,
    architecture="Qwen3ForCausalLM",
    data={},
    datasets=[],
    measured={},
    versions={"python": "3"},
    command="regretless train",
    language="bash",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a trained model in a run with a report, with everything beside it that must stay."""
    place = tmp_path / "run" / "train" / "dpo"
    for name in (*(PUBLIC - {CARD}), *PRIVATE):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("{}" if name in PUBLIC else SECRET)
    (place / "card.json").unlink()
    write_card(place, FACTS)
    report = tmp_path / "run" / "report"
    report.mkdir()
    (report / "report.html").write_text(f"<p>{SECRET}</p><footer>Made by regretless {version()} from</footer>")
    return place


class Hub(BaseHTTPRequestHandler):
    """The requests of the hub's client for one commit of small files."""

    seen: dict[str, Any]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.seen["repository"] = json.loads(body)
            self._answer({"url": "https://huggingface.co/owner/model", "id": "owner/model"})
        elif self.path == "/api/validate-yaml":
            self.seen["validated"] = json.loads(body)
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for name in names]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.seen["files"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {"success": True, "commitOid": "0" * 40, "commitUrl": "https://huggingface.co/owner/model/commit/0"}
            )
        else:
            self.send_error(404)

    def _answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a hub on this machine, and what it was sent."""
    seen: dict[str, Any] = {"files": {}}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SeenHub", (Hub,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def push(folder: Path, address: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command itself: the hub's address is read when the client is imported."""
    # A proxy of the machine would be asked for 127.0.0.1 as well.
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    own = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_none", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "regretless", "push", str(folder), "owner/model", *more]
    return subprocess.run(command, env={**kept, **own}, capture_output=True, text=True, check=False)


def test_push_when_the_folder_holds_private_files_then_the_hub_is_sent_model_tokenizer_and_card_alone(
    folder: Path, hub: tuple[str, dict[str, Any]]
) -> None:
    address, seen = hub
    done = push(folder, address, "--license", "mit")
    assert done.returncode == 0, done.stderr
    assert set(seen["files"]) == PUBLIC
    assert not [name for name, content in seen["files"].items() if SECRET.encode() in content]
    card = ModelCard(seen["files"][CARD].decode())
    assert seen["validated"]["content"] == seen["files"][CARD].decode()
    assert card.data.license == "mit"
    assert card.data.model_name == "owner/model"
    assert seen["repository"]["name"] == "model"
    assert "training_args.bin" in done.stderr  # what stays is said


def test_push_when_it_is_a_dry_run_then_it_lists_the_files_with_sizes_and_uploads_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "upload", lambda *_, **__: pytest.fail("uploaded"))
    values: dict[str, Any] = {"license": None, "private": False, "revision": None, "as_json": True}
    publish.push(folder, "owner/model", dry_run=True, with_report=True, **values)
    said = capsys.readouterr()
    listed = json.loads(said.out)["files"]
    assert set(listed) == PUBLIC | {"report.html"}
    assert listed["config.json"] == 2
    assert "shows prompts and responses" in said.err


def test_upload_when_the_report_goes_along_then_the_card_links_to_it_and_otherwise_not(folder: Path) -> None:
    report = folder.parents[1] / "report" / "report.html"
    without, _ = uploads(folder, "owner/model")
    with_it, _ = uploads(folder, "owner/model", report=report)
    assert set(listing(with_it)) - set(listing(without)) == {"report.html"}
    for found, expected in ((without, False), (with_it, True)):
        (card,) = [one.content for one in found if one.path == CARD]
        assert isinstance(card, bytes)
        assert (b"](report.html)" in card) == expected


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", CARD, "report.html"])
@pytest.mark.parametrize("secret", ["hf_" + "a1" * 17, "key-of-this-environment", "sk-" + "b2" * 12])
def test_file_with_a_secret_when_it_would_be_published_then_it_is_named_and_nothing_goes(
    name: str, secret: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "key-of-this-environment")
    monkeypatch.setenv("DB_PASSWORD", "postgres")  # a word of many texts
    report = folder.parents[1] / "report" / "report.html"
    place = report if name == "report.html" else folder / name
    text = place.read_text()
    if not text.startswith("{"):
        place.write_text(f"{text} postgres Bearer certificates")
        uploads(folder, "owner/model", report=report)
    place.write_text(f'{text} "hub_token": "{secret}"')
    with pytest.raises(ConfigError, match=rf"{name}: has a token or key in it") as refused:
        uploads(folder, "owner/model", report=report)
    assert secret not in str(refused.value)


LEAKS = r"README\.md: has a token or key in it"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("report.html", "hub_token: hf_old<footer>Made by regretless 0.1.0 from", r"report\.html: expected a page of"),
        ("report.html", f"{version()}<footer>Made by regretless {version()}.dev1 from", "`regretless report .*/run` "),
        ("report.html", f"<footer>Made by regretless {version()} from", None),
        (CARD, "---\nlicense: mit\n---\nregretless train hub_token=Mine1234", LEAKS),
        (CARD, "---\nlicense: mit\n---\nAsk https://me:Mine1234@example.org", LEAKS),
        (CARD, "---\nlicense: mit\n---\npad_token=<pad> api_key_env=KEY", None),
    ],
)
def test_upload_when_a_text_of_before_may_hold_a_secret_then_it_is_refused_without_it(
    name: str, text: str, expected: str | None, folder: Path
) -> None:
    report = folder.parents[1] / "report" / "report.html"
    (report if name == report.name else folder / name).write_text(text)
    if expected is None:
        assert name in listing(uploads(folder, "owner/model", report=report)[0])
        return
    with pytest.raises(ConfigError, match=expected) as caught:
        uploads(folder, "owner/model", report=report)
    assert "Mine1234" not in str(caught.value)


def test_names_when_they_are_not_on_the_list_then_they_stay() -> None:
    assert not [name for name in PRIVATE if is_public(name)]
    assert all(is_public(name) for name in PUBLIC)


def test_folder_that_is_no_model_when_pushed_then_everything_that_is_wrong_is_said(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("---\nlicense: mit\n---\n[More Information Needed]\n")
    with pytest.raises(ConfigError) as caught:
        uploads(tmp_path, "owner/model")
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        uploads(tmp_path, "no spaces/allowed here")
