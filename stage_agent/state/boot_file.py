"""The boot counter's second home: one checksummed line, replaced atomically.

The counter orders a node's rows at its peers, so it must survive the loss of the database: a node that set a corrupt
store aside and began again at 1 would be outranked by its own past for a day. The file also convicts a database that
was rolled back (an old copy restored, a write-ahead log lost): its counter is then lower than the one here.
"""

import hashlib
import os
from pathlib import Path

_NAME = "boot_counter"


def read_boot_file(directory: Path) -> int:
    """The counter, 0 when there is no file or it does not verify. Raises ``OSError`` when it cannot be read."""
    try:
        text = (directory / _NAME).read_text("ascii", "replace")
    except FileNotFoundError:
        return 0
    number, _, checksum = text.strip().partition(" ")
    return int(number) if checksum == _checksum(number) and number.isdecimal() else 0


def write_boot_file(directory: Path, counter: int) -> None:
    """Durable when this returns; a crash leaves the old or the new line. Raises ``OSError``."""
    write_durably(directory / _NAME, f"{counter} {_checksum(str(counter))}\n".encode("ascii"))


def write_durably(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: temporary file, fsync, rename, fsync of the directory. Raises ``OSError``."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in ``directory`` durable. Raises ``OSError``."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(number: str) -> str:
    return hashlib.sha256(f"boot {number}".encode()).hexdigest()[:16]
