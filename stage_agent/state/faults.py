"""Turns what the operating system or SQLite says about the state directory into one sentence with a remedy."""

import errno
import sqlite3
from pathlib import Path

from protocol.errors import StateError

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space and start again",
    errno.EDQUOT: "the disk quota is used up: free some space and start again",
    errno.EFBIG: "the file size limit is reached: raise it (ulimit -f) and start again",
    errno.EROFS: "the file system is read-only: mount it writable or set node.state_dir",
    errno.EACCES: "no permission: give this user the directory or set node.state_dir",
    errno.EPERM: "no permission: give this user the directory or set node.state_dir",
    errno.ENOTDIR: "part of the path is not a directory: set node.state_dir to a directory",
    errno.EEXIST: "the path is not a directory: set node.state_dir to a directory",
    errno.EIO: "the disk reports an I/O error: check the disk, then start again",
    errno.ENOLCK: "the file system has no locks: put node.state_dir on a local disk",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n) and start again",
}
_SQLITE_REMEDIES = {
    sqlite3.SQLITE_FULL: _REMEDIES[errno.ENOSPC],
    sqlite3.SQLITE_READONLY: _REMEDIES[errno.EROFS],
    sqlite3.SQLITE_PERM: _REMEDIES[errno.EACCES],
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check owner and permissions of the directory",
    sqlite3.SQLITE_IOERR: "the disk refused a read or write (full, failing, or over a size limit): check it",
    sqlite3.SQLITE_BUSY: "another program has the file open: stop it",
}
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def disk_fault(error: OSError, path: Path) -> StateError:
    """The error to raise for ``error`` on ``path``."""
    remedy = _REMEDIES.get(error.errno or 0, (error.strerror or type(error).__name__).lower())
    return StateError(f"cannot use the state directory {path}: {remedy}")


def database_fault(error: sqlite3.Error, path: Path) -> StateError:
    """The error to raise when SQLite cannot write to or read from a sound file at ``path``."""
    remedy = _SQLITE_REMEDIES.get(_primary_code(error), str(error))
    return StateError(f"cannot use the state file {path}: {remedy}")


def means_corrupt(error: sqlite3.Error) -> bool:
    """Whether the file itself is damaged, as opposed to a disk that is full, read-only or failing."""
    return _primary_code(error) in _CORRUPT


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's extended codes keep the primary code in the low byte."""
    code = getattr(error, "sqlite_errorcode", None)
    return code & 0xFF if isinstance(code, int) else 0
