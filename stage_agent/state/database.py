"""The SQLite file under the store: exclusive lock, opening, verification, setting a damaged file aside."""

import fcntl
import hashlib
import json
import os
import sqlite3
from pathlib import Path

from protocol.errors import StateError
from stage_agent.state.boot_file import write_durably
from stage_agent.state.faults import database_fault, means_corrupt
from stage_agent.state.wal import lost_transactions

SCHEMA_VERSION = 1
DATABASE_NAME = "state.db"
MAX_SET_ASIDE = 8
PROBE_BYTES = 65_536
"""Room that must be there before anything is opened: an empty store and some writes."""
NODE_SPACE = "node"
"""Where the boot counter, the last term and the amnesia mark are kept."""

_HEADER = b"SQLite format 3\0"
_CREATE = """CREATE TABLE documents (space TEXT NOT NULL, key TEXT NOT NULL, text TEXT NOT NULL, sum TEXT NOT NULL,
PRIMARY KEY (space, key)) WITHOUT ROWID"""


class DamagedError(Exception):
    """The file at hand is not a sound store. Becomes amnesia in ``StateStore.open`` and is never seen outside."""


def probe_disk(directory: Path) -> None:
    """Write and remove ``PROBE_BYTES``, so that a full or read-only disk is named before anything is touched."""
    probe = directory / "probe"
    write_durably(probe, bytes(PROBE_BYTES))
    probe.unlink()


def lock_directory(directory: Path) -> int:
    """A descriptor that holds the directory's lock. Raises ``StateError`` when another process has it."""
    descriptor = os.open(directory / "state.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StateError(
            f"the state directory {directory} is in use by another stagemesh daemon: stop it or set node.state_dir"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def connect(path: Path, boot_floor: int) -> sqlite3.Connection:
    """Open and verify. Raises ``DamagedError`` for a bad file, ``StateError`` for a bad disk or a newer schema."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    header = os.read(descriptor, len(_HEADER))
    os.close(descriptor)
    if header not in (b"", _HEADER):
        raise DamagedError  # SQLite would take a file of a few stray bytes for an empty one and overwrite it
    if lost_transactions(path.with_name(f"{path.name}-wal")):
        raise DamagedError
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
    try:
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}").fetchone()
        _prepare_schema(connection, path)
        _verify(connection, boot_floor)
    except sqlite3.Error as error:
        connection.close()
        if means_corrupt(error):
            raise DamagedError from None
        raise database_fault(error, path) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StateError(
            f"{path} was written by a newer stagemesh (format {version}, this one knows {SCHEMA_VERSION}): upgrade"
        )
    if version == 0:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_CREATE)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")


def _verify(connection: sqlite3.Connection, boot_floor: int) -> None:
    """Structure, every document's checksum, and that the boot counter did not go back. Raises ``DamagedError``."""
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise DamagedError
    counter = 0
    for space, key, text, stored in connection.execute("SELECT space, key, text, sum FROM documents"):
        if stored != checksum(space, key, text):
            raise DamagedError
        if (space, key) == (NODE_SPACE, "boot_counter"):
            counter = json.loads(text)["value"]
    if counter < boot_floor:
        raise DamagedError


def set_aside(path: Path) -> Path:
    """Rename the damaged file and its log; keep the newest ``MAX_SET_ASIDE``. Raises ``OSError``."""
    earlier = sorted(path.parent.glob(f"{path.name}.corrupt-*[0-9]"), key=_number_of)
    for old in earlier[: max(0, len(earlier) - MAX_SET_ASIDE + 1)]:
        old.unlink()
        old.with_name(f"{old.name}.wal").unlink(missing_ok=True)
    target = path.with_name(f"{path.name}.corrupt-{_number_of(earlier[-1]) + 1 if earlier else 1}")
    log = path.with_name(f"{path.name}-wal")
    if log.exists():
        log.rename(target.with_name(f"{target.name}.wal"))
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    return path.rename(target)


def _number_of(aside: Path) -> int:
    return int(aside.name.rpartition("-")[2])


def checksum(space: str, key: str, text: str) -> str:
    """SHA-256 over a document's place and text: a row copied elsewhere does not verify either."""
    return hashlib.sha256(f"{space}\0{key}\0{text}".encode()).hexdigest()
