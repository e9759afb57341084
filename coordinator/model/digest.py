"""The content digest of a model: the same file has the same digest on every machine, whatever its path.

Hashing hundreds of gigabytes before planning is out of the question, so the digest covers a canonical description:

    SHA-256( "stagemesh-model-1" newline
             for each file in order:  u64 file size, u64 header bytes, SHA-256(header: all metadata and the tensor table),
                                      up to 16 samples of 4 KiB spread evenly over what follows the header )

The header fixes architecture, vocabulary, quantisation and every tensor's place; the samples tell apart two trainings of
one architecture, whose headers may be equal. It identifies, it does not authenticate: transfers are verified against
full per-file hashes. A layer package's digest covers the full SHA-256 of each of its files instead, see there.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.model.source import RangedSource

SAMPLES = 16
SAMPLE_BYTES = 4_096
_CHUNK_BYTES = 1024 * 1024
_SIZES = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class DescribedFile:
    """A model file and the length of its header."""

    source: RangedSource
    header_bytes: int


def content_digest(files: Iterable[DescribedFile]) -> str:
    """64 hex digits over the canonical description above."""
    digest = hashlib.sha256(b"stagemesh-model-1\n")
    for file in files:
        digest.update(_SIZES.pack(file.source.size, file.header_bytes))
        header = hashlib.sha256()
        for start in range(0, file.header_bytes, _CHUNK_BYTES):
            header.update(file.source.read(start, min(_CHUNK_BYTES, file.header_bytes - start)))
        digest.update(header.digest())
        for offset, length in _samples(file):
            digest.update(file.source.read(offset, length))
    return digest.hexdigest()


def _samples(file: DescribedFile) -> list[tuple[int, int]]:
    """Evenly spread (offset, length); the whole body when it is smaller than all samples together."""
    body = file.source.size - file.header_bytes
    if body <= SAMPLES * SAMPLE_BYTES:
        return [(file.header_bytes, body)] if body > 0 else []
    stride = (body - SAMPLE_BYTES) // (SAMPLES - 1)
    return [(file.header_bytes + index * stride, SAMPLE_BYTES) for index in range(SAMPLES)]
