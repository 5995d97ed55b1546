"""URLs, and objects that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from regretless.core.object_store import ObjectStore, check_location, url_of


def test_locations_when_checked_then_paths_and_urls_of_folders_pass() -> None:
    for text in ("runs/x", "/mnt/a:b/c", "s3://bucket/runs/x", "file:///mnt/runs", "local:///mnt/runs"):
        assert check_location(text) == text
    for text, problem in (
        ("s3:/bucket/x", "expected s3://bucket/x"),
        ("file:/mnt/runs", "expected file:///mnt/runs"),
        ("file://mnt/runs", "expected an absolute path in the URL, such as file:///mnt/runs/name"),
        ("local://mnt/runs", "expected an absolute path in the URL, such as local:///mnt/runs/name"),
        ("s3://bucket/", "expected a bucket and a folder in it"),
        ("https://host/x", "a web server cannot be written to"),
        ("memory://runs/x", "ends with this process"),
        ("simplecache::s3://bucket/x", "expected a single URL"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_location(text)
    for url in ("s3://bucket/runs/x", "file:///mnt/runs/x", "local:///mnt/runs/x"):
        assert url_of(Path(url)) == url
    assert url_of(Path("runs/x")) is None and url_of("/a:/b") is None


def test_object_when_its_upload_dies_half_way_then_the_old_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(f"file://{tmp_path}/store")
    store.write("a", b"old")
    (tmp_path / "new").write_bytes(b"new")

    def half(source: str, target: str) -> None:
        Path(target).write_bytes(b"n")
        raise OSError("gone")

    monkeypatch.setattr(store._system, "put_file", half)
    with pytest.raises(OSError, match="gone"):
        store.put(tmp_path / "new", "a")
    assert store.read("a") == b"old"
    monkeypatch.undo()
    before = store.list()["a"]
    store.put(tmp_path / "new", "a")
    assert store.read("a") == b"new" and store.list()["a"] != before
