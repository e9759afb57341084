"""Which files make room for a new one: the least recently used first, never one that a live assignment uses."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blob:
    """A complete file of the store. ``used_ns`` only orders."""

    sha256: str
    size_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Room:
    """What the store may take: its own budget, and the disk."""

    budget_bytes: int
    reserved_bytes: int
    """Promised to transfers under way, in full, whether or not already written."""
    reserved_free_bytes: int
    """The part of it that is not written yet."""
    disk_free_bytes: int
    keep_free_bytes: int


def victims(blobs: Iterable[Blob], pinned: Collection[str], size_bytes: int, room: Room) -> tuple[Blob, ...] | None:
    """Delete these, in order, and ``size_bytes`` fit; ``None`` when they cannot be made to fit. Ties: smaller hash first."""
    held = tuple(blobs)
    over_budget = sum(blob.size_bytes for blob in held) + room.reserved_bytes + size_bytes - room.budget_bytes
    over_disk = room.keep_free_bytes + room.reserved_free_bytes + size_bytes - room.disk_free_bytes
    excess = max(over_budget, over_disk)
    chosen: list[Blob] = []
    for blob in sorted(held, key=lambda each: (each.used_ns, each.sha256)):
        if excess <= 0:
            break
        if blob.sha256 not in pinned:
            chosen.append(blob)
            excess -= blob.size_bytes
    return tuple(chosen) if excess <= 0 else None
