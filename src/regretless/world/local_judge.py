"""A judge for smoke runs that answers at random: a small OpenAI-compatible server on loopback.

It answers each of this package's judge prompts in the requested form. Its numbers come from a hash of the prompt: they
vary, are the same in every run, and mean nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from regretless.core.terminal import console

HOST = "127.0.0.1"
KEY_VARIABLE = "REGRETLESS_LOCAL_JUDGE_KEY"
"""Environment variable that the settings name for the local judge's key, so that no real key is ever sent."""
CODE = re.compile(r"<<<begin [\w' ]+ (\w+)>>>")
"""The code in this package's judge prompts; it differs between run folders."""
HEADING = re.compile(r"^#### Output for Text (\d+)(?: \[\w+\])?$", re.MULTILINE)
LABELS = ("A>>B", "A>B", "A=B", "B>A", "B>>A")


class LocalJudge:
    """The server. `asked` counts its answers by kind: ratings, preferences, verdicts, grades."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = _Server((HOST, 0), _Handler)
        self._http.judge = self

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{HOST}:{self._http.server_address[1]}/v1"

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a chat request, as JSON; see `reply_to`."""
        kind, reply = reply_to(body)
        with self._lock:
            self.asked[kind] += 1
        return reply

    def run(self) -> None:
        """Serve until `stop`."""
        self._http.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        """Stop the server."""
        self._http.shutdown()
        self._http.server_close()


def reply_to(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind of a chat request, and a reply to it as JSON.

    Raises LookupError for a prompt that is not one of this package's.
    """
    prompt = str(body["messages"][-1]["content"])
    kind, choice = _choice(prompt, _Random(f"{body['model']}\n{prompt}"), is_preference=bool(body.get("logprobs")))
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(choice["message"]["content"].split())}
    return kind, {"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}


@contextlib.contextmanager
def serving() -> Iterator[LocalJudge]:
    """Run a judge within the block; settings without `base_url` use it meanwhile."""
    judge = LocalJudge()
    thread = threading.Thread(target=judge.run, daemon=True)
    thread.start()
    try:
        with _environment({"OPENAI_BASE_URL": judge.url, KEY_VARIABLE: "local", "NO_PROXY": HOST, "no_proxy": HOST}):
            console.print(f"local judge at {judge.url}: its ratings and verdicts are random and mean nothing")
            yield judge
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(judge.asked.items())) or "nothing was asked"
            console.print(f"local judge: {counts}; all are random and mean nothing")
    finally:
        judge.stop()
        thread.join()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block.

    The judge's address is passed this way and not through the settings, so that settings do not depend on the port.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Random:
    """Pseudo-random numbers that depend on a text alone."""

    def __init__(self, prompt: str) -> None:
        code = CODE.search(prompt)
        self._text = prompt.replace(code[1], "") if code else prompt

    def share(self, what: object = "") -> float:
        """A number from 0 to 1."""
        digest = hashlib.sha256(f"{what}\n{self._text}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 256**6

    def whole(self, low: int, high: int, what: object = "") -> int:
        """A whole number from `low` to `high`."""
        return low + int(self.share(what) * (high - low + 1) * (1 - 1e-9))


def _choice(prompt: str, random: _Random, *, is_preference: bool) -> tuple[str, dict[str, Any]]:
    """Kind of the answer, and the answer as a choice of a chat completion."""
    if is_preference:
        share = 0.02 + 0.96 * random.share()
        top: list[dict[str, Any]] = [
            {"token": token, "logprob": math.log(p)} for token, p in (("m", share), ("M", 1 - share))
        ]
        top_token = max(top, key=lambda entry: entry["logprob"])
        return "preferences", _choice_of(top_token["token"], {"content": [{**top_token, "top_logprobs": top}]})
    headings = list(HEADING.finditer(prompt))
    if headings:
        types = "Type: None\nRationale: random\n" if "\nType:" in prompt[headings[0].end() :] else ""
        blocks = [
            f"{heading[0]}\n{types}Rating: {random.whole(1, 5, heading[1])}\nRationale: random\n"
            for heading in headings
        ]
        return "ratings", _choice_of("\n".join(blocks))
    code = CODE.findall(prompt)[-1]
    if "[[A>>B]]" in prompt:
        return "verdicts", _choice_of(f"Random.\nVerdict {code}: [[{LABELS[random.whole(0, 4)]}]]")
    return "grades", _choice_of(f"Random.\nRating {code}: [[{random.whole(1, 10)}]]")


def _choice_of(content: str, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    judge: LocalJudge

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, reply = 200, self.server.judge.answer(body)
        except LookupError as error:
            status, reply = 400, {"error": {"message": f"not one of this package's judge prompts: {error}"}}
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: clients report errors."""
