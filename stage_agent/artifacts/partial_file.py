"""A file that is still arriving: what of it is known to be as received survives a crash.

``<sha256>.part`` holds the bytes, ``<sha256>.json`` says how many of them were on the disk at the last checkpoint, their
SHA-256, and which peers gave them. To resume, the part is hashed again up to that length: if it is what the record says,
the transfer goes on from there, otherwise it begins anew. A lock on the part keeps a second process away.

Methods block and may run in a thread, one at a time.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from protocol.wire import Bytes, Digest, Wire
from stage_agent.artifacts.errors import ArtifactError

CHECKPOINT_BYTES = 64 * 1_048_576
"""A crash loses at most this much of a transfer."""
HASH_CHUNK_BYTES = 1_048_576
MAX_SOURCES = 64
PART, RECORD = ".part", ".json"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class _Record(Wire):
    size_bytes: Bytes
    verified_bytes: Bytes
    prefix_sha256: Digest
    sources: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=MAX_SOURCES)] = ()


class PartialFile:
    """``position`` bytes of the ``size_bytes`` have been taken. Raises ``ArtifactError`` when the disk fails."""

    def __init__(
        self, directory: Path, sha256: str, size_bytes: int, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.sha256 = sha256
        self.size_bytes = size_bytes
        self.path = directory / f"{sha256}{PART}"
        self.position = 0
        self.sources: tuple[str, ...] = ()
        self._record = directory / f"{sha256}{RECORD}"
        self._checkpointed = 0
        self._hash = hashlib.sha256()
        self._mutex = threading.Lock()
        self._stopping = stopping
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_failure(self.path, error) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._resume()
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise ArtifactError("in_use", f"{self.path} is being written by another process; wait for it") from None
            raise disk_failure(self.path, error) from None

    @property
    def complete(self) -> bool:
        """All bytes are here; whether they are the right ones ``genuine`` says."""
        return self.position == self.size_bytes

    @property
    def genuine(self) -> bool:
        """The bytes taken have the file's SHA-256."""
        return self._hash.hexdigest() == self.sha256

    def append(self, content: bytes, source: str) -> None:
        """Take the next bytes, never more than are missing; a closed file takes none. ``source`` is who gave them."""
        with self._mutex:
            if self._descriptor < 0:
                return
            assert self.position + len(content) <= self.size_bytes
            try:
                _write_all(self._descriptor, content, self.position)
            except OSError as error:
                raise disk_failure(self.path, error) from None
            self._hash.update(content)
            self.position += len(content)
            if source not in self.sources:
                self.sources = (*self.sources, source)[-MAX_SOURCES:]
            if self.position - self._checkpointed >= CHECKPOINT_BYTES:
                self._checkpoint()

    def sync(self) -> None:
        """Everything taken is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_failure(self.path, error) from None

    def start_anew(self) -> None:
        """Forget all bytes."""
        with self._mutex:
            try:
                self._forget()
            except OSError as error:
                raise disk_failure(self.path, error) from None

    def close(self) -> None:
        """Keep what is there for a later attempt; a second call does nothing. A full disk costs only the record."""
        with self._mutex:
            if self._descriptor < 0:
                return
            with contextlib.suppress(ArtifactError):
                self._checkpoint()
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Delete it, as far as the disk lets us."""
        with self._mutex:
            with contextlib.suppress(OSError):
                self._record.unlink(missing_ok=True)
                self.path.unlink(missing_ok=True)
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    @staticmethod
    def discard_abandoned(path: Path) -> None:
        """Delete an unfinished file that no process writes; one in use stays."""
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_suffix(RECORD).unlink(missing_ok=True)
                path.unlink()
            finally:
                os.close(descriptor)

    def _resume(self) -> None:
        record = self._read_record()
        held = os.fstat(self._descriptor).st_size
        if record is None or record.size_bytes != self.size_bytes or not 0 < record.verified_bytes <= held:
            self._forget()
            return
        left = record.verified_bytes
        while left and (chunk := os.read(self._descriptor, min(left, HASH_CHUNK_BYTES))):
            if self._stopping():
                raise InterruptedError(errno.EINTR, "the node stops")
            self._hash.update(chunk)
            left -= len(chunk)
        if left or record.verified_bytes > self.size_bytes or self._hash.hexdigest() != record.prefix_sha256:
            self._forget()
            return
        os.ftruncate(self._descriptor, record.verified_bytes)
        self.position = self._checkpointed = record.verified_bytes
        self.sources = record.sources

    def _read_record(self) -> _Record | None:
        try:
            return _Record.model_validate_json(self._record.read_bytes())
        except (OSError, ValidationError):
            return None

    def _forget(self) -> None:
        self._record.unlink(missing_ok=True)
        os.ftruncate(self._descriptor, 0)
        self.position = self._checkpointed = 0
        self.sources = ()
        self._hash = hashlib.sha256()

    def _checkpoint(self) -> None:
        if self.position == self._checkpointed:
            return
        record = _Record(
            size_bytes=self.size_bytes,
            verified_bytes=self.position,
            prefix_sha256=self._hash.hexdigest(),
            sources=self.sources,
        )
        fresh = self._record.with_suffix(".new")
        try:
            os.fsync(self._descriptor)
            fresh.write_text(record.model_dump_json())
            fresh.replace(self._record)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise disk_failure(self.path, error) from None
        self._checkpointed = self.position


def disk_failure(path: Path, error: OSError) -> ArtifactError:
    """The operating system's refusal as one line."""
    if error.errno in NO_SPACE:
        return ArtifactError("disk_full", f"{path.parent}: the disk is full; make room or set node.cache_dir elsewhere")
    return ArtifactError("disk_failed", f"{path}: {error.strerror or error}; check the cache directory")


def _write_all(descriptor: int, content: bytes, offset: int) -> None:
    """At a stated place: what a failed write left behind is written over by the next one."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest = rest[written:]
        offset += written
