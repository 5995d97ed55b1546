"""The reply cache: a file with every reply of a server, so that nothing is asked, or paid for, twice."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from regretless.core.errors import DataError
from regretless.servers.limits import Ledger, Spending

SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, label TEXT NOT NULL, reply TEXT NOT NULL, stored TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    address TEXT
);
CREATE TABLE IF NOT EXISTS spending (
    model TEXT PRIMARY KEY, requests INTEGER NOT NULL DEFAULT 0, prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0, charged_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS asking (key TEXT PRIMARY KEY, owner TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS secret (salt BLOB NOT NULL);
"""
CODE_LENGTH = 12
OPENING_SECONDS = 60.0
CLAIM_SECONDS = 30.0
"""Age of a claim from which its process counts as gone: it renews its claims several times in this time."""


class ReplyStore:
    """Replies keyed by what was asked, and their cost; a context manager.

    Each reply is one SQLite transaction, so an interrupted process leaves no partial reply.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises DataError if it is some other file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._owner = path, secrets.token_hex(8)
        with self._readable():
            # Autocommit: a statement is a transaction. The timeout covers another process that uses the same file.
            self._file = sqlite3.connect(path, timeout=OPENING_SECONDS, isolation_level=None)
            # No disk sync at every reply, yet consistent after a crash.
            self._write_ahead()
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(SCHEMA)
            self._add_addresses()
            self._file.execute(
                "INSERT INTO secret SELECT ? WHERE NOT EXISTS (SELECT 1 FROM secret)", (secrets.token_bytes(32),)
            )
            self._salt = bytes(self._file.execute("SELECT salt FROM secret").fetchone()[0])

    def _write_ahead(self) -> None:
        """Switch to a write-ahead log. Where others open a new file at the same time, SQLite does not wait for them."""
        until = time.monotonic() + OPENING_SECONDS
        while True:
            try:
                self._file.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, key: str) -> str | None:
        """The cached reply of a key, or None."""
        with self._readable():
            row = self._file.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def address(self, key: str) -> str | None:
        """Address of the server that gave a key's reply; None if there is no reply, or its file did not keep it yet."""
        with self._readable():
            row = self._file.execute("SELECT address FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def put(self, key: str, label: str, reply: str, address: str) -> None:
        """Store a reply of the server at an address. `label`: what was asked, for people who inspect the file."""
        with self._readable():
            self._file.execute(
                "INSERT OR REPLACE INTO replies (key, label, reply, address) VALUES (?, ?, ?, ?)",
                (key, label, reply, address),
            )

    def claim(self, key: str) -> bool:
        """Take a question that is about to be asked; False if somebody else, this process included, is asking it."""
        now = time.time()
        with self._readable(), self._file:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.execute("DELETE FROM asking WHERE key = ? AND at < ?", (key, now - CLAIM_SECONDS))
            taken = self._file.execute("INSERT OR IGNORE INTO asking VALUES (?, ?, ?)", (key, self._owner, now))
        return taken.rowcount == 1

    def renew(self) -> None:
        """Keep this store's claims for another `CLAIM_SECONDS`."""
        with self._readable():
            self._file.execute("UPDATE asking SET at = ? WHERE owner = ?", (time.time(), self._owner))

    def release(self, key: str) -> None:
        """Give up a claim: the question is answered, or somebody else may ask it."""
        with self._readable():
            self._file.execute("DELETE FROM asking WHERE key = ? AND owner = ?", (key, self._owner))

    def remove(self, keys: Iterable[str]) -> None:
        """Delete replies that nobody will ask for again. What they cost stays counted."""
        with self._readable():
            self._file.execute("BEGIN")
            self._file.executemany("DELETE FROM replies WHERE key = ?", ((key,) for key in keys))
            self._file.execute("COMMIT")

    def code(self, key: str) -> str:
        """Code for a key: constant within this file, and impossible to guess without the file."""
        return hmac.new(self._salt, key.encode(), hashlib.sha256).hexdigest()[:CODE_LENGTH]

    def spent(self, model: str) -> Spending:
        """Cost of all requests to a model so far."""
        with self._readable():
            row = self._file.execute(
                "SELECT requests, prompt_tokens, completion_tokens, charged_tokens FROM spending WHERE model = ?",
                (model,),
            ).fetchone()
        return Spending(*(row or ()))

    def ledger(self, model: str) -> Ledger:
        """The cost of the requests to a model, for a budget."""
        return functools.partial(self._spend, model)

    def _spend(self, model: str, spending: Spending, check: Callable[[Spending], None]) -> None:
        # Immediate: what `check` is told is still true when the cost is added.
        with self._readable(), self._file:
            self._file.execute("BEGIN IMMEDIATE")
            check(self.spent(model))
            self._file.execute("INSERT OR IGNORE INTO spending (model) VALUES (?)", (model,))
            self._file.execute(
                "UPDATE spending SET requests = requests + ?, prompt_tokens = prompt_tokens + ?, "
                "completion_tokens = completion_tokens + ?, charged_tokens = charged_tokens + ? WHERE model = ?",
                (
                    spending.requests,
                    spending.prompt_tokens,
                    spending.completion_tokens,
                    spending.charged_tokens,
                    model,
                ),
            )

    def _add_addresses(self) -> None:
        """Give a file of an earlier version, which kept no addresses, the column for them."""
        with self._file:
            self._file.execute("BEGIN IMMEDIATE")
            if "address" not in {row[1] for row in self._file.execute("PRAGMA table_info(replies)")}:
                self._file.execute("ALTER TABLE replies ADD COLUMN address TEXT")

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.path}: cannot be used as a reply cache ({error}); expected the file of an earlier run, or "
                "no file; move it away or set another path"
            ) from error
