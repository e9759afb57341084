"""Files that hold secrets or promises: 0600, written whole or not at all, on the disk before they are believed."""

import contextlib
import os
from pathlib import Path

from protocol.errors import StateError


def write_private(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write atomically and fsync file and directory. Raises ``StateError``; what was there before is then untouched.

    With ``replace=False`` an existing file is never overwritten: ``FileExistsError``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with contextlib.ExitStack() as cleanup:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            cleanup.callback(_unlink, temporary)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.replace(path)
            else:
                os.link(temporary, path)
            sync_directory(path.parent)
    except FileExistsError:
        if not replace:
            raise
        raise StateError(f"{path.parent}: a temporary file is in the way; try again") from None
    except OSError as error:
        raise StateError(f"cannot write {path}: {error.strerror}; make room or fix the directory's owner") from None


def make_private_directory(path: Path) -> None:
    """Create a directory (and parents) with mode 0700; an existing one is left as it is. Raises ``StateError``."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateError(f"cannot create {path}: {error.strerror}; choose another --state-dir") from None


def read_private(path: Path) -> bytes | None:
    """The content, or None when there is no such file. Raises ``StateError`` when it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cannot read {path}: {error.strerror}; run as the user who owns it") from None


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
