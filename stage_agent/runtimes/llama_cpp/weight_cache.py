"""Keeps the rpc-server's own weight cache within a budget: the engine writes there with ``-c`` and never deletes.

Files are whole tensors over 10 MiB, named by their hash. Before a worker starts, the longest unused are deleted until its
stage still fits beside the rest; so the budget holds also after the load, however much of it was there already.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where the engine looks, by the environment it is given."""
    if told := environment.get("LLAMA_CACHE"):
        return Path(told) / "rpc"
    home = Path(environment.get("HOME", "/"))
    return Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "llama.cpp" / "rpc"


def make_room(directory: Path, *, budget_bytes: int, coming_bytes: int) -> bool:
    """Delete until ``coming_bytes`` more fit the budget. False when they never can: then start without a cache.

    A directory that is not there holds nothing; files that others delete meanwhile do not matter.
    """
    if coming_bytes > budget_bytes:
        return False
    files: list[tuple[float, int, Path]] = []
    with suppress(FileNotFoundError):
        for path in directory.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat()
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    held = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if held + coming_bytes <= budget_bytes:
            break
        path.unlink(missing_ok=True)
        held -= size
    return True
