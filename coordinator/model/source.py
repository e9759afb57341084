"""Ranged bytes: the one thing a model reader may do with a file, and a forward reader over it that trusts nothing.

A reader never holds more than one window of a file. Every length it meets is compared with what is left of the file
before anything is read or allocated, so a forged count costs an error, not memory.
"""

import struct
from typing import Protocol

from protocol.errors import ModelError

WINDOW_BYTES = 256 * 1024
"""How much of a file is held at once. Larger windows are not faster: parsing, not reading, is the cost."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class RangedSource(Protocol):
    """Random access to one file's bytes. Implementations raise ``ModelError`` and nothing else."""

    @property
    def size(self) -> int:
        """Bytes in the file."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; raises ``ModelError`` when the file is shorter than that."""


class MemorySource:
    """A file that is already in memory."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return len(self._content)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; raises ``ModelError`` when the content ends before that."""
        if offset < 0 or length < 0 or offset + length > len(self._content):
            raise ModelError(f"truncated: {length} bytes at {offset} of {len(self._content)}")
        return self._content[offset : offset + length]


class ForwardReader:
    """Reads little-endian values in order. ``limit`` bounds how far into the file it may go.

    ``where`` names the file in errors. ``offset`` is the position of the next byte.
    """

    def __init__(self, source: RangedSource, where: str, limit: int) -> None:
        self.where = where
        self._source = source
        self._end = min(source.size, limit)
        self._limited = source.size > limit
        self._window = b""
        self._window_start = 0
        self._position = 0

    @property
    def offset(self) -> int:
        """Absolute position in the file."""
        return self._window_start + self._position

    @property
    def remaining(self) -> int:
        """Bytes that may still be read."""
        return self._end - self.offset

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number; ``what`` names it in errors."""
        self._ensure(4, what)
        value: int = _U32.unpack_from(self._window, self._position)[0]
        self._position += 4
        return value

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number; ``what`` names it in errors."""
        self._ensure(8, what)
        value: int = _U64.unpack_from(self._window, self._position)[0]
        self._position += 8
        return value

    def take(self, length: int, what: str) -> bytes:
        """The next ``length`` bytes."""
        self._ensure(length, what)
        start = self._position
        self._position = start + length
        return self._window[start : self._position]

    def skip(self, length: int, what: str) -> None:
        """Pass over ``length`` bytes without reading them."""
        self._require(length, what)
        self._position += length

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over ``count`` length-prefixed strings; only their lengths are looked at.

        This loop is the reader's whole cost on a real vocabulary, so it works on locals and leaves the window only
        when a string does.
        """
        self._require(count * 8, what)
        left = count
        unpack = _U64.unpack_from
        while left:
            self._ensure(8, what)
            window = self._window
            position = self._position
            last = len(window) - 8
            passed = 0
            for _ in range(left):
                if position > last:
                    break
                position += 8 + unpack(window, position)[0]
                passed += 1
            left -= passed
            self._position = position
            if self.remaining < left * 8:
                self._fail(what)

    def _require(self, length: int, what: str) -> None:
        if length > self.remaining:
            self._fail(what)

    def _fail(self, what: str) -> None:
        if self._limited:
            raise ModelError(f"{self.where}: its header runs past {self._end} bytes (in {what}); refused")
        raise ModelError(f"{self.where}: truncated or damaged in {what} (at byte {min(self.offset, self._end)})")

    def _ensure(self, length: int, what: str) -> None:
        if self._position + length <= len(self._window):
            return
        self._require(length, what)
        start = self.offset
        self._window = self._source.read(start, min(max(length, WINDOW_BYTES), self._end - start))
        self._window_start = start
        self._position = 0
