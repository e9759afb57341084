"""The GGUF header: metadata and tensor table of one file, without its weights and without its vocabulary.

Layout (versions 2 and 3, little-endian): magic, version, tensor count, metadata count, then the metadata pairs, then one
entry per tensor, then padding to ``general.alignment`` (32), then the tensors' bytes, each at an offset relative to that
point. Version 1 and big-endian files are refused by name.

Everything is bounded before it is read: counts, lengths, dimensions, the header's size. Arrays longer than a layer table
are passed over (``Skipped``), so a vocabulary of 150 000 entries costs the walk over its lengths and no memory.
Every defect is a ``ModelError`` that names the file and the place.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from coordinator.model.source import ForwardReader, RangedSource
from coordinator.model.tensor_types import GGML_TYPES, REMOVED_GGML_TYPES, TensorType
from protocol.errors import ModelError

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""Of a file, and of all shards together. The largest known header (262 k vocabulary with merges) is about 25 MB."""
MAX_METADATA_PAIRS = 4_096
MAX_TENSORS = 16_384
"""In a file, and in all shards together; the largest known models have about 2 000."""
MAX_KEY_BYTES = 1_024
MAX_TENSOR_NAME_BYTES = 256
MAX_KEPT_STRING_BYTES = 1_024
MAX_KEPT_ARRAY_ITEMS = 2_048
MAX_KEPT_ITEMS = 131_072
"""Array items kept over the whole header; arrays that come later are passed over."""
MAX_SKIPPED_STRINGS = 2_000_000
"""Strings in arrays over the whole header; the largest known vocabulary with merges has 0.8 million."""
MAX_ALIGNMENT = 1 << 20
MAX_DIMENSION = 1 << 53

_SCALARS = {
    code: struct.Struct(layout)
    for code, layout in {
        0: "<B",
        1: "<b",
        2: "<H",
        3: "<h",
        4: "<I",
        5: "<i",
        6: "<f",
        7: "<B",
        10: "<Q",
        11: "<q",
        12: "<d",
    }.items()
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class Skipped:
    """A value the reader passed over: a long string (``count`` bytes) or array (``count`` items)."""

    count: int


MetadataValue = int | float | str | tuple[int | float, ...] | Skipped


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file. ``offset`` counts from the start of the file; ``shape`` is in GGUF order, rows first."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one GGUF file says about itself. Every tensor lies inside the file and overlaps no other."""

    where: str
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorEntry, ...]
    header_bytes: int
    file_bytes: int


