"""The content-addressed store: ``<root>/<first two digits>/<sha256>``, unfinished files in ``<root>/partial``.

A blob appears by one rename of a file that was verified and fsynced, so a blob that exists was right. It is then sealed:
read-only, with a modification time made from its name. Whoever writes to it later breaks the seal, and a blob with a
broken seal is hashed before it is used again and deleted if it is not itself. Access times order the blobs by use.

Methods block and may run in threads; one lock guards the accounts. Several processes may share a store: each deletes what
*it* does not need, and files that are open or mapped elsewhere stay readable there.
"""

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from config.settings import ArtifactSettings
from protocol.quic.private_file import sync_directory
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.eviction import Blob, Room, victims
from stage_agent.artifacts.partial_file import HASH_CHUNK_BYTES, PART, PartialFile, disk_failure

PARTIAL_DIRECTORY = "partial"
MAX_BLOBS = 100_000
"""More files than any budget of models; a directory with more is not ours to walk."""
_NAME = re.compile(r"^[0-9a-f]{64}$")
_SEAL_BASE_S = 1_000_000_000
_SEAL_SPAN_S = 0x0FFF_FFFF


class ArtifactStore:
    """``on_discard`` is called, in the calling thread, with each blob that was deleted and why."""

    def __init__(self, root: Path, settings: ArtifactSettings, on_discard: Callable[[str, int, bool], None]) -> None:
        self.root = root
        self._partials = root / PARTIAL_DIRECTORY
        self._settings = settings
        self._on_discard = on_discard
        self._mutex = threading.RLock()
        self._arriving: dict[str, PartialFile | int] = {}
        self._pins: dict[str, int] = {}
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Hashing in threads ends at its next chunk, so that a process can leave while it checks a large file."""
        self._stopping.set()

    def prepare(self) -> None:
        """Create the directories and delete what earlier runs left for too long. Raises ``ArtifactError``."""
        try:
            self._partials.mkdir(mode=0o700, parents=True, exist_ok=True)
            for entry in _entries(self._partials):
                self._drop_if_stale(entry)
        except OSError as error:
            raise disk_failure(self._partials, error) from None

    def blobs(self) -> Iterator[Blob]:
        """Every blob, in no order."""
        count = 0
        for directory in _entries(self.root):
            if len(directory.name) != 2:
                continue
            for entry in _entries(Path(directory.path)):
                if _NAME.match(entry.name) and count < MAX_BLOBS:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        count += 1
                        yield Blob(entry.name, status.st_size, status.st_atime_ns)

    def held(self, sha256: str, size_bytes: int) -> Path | None:
        """The blob, if it is here and right; marks it as used. One with a broken seal is hashed first, which takes long."""
        path = self._path(sha256)
        try:
            status = path.stat()
        except OSError:
            return None
        sealed = status.st_mtime_ns == _seal_ns(sha256)
        if status.st_size != size_bytes or not (sealed or self.verify(sha256)):
            if not self._stopping.is_set():
                self.discard(sha256, damaged=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), _seal_ns(sha256)))  # orders by use, decides nothing else
        return path

    def verify(self, sha256: str) -> bool:
        """Hash the blob again; seals it when it is right. False also when it is not here, or the node stops meanwhile."""
        path = self._path(sha256)
        try:
            if self.hash(path) != sha256:
                return False
            self._seal(path, sha256)
        except OSError:
            return False
        return True

    def hash(self, path: Path) -> str:
        """SHA-256 of any file. Raises ``OSError``, ``InterruptedError`` after ``stop``."""
        return hash_file(path, self._stopping.is_set)

    def begin(self, sha256: str, size_bytes: int) -> PartialFile:
        """Make room, and open the unfinished file of the blob. Raises ``ArtifactError``; ``end`` must follow a success."""
        with self._mutex:
            assert sha256 not in self._arriving, "one transfer a blob"
            try:
                self._partials.mkdir(mode=0o700, parents=True, exist_ok=True)  # a cache may be deleted at any time
                self._make_room(size_bytes, sha256)
            except OSError as error:
                raise disk_failure(self._partials, error) from None
            self._arriving[sha256] = size_bytes
        try:
            partial = PartialFile(self._partials, sha256, size_bytes, self._stopping.is_set)
        except ArtifactError:
            self.end(sha256)
            raise
        with self._mutex:
            self._arriving[sha256] = partial
        return partial

    def end(self, sha256: str) -> None:
        """The transfer is over, whatever became of it."""
        with self._mutex:
            self._arriving.pop(sha256, None)

    def install(self, partial: PartialFile) -> Path:
        """Make a complete, genuine partial a blob, durably. Raises ``ArtifactError``."""
        assert partial.complete
        assert partial.genuine
        path = self._path(partial.sha256)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            partial.sync()
            partial.path.replace(path)
            sync_directory(path.parent)
            self._seal(path, partial.sha256)
        except OSError as error:
            raise disk_failure(path, error) from None
        partial.discard()
        return path

    def discard(self, sha256: str, *, damaged: bool) -> None:
        """Delete a blob, if it is here."""
        path = self._path(sha256)
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._on_discard(sha256, size, damaged)

    def pin(self, hashes: Collection[str]) -> None:
        """These are in use: never evicted until ``unpin`` was called as often."""
        with self._mutex:
            for sha256 in hashes:
                self._pins[sha256] = self._pins.get(sha256, 0) + 1

    def unpin(self, hashes: Collection[str]) -> None:
        """Undo one ``pin``."""
        with self._mutex:
            for sha256 in hashes:
                left = self._pins[sha256] - 1
                if left:
                    self._pins[sha256] = left
                else:
                    del self._pins[sha256]

    def link_target(self, sha256: str) -> Path:
        """Where the blob is or will be."""
        return self._path(sha256)

    def name_of(self, path: Path) -> str | None:
        """The hash, when ``path`` is a blob of this store or a link to one."""
        target = path.readlink() if path.is_symlink() else path
        is_blob = _NAME.match(target.name) is not None and target == self._path(target.name)
        return target.name if is_blob else None

    def _seal(self, path: Path, sha256: str) -> None:
        """A crash before this leaves a blob without a seal, which is hashed when it is next used."""
        path.chmod(0o444)
        os.utime(path, ns=(time.time_ns(), _seal_ns(sha256)))

    def _path(self, sha256: str) -> Path:
        assert _NAME.match(sha256)
        return self.root / sha256[:2] / sha256

    def _make_room(self, size_bytes: int, sha256: str) -> None:
        """Evict, with the lock held. Raises ``ArtifactError('store_full')``; nothing was evicted then."""
        arriving = self._arriving.values()
        reserved = sum(each if isinstance(each, int) else each.size_bytes for each in arriving)
        written = sum(0 if isinstance(each, int) else each.position for each in arriving)
        room = Room(
            budget_bytes=self._settings.store_bytes_max,
            reserved_bytes=reserved,
            reserved_free_bytes=reserved - written,
            disk_free_bytes=self._disk_free() + self._partial_bytes(sha256),
            keep_free_bytes=self._settings.free_bytes_min,
        )
        chosen = victims([*self.blobs(), *self._abandoned(sha256)], self._pins, size_bytes, room)
        if chosen is None:
            raise ArtifactError(
                "store_full",
                f"{self.root}: no room for {size_bytes} bytes: {room.disk_free_bytes} are free, {room.keep_free_bytes} are "
                f"kept free, the store may take {room.budget_bytes}; raise artifacts.store_bytes_max or free the disk",
            )
        for blob in chosen:
            if blob.sha256.endswith(PART):
                PartialFile.discard_abandoned(self._partials / blob.sha256)
            else:
                self.discard(blob.sha256, damaged=False)

    def _abandoned(self, sha256: str) -> Iterator[Blob]:
        """Unfinished files that nobody writes now, other than the one that is wanted: they make room like blobs."""
        for entry in _entries(self._partials):
            name = entry.name.removesuffix(PART)
            if entry.name.endswith(PART) and name != sha256 and name not in self._arriving:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield Blob(entry.name, status.st_size, status.st_mtime_ns)

    def _disk_free(self) -> int:
        status = os.statvfs(self._partials)
        return status.f_bavail * status.f_frsize

    def _partial_bytes(self, sha256: str) -> int:
        """What an earlier attempt has written already is not needed again."""
        try:
            return (self._partials / f"{sha256}{PART}").stat().st_size
        except OSError:
            return 0

    def _drop_if_stale(self, entry: "os.DirEntry[str]") -> None:
        path = Path(entry.path)
        with contextlib.suppress(FileNotFoundError):
            age_us = (time.time_ns() - entry.stat().st_mtime_ns) // 1_000
            if not entry.name.endswith(PART):
                if not path.with_suffix(PART).exists():
                    path.unlink()
            elif age_us > self._settings.partial_max_age_us:
                PartialFile.discard_abandoned(path)


def hash_file(path: Path, stopping: Callable[[], bool]) -> str:
    """SHA-256 of the whole file. Raises ``OSError``; ``InterruptedError`` when ``stopping`` says so."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            if stopping():
                raise InterruptedError(f"{path}: the node stops")
            digest.update(chunk)
    return digest.hexdigest()


def _seal_ns(sha256: str) -> int:
    return (_SEAL_BASE_S + (int(sha256[:8], 16) & _SEAL_SPAN_S)) * 1_000_000_000


def _entries(directory: Path) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except OSError:
        return
