"""Tells a torn write-ahead log from a damaged one.

After a crash SQLite replays the log up to the first frame that does not verify and silently forgets the rest. For the last
transaction that is right: it was never acknowledged. In the middle it is not: transactions that came after a damaged
frame began only when the ones before had been synced and acknowledged, so promises would be lost without a word. This
reads the log before SQLite does and looks for such a frame.

Format (SQLite's file format document, "Write-Ahead Log Format"): a header of 32 bytes, then frames of 24 bytes and one
page. A frame belongs to this log when it repeats the header's salts, ends a transaction when its second word is not zero,
and verifies when the checksum accumulated over all frames so far is the one it carries.
"""

import struct
from pathlib import Path

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC_LITTLE, _MAGIC_BIG = 0x377F0682, 0x377F0683
_MASK = 0xFFFFFFFF
MAX_LOG_BYTES = 256 * 1024 * 1024
"""A longer log is not ours: SQLite folds it into the database at 4 MB."""


def lost_transactions(path: Path) -> bool:
    """Whether an acknowledged transaction stands behind a frame that does not verify. Raises ``OSError``.

    False for no log, an empty one, one whose header was never written, and one that is torn at its end. A header that does
    not verify is damage: it lies within one disk sector, which is not written by halves.
    """
    try:
        with path.open("rb") as file:
            log = file.read(MAX_LOG_BYTES)
    except FileNotFoundError:
        return False
    if len(log) <= _HEADER.size or not any(log[: _HEADER.size]):
        return False
    magic, _, page_bytes, _, *salts, first, second = _HEADER.unpack_from(log)
    words = "<" if magic == _MAGIC_LITTLE else ">"
    if magic not in {_MAGIC_LITTLE, _MAGIC_BIG} or _accumulate((0, 0), log[:24], words) != (first, second):
        return True
    bad = _first_bad_frame(log, page_bytes, tuple(salts), (first, second), words)
    return _commits_from(log, bad, page_bytes, tuple(salts)) >= 2


def _first_bad_frame(log: bytes, page_bytes: int, salts: tuple[int, ...], checksum: tuple[int, int], words: str) -> int:
    """Offset of the first frame that does not verify, or of the end."""
    size = _FRAME.size + page_bytes
    offset = _HEADER.size
    while offset + size <= len(log):
        _, _, *frame_salts, first, second = _FRAME.unpack_from(log, offset)
        checksum = _accumulate(checksum, log[offset : offset + 8], words)
        checksum = _accumulate(checksum, log[offset + _FRAME.size : offset + size], words)
        if tuple(frame_salts) != salts or checksum != (first, second):
            break
        offset += size
    return offset


def _commits_from(log: bytes, offset: int, page_bytes: int, salts: tuple[int, ...]) -> int:
    """Ends of transactions at and after ``offset``. The first may be the torn one's; a second proves that it was synced."""
    size = _FRAME.size + page_bytes
    commits = 0
    while offset + size <= len(log):
        _, pages_after, *frame_salts, _, _ = _FRAME.unpack_from(log, offset)
        commits += tuple(frame_salts) == salts and pages_after != 0
        offset += size
    return commits


def _accumulate(checksum: tuple[int, int], content: bytes, words: str) -> tuple[int, int]:
    """SQLite's running checksum over pairs of 32-bit words."""
    first, second = checksum
    values = struct.unpack(f"{words}{len(content) // 4}I", content)
    for even, odd in zip(values[::2], values[1::2], strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second
