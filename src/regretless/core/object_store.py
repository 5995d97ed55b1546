"""A folder in an object store: S3, Google Cloud Storage, Azure and whatever else fsspec reaches."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from regretless.core.errors import ConfigError, StorageError
from regretless.core.files import atomic_path

T = TypeVar("T")
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
BROKEN_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(?=[^/])")
"""A URL that was taken for a path, which merges its slashes."""
WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
"""Stores in which an object is there whole or not at all. Elsewhere it gets another name first, and is then renamed."""
OF_PATHS = {"file", "local"}
"""Protocols of this machine's files: an absolute path follows the two slashes."""
ONE_ROOT = {*OF_PATHS, "memory"}
"""Protocols without buckets."""
PACKAGES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Protocols for which this package has an extra of that name."""
TAGS = ("ETag", "etag", "md5Hash", "content_md5")
"""What stores call the hash of an object's content in a listing."""
PROBE = ".probe-"
"""First characters of an object that tests whether objects can be written."""
LISTINGS = 20
"""Attempts at a listing while objects are being deleted."""
CONNECTIONS = 8
"""Objects that are transferred at the same time."""


def is_url(text: str) -> bool:
    """True for `s3://bucket/name` and the like, false for a path."""
    return URL.match(text) is not None


def url_of(path: Path | str) -> str | None:
    """The URL that a path was meant to be, as `pathlib` turns s3://a/b into s3:/a/b; None for any other path."""
    text = str(path)
    if is_url(text):
        return text
    found = BROKEN_URL.match(text)
    if found is None or Path(found[1] + ":").exists():
        return None
    return f"{found[1]}://{'/' if found[1] in OF_PATHS else ''}{text[found.end() :]}"


def check_location(text: str) -> str:
    """An output folder, unchanged. Raises ValueError for a URL that cannot hold a run folder."""
    if "::" in text and "://" in text:
        raise ValueError("expected a single URL, such as s3://bucket/runs/name; a chain of them cannot be written to")
    if not is_url(text):
        if (url := url_of(text)) is not None:
            raise ValueError(f"expected {url}, with all the slashes of a URL")
        return text
    protocol, _, rest = text.partition("://")
    if not rest.strip("/") or (protocol not in ONE_ROOT and "/" not in rest.strip("/")):
        raise ValueError("expected a bucket and a folder in it, such as s3://bucket/runs/name")
    if protocol in OF_PATHS and not rest.startswith("/"):
        raise ValueError(f"expected an absolute path in the URL, such as {protocol}:///mnt/runs/name")
    if protocol in ("http", "https"):
        raise ValueError("a web server cannot be written to; expected an object store such as s3://bucket/runs/name")
    if protocol == "memory":
        raise ValueError("ends with this process; expected a folder, or an object store such as s3://bucket/runs/name")
    return text


