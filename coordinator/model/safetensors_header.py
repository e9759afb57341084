"""Safetensors headers: names, types, shapes and extents of one file's tensors, without their bytes.

Layout: u64 little-endian header length, that many bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data;
offsets are relative to its start. Every tensor must have exactly the bytes its type and shape ask for, lie inside the
file and overlap no other. Defects are ``ModelError``.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from coordinator.model.json_document import parse_json_object
from coordinator.model.source import RangedSource
from coordinator.model.tensor_types import SAFETENSORS_TYPES, TensorType
from protocol.errors import ModelError

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_HEADER_VALUES = 200_000
"""About 28 000 tensors in one file; the largest known have 6 000."""
MAX_DIMENSIONS = 8
MAX_VALUES = 1 << 53


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor. ``offset`` counts from the start of the file; ``shape`` is in row-major order."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What one file holds."""

    where: str
    tensors: tuple[SafetensorsEntry, ...]
    header_bytes: int


def read_safetensors_header(source: RangedSource, where: str) -> SafetensorsHeader:
    """Read one file's header; ``where`` names it in errors."""
    if source.size < 8:
        raise ModelError(f"{where}: {'the file is empty' if not source.size else 'truncated'}")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > min(source.size - 8, MAX_HEADER_BYTES):
        raise ModelError(f"{where}: not a safetensors file, or truncated (its header claims {length} bytes)")
    document = parse_json_object(
        source.read(8, length), where, max_bytes=MAX_HEADER_BYTES, max_values=MAX_HEADER_VALUES
    )
    start = 8 + length
    tensors = tuple(
        _entry(name, value, start, source.size, where) for name, value in document.items() if name != "__metadata__"
    )
    for before, after in pairwise(sorted(tensors, key=lambda entry: entry.offset)):
        if before.offset + before.nbytes > after.offset:
            raise ModelError(f"{where}: tensors {before.name!r} and {after.name!r} overlap")
    return SafetensorsHeader(where, tensors, start)


def _entry(name: str, value: Any, start: int, file_bytes: int, where: str) -> SafetensorsEntry:
    if not isinstance(value, dict):
        raise ModelError(f"{where}: tensor {name!r} has no description")
    kind = SAFETENSORS_TYPES.get(value["dtype"]) if isinstance(value.get("dtype"), str) else None
    if kind is None:
        raise ModelError(f"{where}: tensor {name!r} has the unknown type {value.get('dtype')!r:.40}")
    shape, offsets = _numbers(value.get("shape")), _numbers(value.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise ModelError(f"{where}: tensor {name!r} has no valid shape and data_offsets")
    values = 1
    for dimension in shape:
        values *= dimension
        if values > MAX_VALUES:
            raise ModelError(f"{where}: tensor {name!r} has the impossible shape {shape}")
    begin, end = offsets
    if end - begin != kind.row_bytes(values):
        raise ModelError(f"{where}: tensor {name!r} has {end - begin} bytes, its shape needs {kind.row_bytes(values)}")
    if start + end > file_bytes:
        raise ModelError(f"{where}: truncated: tensor {name!r} ends {start + end - file_bytes} bytes behind the end")
    return SafetensorsEntry(name, kind, shape, start + begin, end - begin)


def _numbers(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 to 2^53, or ``None``."""
    if not isinstance(value, list):
        return None
    if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_VALUES for item in value):
        return tuple(value)
    return None