def read_gguf_header(source: RangedSource, where: str) -> GgufHeader:
    """Read one file's header; ``where`` names the file in errors. Raises ``ModelError`` for every defect."""
    if source.size == 0:
        raise ModelError(f"{where}: the file is empty")
    reader = ForwardReader(source, where, MAX_HEADER_BYTES)
    version = _read_version(reader)
    tensor_count = reader.u64("the tensor count")
    pair_count = reader.u64("the metadata count")
    _bound(tensor_count, MAX_TENSORS, where, "tensors")
    _bound(pair_count, MAX_METADATA_PAIRS, where, "metadata keys")
    metadata = _Metadata(reader).read(pair_count)
    alignment = _alignment(metadata, where)
    raw = [_read_tensor(reader) for _ in range(tensor_count)]
    header_bytes = reader.offset
    data_start = -(-header_bytes // alignment) * alignment
    tensors = tuple(_place(entry, data_start, alignment, source.size, where) for entry in raw)
    _check_layout(tensors, where)
    return GgufHeader(where, version, metadata, tensors, header_bytes, source.size)


def _read_version(reader: ForwardReader) -> int:
    if reader.take(min(4, reader.remaining), "the magic") != b"GGUF":
        raise ModelError(f"{reader.where}: not a GGUF file (it does not start with 'GGUF')")
    version = reader.u32("the version")
    if version in {2, 3}:
        return version
    if version and not version & 0xFFFF:
        raise ModelError(f"{reader.where}: a big-endian GGUF file; convert it to little-endian")
    raise ModelError(f"{reader.where}: GGUF version {version} is not supported (2 and 3 are); convert the model again")


def _bound(count: int, limit: int, where: str, what: str) -> None:
    if count > limit:
        raise ModelError(f"{where}: claims {count} {what}, more than the {limit} that are accepted")


class _Metadata:
    """Reads the key-value section; keeps budgets over the whole of it."""

    def __init__(self, reader: ForwardReader) -> None:
        self._reader = reader
        self._strings_left = MAX_SKIPPED_STRINGS
        self._items_left = MAX_KEPT_ITEMS

    def read(self, count: int) -> dict[str, MetadataValue]:
        pairs: dict[str, MetadataValue] = {}
        for _ in range(count):
            key = _read_name(self._reader, MAX_KEY_BYTES, "a metadata key")
            if key in pairs:
                raise ModelError(f"{self._reader.where}: metadata key {key!r} appears twice")
            pairs[key] = self._value(self._reader.u32(f"the type of {key}"), key)
        return pairs

    def _value(self, code: int, key: str) -> MetadataValue:
        if code == _STRING:
            return self._string(key)
        if code == _ARRAY:
            return self._array(key)
        return self._scalars(code, 1, key)[0]

    def _string(self, key: str) -> str | Skipped:
        length = self._reader.u64(f"the length of {key}")
        if length > MAX_KEPT_STRING_BYTES:
            self._reader.skip(length, key)
            return Skipped(length)
        return _decode(self._reader.take(length, key), self._reader.where, f"the value of {key}")

    def _array(self, key: str) -> tuple[int | float, ...] | Skipped:
        code = self._reader.u32(f"the item type of {key}")
        count = self._reader.u64(f"the item count of {key}")
        if code == _ARRAY:
            raise ModelError(f"{self._reader.where}: metadata key {key!r} is an array of arrays, which no model uses")
        if code == _STRING:
            _bound(count, self._strings_left, self._reader.where, f"strings in {key}")
            self._strings_left -= count
            self._reader.skip_strings(count, key)
            return Skipped(count)
        if code in _SCALARS and count > min(MAX_KEPT_ARRAY_ITEMS, self._items_left):
            self._reader.skip(count * _SCALARS[code].size, key)
            return Skipped(count)
        self._items_left -= count
        return self._scalars(code, count, key)

    def _scalars(self, code: int, count: int, key: str) -> tuple[int | float, ...]:
        layout = _SCALARS.get(code)
        if layout is None:
            raise ModelError(f"{self._reader.where}: metadata key {key!r} has the unknown value type {code}")
        content = self._reader.take(layout.size * count, key)
        values: tuple[int | float, ...] = tuple(value for (value,) in layout.iter_unpack(content))
        if code != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise ModelError(f"{self._reader.where}: metadata key {key!r} holds a boolean that is neither 0 nor 1")
        return tuple(value == 1 for value in values)


def _read_name(reader: ForwardReader, limit: int, what: str) -> str:
    length = reader.u64(f"the length of {what}")
    if length > limit:
        raise ModelError(f"{reader.where}: {what} of {length} bytes, more than the {limit} that are accepted")
    name = _decode(reader.take(length, what), reader.where, what)
    if not name.isprintable():
        raise ModelError(f"{reader.where}: {what} holds control characters ({name!r:.80})")
    return name


def _decode(content: bytes, where: str, what: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{where}: {what} is not UTF-8 text") from None


def _alignment(metadata: Mapping[str, MetadataValue], where: str) -> int:
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and not isinstance(alignment, bool) and 0 < alignment <= MAX_ALIGNMENT
    if not valid or not isinstance(alignment, int) or alignment & (alignment - 1):
        raise ModelError(f"{where}: general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
    return alignment


def _read_tensor(reader: ForwardReader) -> TensorEntry:
    """One table entry; its offset is still relative to the data section."""
    name = _read_name(reader, MAX_TENSOR_NAME_BYTES, "a tensor name")
    what = f"tensor {name!r}"
    dimensions = reader.u32(what)
    if dimensions > 4:
        raise ModelError(f"{reader.where}: {what} claims {dimensions} dimensions, more than 4")
    shape = tuple(reader.u64(what) for _ in range(dimensions))
    code = reader.u32(what)
    offset = reader.u64(what)
    kind = GGML_TYPES.get(code)
    if kind is None:
        state = "was withdrawn; convert the model again" if code in REMOVED_GGML_TYPES else "is unknown"
        raise ModelError(f"{reader.where}: {what} has element type {code}, which {state}")
    values = 1
    for dimension in shape:
        values *= dimension
        if not 0 < dimension <= MAX_DIMENSION or values > MAX_DIMENSION:
            raise ModelError(f"{reader.where}: {what} has the impossible shape {shape}")
    row = shape[0] if shape else 1
    if row % kind.block_values:
        raise ModelError(
            f"{reader.where}: {what} has rows of {row} values, not whole {kind.name} blocks of {kind.block_values}"
        )
    return TensorEntry(name, kind, shape, offset, values // kind.block_values * kind.block_bytes)


def _place(entry: TensorEntry, data_start: int, alignment: int, file_bytes: int, where: str) -> TensorEntry:
    if entry.offset % alignment:
        raise ModelError(f"{where}: tensor {entry.name!r} at offset {entry.offset} is not aligned to {alignment}")
    offset = data_start + entry.offset
    if offset + entry.nbytes > file_bytes:
        missing = offset + entry.nbytes - file_bytes
        raise ModelError(f"{where}: truncated: tensor {entry.name!r} ends {missing} bytes behind the end of the file")
    return TensorEntry(entry.name, entry.kind, entry.shape, offset, entry.nbytes)


def _check_layout(tensors: tuple[TensorEntry, ...], where: str) -> None:
    names: set[str] = set()
    for entry in tensors:
        if entry.name in names:
            raise ModelError(f"{where}: tensor {entry.name!r} appears twice")
        names.add(entry.name)
    for before, after in pairwise(sorted(tensors, key=lambda entry: entry.offset)):
        if before.offset + before.nbytes > after.offset:
            raise ModelError(f"{where}: tensors {before.name!r} and {after.name!r} overlap")
