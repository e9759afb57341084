"""SHA-256 of model files that are not in the store: computed when first asked for, kept as long as the file is unchanged.

A file is the same while path, size and modification time are. Hashing runs in one thread at a time (about a core at
400 MB/s); meanwhile peers are told that the file is being prepared. Results survive restarts in a small JSON file in the
cache directory, which may be deleted at any time.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_REMEMBERED = 4_096
MAX_FILE_BYTES = 8 * 1_048_576

Stamp = tuple[str, int, int]
"""Path, size, modification time in nanoseconds."""


def stamp_of(path: Path) -> Stamp | None:
    """``None`` when it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (str(path), status.st_size, status.st_mtime_ns)


class FileHashes:
    """``start(hashing, name)`` runs a coroutine in the node's task group; ``hash_file`` blocks and raises ``OSError``."""

    def __init__(self, remembered: Path, start: Callable[[Any, str], object], hash_file: Callable[[Path], str]) -> None:
        self._remembered = remembered
        self._hash_file = hash_file
        self._start = start
        self._known: dict[Stamp, str] = _read(remembered)
        self._wanted: set[Stamp] = set()
        self._one_at_a_time = asyncio.Lock()

    def get(self, path: Path) -> str | None:
        """The hash, if it is known for the file as it is now; otherwise it will be, later."""
        stamp = stamp_of(path)
        if stamp is None:
            return None
        known = self._known.get(stamp)
        if known is None and stamp not in self._wanted and len(self._wanted) < MAX_REMEMBERED:
            self._wanted.add(stamp)
            self._start(self._hash(stamp), f"hash {path.name}")
        return known

    def forget(self, path: Path) -> None:
        """The file may have changed without its time telling."""
        self._known = {stamp: value for stamp, value in self._known.items() if stamp[0] != str(path)}

    async def _hash(self, stamp: Stamp) -> None:
        path = Path(stamp[0])
        try:
            async with self._one_at_a_time:
                value = await asyncio.to_thread(self._hash_file, path)
                if stamp_of(path) == stamp:
                    self._learn(stamp, value)
                    await asyncio.to_thread(self._write, list(self._known.items()))
        except OSError:
            return  # unreadable: asked for again, tried again
        finally:
            self._wanted.discard(stamp)

    def _learn(self, stamp: Stamp, value: str) -> None:
        self._known[stamp] = value
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def _write(self, known: list[tuple[Stamp, str]]) -> None:
        fresh = self._remembered.with_suffix(f".{os.getpid()}.new")
        with contextlib.suppress(OSError):  # hashed again after the next start
            fresh.write_text(json.dumps([[*stamp, value] for stamp, value in known]))
            fresh.replace(self._remembered)


def _read(path: Path) -> dict[Stamp, str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return {}
        rows = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    known: dict[Stamp, str] = {}
    for row in rows if isinstance(rows, list) else ():
        match row:
            case [str(name), int(size), int(modified_ns), str(value)]:
                known[name, size, modified_ns] = value
    return known
