"""What must survive a restart: boot counter, last term, promises and plans per slot, tombstones, admissions, models.

One SQLite file in WAL mode with ``synchronous=FULL``: a call that returned is on the disk. Measured here: 0.28 ms a
write against 0.45 ms (p99 of both 3 to 4 ms on a shared virtual disk) for a checksummed file with fsync, rename and
directory fsync, and it keeps several documents consistent with each other. ``locking_mode=EXCLUSIVE`` keeps SQLite
from mapping a shared-memory file, which would end the process by SIGBUS on a full disk.

One daemon per directory: an advisory lock on ``state.lock`` is held while the store is open and ends with the process.

Trust: SQLite checks pages' structure but not their bytes, so every document carries a SHA-256 over its place and text,
verified for the whole file at opening. A file that does not verify is renamed (``state.db.corrupt-N``, the newest
``MAX_SET_ASIDE`` are kept), an empty one takes its place and ``amnesia`` is true, in this and every later process,
until ``clear_amnesia``: promises made before are forgotten, and peers have to know that. A damaged file is never
repaired or read from, except for the boot counter, which has a second home (``boot_file``) so that it never goes back.

Errors are ``StateError`` sentences; the store is then as it was before the call. After a failed write it stays usable:
the disk may be emptied while the daemon runs. Calls block for the time of one fsync and may come from any thread.
"""

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from protocol.errors import StateError
from stage_agent.state.boot_file import read_boot_file, sync_directory, write_boot_file
from stage_agent.state.database import (
    DATABASE_NAME,
    NODE_SPACE,
    DamagedError,
    checksum,
    connect,
    lock_directory,
    probe_disk,
    set_aside,
)
from stage_agent.state.faults import database_fault, disk_fault

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""One document, encoded. A stage assignment with its bound of 4 096 artifacts is under 2.6 MB."""
MAX_DOCUMENTS_PER_SPACE = 8_192

Document = dict[str, Any]

_SLOTS = "slots"
_PUT = """INSERT INTO documents VALUES (?, ?, ?, ?)
ON CONFLICT (space, key) DO UPDATE SET text = excluded.text, sum = excluded.sum"""


@dataclass(frozen=True, slots=True)
class BootRecord:
    """What a new process starts from. ``boot_counter`` ≥ 1 is higher than in every earlier process of this directory."""

    boot_counter: int
    last_term: int


class StateStore:
    """The open store of one state directory. Made by ``open``; a context manager."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock_descriptor: int) -> None:
        self.directory = directory
        self._connection = connection
        self._lock_descriptor = lock_descriptor
        self._mutex = threading.Lock()
        self._closed = False
        self.set_aside: Path | None = None
        """Where the damaged file went, when this opening found one."""

    @classmethod
    def open(cls, state_dir: Path) -> Self:
        """Lock and open ``state_dir``, creating what is missing (directory 0700, files 0600).

        Raises ``StateError``: full disk, read-only, no permission, in use by another daemon, written by a newer version.
        """
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = lock_directory(state_dir)
        except OSError as error:
            raise disk_fault(error, state_dir) from None
        try:
            probe_disk(state_dir)
            return cls._open_locked(state_dir, descriptor)
        except OSError as error:
            os.close(descriptor)
            raise disk_fault(error, state_dir) from None
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _open_locked(cls, directory: Path, descriptor: int) -> Self:
        path = directory / DATABASE_NAME
        aside: Path | None = None
        boot_floor = read_boot_file(directory)
        try:
            connection = connect(path, boot_floor)
        except DamagedError:
            aside = set_aside(path)
            connection = connect(path, 0)
        sync_directory(directory)
        store = cls(directory, connection, descriptor)
        store.set_aside = aside
        if aside is not None:
            store._start_forgetful(boot_floor)
        return store

    def _start_forgetful(self, boot_floor: int) -> None:
        """Mark a fresh store as the successor of a lost one, in one write."""
        with self._writing() as connection:
            for key, value in (("amnesia", 1), ("boot_counter", boot_floor)):
                _put(connection, NODE_SPACE, key, {"value": value})

    @property
    def amnesia(self) -> bool:
        """True from the moment a damaged store was set aside until ``clear_amnesia``, restarts included."""
        return self.get(NODE_SPACE, "amnesia") is not None

    def clear_amnesia(self) -> None:
        """Say that everything forgotten has been learnt again or made harmless."""
        self.remove(NODE_SPACE, "amnesia")

    def boot(self) -> BootRecord:
        """Count this process start. The new counter is durable, in both its homes, before it is returned."""
        counter = 1 + max(self._number("boot_counter"), self._read_boot_file())
        self.put(NODE_SPACE, "boot_counter", {"value": counter})
        try:
            write_boot_file(self.directory, counter)
        except OSError as error:
            raise disk_fault(error, self.directory) from None
        return BootRecord(counter, self._number("last_term"))

    def raise_boot_counter(self, at_least: int) -> int:
        """Make this boot's counter ``at_least``, when peers remember a higher one; returns the counter now valid."""
        counter = max(self._number("boot_counter"), at_least)
        self.put(NODE_SPACE, "boot_counter", {"value": counter})
        try:
            write_boot_file(self.directory, counter)
        except OSError as error:
            raise disk_fault(error, self.directory) from None
        return counter

    def persist_term(self, term: int) -> None:
        """Remember ``term`` as used. A lower one than already remembered changes nothing."""
        if term > self._number("last_term"):
            self.put(NODE_SPACE, "last_term", {"value": term})

    def persist_slot(self, slot: str, document: Document) -> None:
        """Replace what slot ``slot`` promised, accepted and activated."""
        self.put(_SLOTS, slot, document)

    def slots(self) -> dict[str, Document]:
        """The last document of every slot."""
        return self.documents(_SLOTS)

    def put(self, space: str, key: str, document: Document) -> None:
        """Store a small JSON document; durable on return. Raises ``StateError`` also above the two bounds."""
        with self._writing() as connection:
            known = connection.execute("SELECT 1 FROM documents WHERE space = ? AND key = ?", (space, key)).fetchone()
            (count,) = connection.execute("SELECT count(*) FROM documents WHERE space = ?", (space,)).fetchone()
            if known is None and count >= MAX_DOCUMENTS_PER_SPACE:
                raise StateError(f"{space} already holds {MAX_DOCUMENTS_PER_SPACE} documents: remove some first")
            _put(connection, space, key, document)

    def get(self, space: str, key: str) -> Document | None:
        """One document, or ``None``."""
        rows = self._read("SELECT key, text FROM documents WHERE space = ? AND key = ?", (space, key))
        return rows.get(key)

    def documents(self, space: str) -> dict[str, Document]:
        """All documents of ``space`` by key, sorted."""
        return self._read("SELECT key, text FROM documents WHERE space = ? ORDER BY key", (space,))

    def remove(self, space: str, key: str) -> None:
        """Forget a document; no error when there is none. Durable on return."""
        with self._writing() as connection:
            connection.execute("DELETE FROM documents WHERE space = ? AND key = ?", (space, key))

    def close(self) -> None:
        """Release file and lock; harmless when repeated."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                # A checkpoint that fails at closing loses nothing: the log stays and is read at the next opening.
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
                os.close(self._lock_descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number(self, key: str) -> int:
        document = self.get(NODE_SPACE, key)
        return int(document["value"]) if document else 0

    def _read_boot_file(self) -> int:
        try:
            return read_boot_file(self.directory)
        except OSError as error:
            raise disk_fault(error, self.directory) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One durable transaction; rolled back on any error."""
        with self._mutex:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise database_fault(error, self.directory / DATABASE_NAME) from None
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _read(self, query: str, values: tuple[str, ...]) -> dict[str, Document]:
        with self._mutex:
            try:
                return {key: json.loads(text) for key, text in self._connection.execute(query, values)}
            except sqlite3.Error as error:
                raise database_fault(error, self.directory / DATABASE_NAME) from None


def _put(connection: sqlite3.Connection, space: str, key: str, document: Document) -> None:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if len(text) > MAX_DOCUMENT_BYTES:
        raise StateError(f"{space}/{key}: a document of {len(text)} bytes is over {MAX_DOCUMENT_BYTES}")
    connection.execute(_PUT, (space, key, text, checksum(space, key, text)))
