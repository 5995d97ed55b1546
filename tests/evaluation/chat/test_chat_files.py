"""Files of the benchmarks that lie elsewhere."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from regretless.core.errors import ConfigError
from regretless.evaluation.chat.files import local_path, read_table


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_file_at_an_address_when_named_is_fetched_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "question set.jsonl").write_text('{"uid": 1}\n{"uid": 2}\n')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "there"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    where = f"{address}/question%20set.jsonl?download=true"
    try:
        assert [row["uid"] for row in read_table(where, ["uid"])] == [1, 2]
        with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be downloaded \(HTTP Error 404.*set the path"):
            local_path(f"{address}/none.jsonl")
    finally:
        server.shutdown()
        server.server_close()
    assert local_path(where).read_text().startswith('{"uid": 1}'), "from the cache: nobody serves it now"
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["question set.jsonl"]
