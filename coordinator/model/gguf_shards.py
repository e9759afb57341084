"""Split GGUF models: the names of the shards, and several headers made into one model.

``X-00001-of-0000N.gguf``: the first shard carries all metadata and may hold no tensors; the others carry only
``split.no``, ``split.count``, ``split.tensors.count`` and their own tensors. A block may lie in two shards.
A shard that is missing, out of order, of another set or counted wrong is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.model.gguf_header import GgufHeader, MetadataValue, TensorEntry
from protocol.errors import ModelError

MAX_SHARDS = 1_024
_SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor and the shard (index into the model's files) that holds it."""

    shard: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model: the first shard's metadata, every shard's tensors in file order."""

    where: str
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[GgufTensor, ...]


def shard_file_names(file_name: str) -> tuple[str, ...] | None:
    """Names of all shards of the set that ``file_name`` belongs to, in order; ``None`` when it names no shard.

    Raises ``ModelError`` for a number outside the set or more than ``MAX_SHARDS`` shards.
    """
    match = _SHARD_NAME.match(file_name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count or count > MAX_SHARDS:
        raise ModelError(f"{file_name}: shard {number} of {count} is not possible (1 to {MAX_SHARDS} shards)")
    return tuple(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1))


def join_shards(headers: Sequence[GgufHeader]) -> GgufModel:
    """One model from the headers of all its shards, in order. Raises ``ModelError`` naming the shard at fault."""
    first = headers[0]
    count = _split_number(first, "split.count") or 1
    if count != len(headers):
        found = "this file alone was" if len(headers) == 1 else f"{len(headers)} were"
        raise ModelError(
            f"{first.where}: split.count says {count} shards but {found} found; keep the shards together under their "
            f"names …-00001-of-{count:05d}.gguf"
        )
    if count > 1:
        for index, header in enumerate(headers):
            _check_member(first, header, index)
    tensors = tuple(GgufTensor(index, entry) for index, header in enumerate(headers) for entry in header.tensors)
    _check_tensors(headers, tensors)
    return GgufModel(first.where, first.metadata, tensors)


def _split_number(header: GgufHeader, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{header.where}: {key} is {value!r}, not a count")
    return value


def _check_member(first: GgufHeader, header: GgufHeader, index: int) -> None:
    for key in ("split.no", "split.count"):
        if _split_number(header, key) is None:
            raise ModelError(f"{header.where}: no {key}; the file is not a shard although its name says so")
    if _split_number(header, "split.no") != index:
        number = header.metadata["split.no"]
        raise ModelError(f"{header.where}: split.no is {number}, but its name says {index}; the shards are mixed up")
    for key in ("split.count", "split.tensors.count"):
        if header.metadata.get(key) != first.metadata.get(key):
            raise ModelError(f"{header.where}: a shard of another set ({key} differs from that of {first.where})")
    own = header.metadata.get("general.architecture")
    if own is not None and own != first.metadata.get("general.architecture"):
        raise ModelError(f"{header.where}: a shard of another set (architecture {own!r})")


def _check_tensors(headers: Sequence[GgufHeader], tensors: Sequence[GgufTensor]) -> None:
    owners: dict[str, int] = {}
    for tensor in tensors:
        owner = owners.setdefault(tensor.entry.name, tensor.shard)
        if owner != tensor.shard:
            here, there = headers[tensor.shard].where, headers[owner].where
            raise ModelError(f"{here}: a shard of another set (tensor {tensor.entry.name!r} is already in {there})")
    claimed = _split_number(headers[0], "split.tensors.count")
    if claimed is not None and len(headers) > 1 and claimed != len(tensors):
        raise ModelError(
            f"{headers[0].where}: split.tensors.count says {claimed}, the shards hold {len(tensors)} tensors"
        )