class ObjectStore:
    """The objects below a URL, by their names relative to it.

    Credentials, region and endpoint come from where the store's own tools look for them. Raises ConfigError if the URL
    or its store's package cannot be used; the methods raise what fsspec and the store's client raise.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            # An instance of its own, without memory of earlier listings: other machines change the store.
            self._system, self._root = fsspec.core.url_to_fs(
                self.url, skip_instance_cache=True, use_listings_cache=False
            )
        except ImportError as error:
            extra = PACKAGES.get(protocol)
            advice = f"pip install 'regretless[{extra}]'" if extra else str(error)
            raise ConfigError(f"{url}: needs a package: {advice}") from error
        except Exception as error:  # a client's own errors about its settings
            raise ConfigError(f"{url}: cannot be used: {_said(error)}") from error
        self._root = self._root.rstrip("/")
        self._is_whole = protocol in WHOLE

    def check(self) -> None:
        """Raise ConfigError unless objects can be written, listed and deleted."""
        probe = f"{PROBE}{os.getpid()}"
        try:
            self.write(probe, b"")
            self.list()
            self.delete([probe])
        except Exception as error:  # every store's client has errors of its own
            raise ConfigError(
                f"{self.url}: cannot be used as a run folder: {_said(error)}; {_advice(error)}"
            ) from error

    def list(self, under: str = "") -> dict[str, str]:
        """Every object below the folder `under`, with the tag that changes with its content."""
        found = self._find(self._path(under))
        start = len(self._root) + 1
        return {path[start:]: _tag(info) for path, info in found.items() if path[start:] and not path.endswith("/")}

    def _find(self, path: str) -> Mapping[str, Any]:
        for _ in range(LISTINGS):
            self._system.invalidate_cache()
            try:
                return dict(self._system.find(path, detail=True))
            except FileNotFoundError:
                # The folder, or, where a listing is not one request, an object that was deleted meanwhile.
                if not self._system.exists(path):
                    return {}
        raise StorageError(f"{self.url}: cannot be listed, because objects keep disappearing; end other runs there")

    def read(self, name: str) -> bytes | None:
        """Content of an object; None if there is none."""
        try:
            return bytes(self._system.cat_file(self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, whether it exists or not."""
        if self._is_whole:
            self._system.pipe_file(self._path(name), content)
        else:
            self._via_rename(name, lambda path: self._system.pipe_file(path, content))

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless it exists, decided by the store itself; whether it was written."""
        path = self._path(name)
        try:
            if self._is_whole:
                self._system.pipe_file(path, content, mode="create")
            else:
                # fsspec's own `create` for these looks first and writes then.
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
                with self._system.open(path, "xb") as handle:
                    handle.write(content)
        except FileExistsError:
            return False
        except Exception as error:
            # Two at the same moment: S3 answers one of them with this.
            if "ConditionalRequestConflict" in str(error):
                return False
            raise
        return True

    def get(self, name: str, target: Path) -> None:
        """Download an object to a file, which is there whole or not at all."""
        with atomic_path(target) as temporary:
            self._system.get_file(self._path(name), str(temporary))

    def put(self, source: Path, name: str) -> None:
        """Upload a file as an object."""
        if self._is_whole:
            self._system.put_file(str(source), self._path(name))
        else:
            self._via_rename(name, lambda path: self._system.put_file(str(source), path))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in this order; a missing one is no error."""
        for name in names:
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def modified(self, name: str) -> datetime:
        """When an object was written last, by the store's clock."""
        self._system.invalidate_cache()
        found: datetime = self._system.modified(self._path(name))
        return found

    def in_parallel(self, work: Callable[[str], T], names: Iterable[str]) -> tuple[T, ...]:
        """Results of `work` for each name, computed for several at the same time."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return tuple(pool.map(work, names))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _via_rename(self, name: str, write: Callable[[str], Any]) -> None:
        folder, _, last = self._path(name).rpartition("/")
        temporary = f"{folder}/.{last}.{os.getpid()}.tmp"
        self._system.makedirs(folder, exist_ok=True)
        write(temporary)
        self._system.mv(temporary, self._path(name))


def _tag(info: Mapping[str, Any]) -> str:
    for key in TAGS:
        if info.get(key):
            return str(info[key]).strip('"')
    # Stores without hashes: what they have.
    times = [info[key] for key in ("mtime", "LastModified", "last_modified", "updated", "created") if info.get(key)]
    return f"{info.get('size')} {times[0] if times else ''}"


def failure(url: str, error: Exception, kept: Path) -> StorageError:
    """The StorageError for what a store's client raised while a run was at work."""
    return StorageError(
        f"{url}: the store cannot be used: {_said(error)}; the work is kept in {kept}, and the same command on this "
        f"machine uploads it and resumes. {_advice(error)}"
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")


def _advice(error: Exception) -> str:
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return "check the credentials, and that they may list, read, write and delete there"
    if isinstance(error, FileNotFoundError):
        return "check the name of the bucket"
    return "check the name of the bucket, the credentials, the endpoint and the network"
