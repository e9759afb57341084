"""Writes small GGUF and safetensors files, right or wrong on purpose, without any library."""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.model.gguf_package import package_gguf
from coordinator.model.package import ModelPackage
from coordinator.model.source import MemorySource

F32, F16, Q8_0, Q4_K = 0, 1, 8, 12
TYPE_BYTES = {F32: (1, 4), F16: (1, 2), Q8_0: (32, 34), Q4_K: (256, 144)}

_CODES = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "str": 8,
    "arr": 9,
    "u64": 10,
    "i64": 11,
}
_LAYOUTS = {
    "u8": "<B",
    "i8": "<b",
    "u16": "<H",
    "i16": "<h",
    "u32": "<I",
    "i32": "<i",
    "f32": "<f",
    "bool": "<B",
    "u64": "<Q",
    "i64": "<q",
}


@dataclass(frozen=True)
class Raw:
    """A metadata value already encoded, type code included."""

    content: bytes


@dataclass(frozen=True)
class Typed:
    """A scalar of a stated type."""

    kind: str
    value: int | float


@dataclass
class TensorSpec:
    """A tensor to write; ``offset`` and ``code`` may be forced to something impossible."""

    name: str | bytes
    shape: Sequence[int]
    code: int = F32
    offset: int | None = None
    nbytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        values = 1
        for dimension in self.shape:
            values *= dimension
        block, size = TYPE_BYTES.get(self.code, (1, 4))
        self.nbytes = values // block * size


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def array(kind: str, items: Sequence[Any], count: int | None = None) -> Raw:
    body = b"".join(text(item) if kind == "str" else struct.pack(_LAYOUTS[kind], item) for item in items)
    return Raw(struct.pack("<IIQ", 9, _CODES[kind], len(items) if count is None else count) + body)


def encoded(value: Any) -> bytes:
    if isinstance(value, Raw):
        return value.content
    if isinstance(value, Typed):
        return struct.pack("<I", _CODES[value.kind]) + struct.pack(_LAYOUTS[value.kind], value.value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + text(value)
    kind = "bool" if all(isinstance(item, bool) for item in value) else "i32"
    return array(kind, value).content


def gguf_bytes(
    metadata: Mapping[str, Any] | Iterable[tuple[str | bytes, Any]],
    tensors: Sequence[TensorSpec] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    pair_count: int | None = None,
    magic: bytes = b"GGUF",
    fill: int = 0,
    with_data: bool = True,
) -> bytes:
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    out = bytearray(magic + struct.pack("<I", version))
    out += struct.pack(
        "<QQ", len(tensors) if tensor_count is None else tensor_count, len(pairs) if pair_count is None else pair_count
    )
    for key, value in pairs:
        out += text(key) + encoded(value)
    position = 0
    end = 0
    for tensor in tensors:
        offset = position if tensor.offset is None else tensor.offset
        out += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        out += b"".join(struct.pack("<Q", dimension % 2**64) for dimension in tensor.shape)
        out += struct.pack("<IQ", tensor.code, offset)
        end = max(end, position + tensor.nbytes) if tensor.offset is None else end
        position = -(-(position + tensor.nbytes) // alignment) * alignment
    if with_data and tensors:
        out += bytes(-len(out) % alignment)
        out += bytes([fill]) * end
    return bytes(out)


def metadata(architecture: str = "llama", layers: int = 4, **overrides: Any) -> dict[str, Any]:
    """Metadata of a small model; ``overrides`` name keys without the architecture, ``None`` removes one."""
    facts: dict[str, Any] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    facts.update({key.replace("__", "."): value for key, value in overrides.items()})
    named = {f"{architecture}.{key}": value for key, value in facts.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "tiny", **named}


def tensors(
    layers: int = 4, *, head: bool = True, rows: Sequence[int] = (), per_layer: Sequence[TensorSpec] = ()
) -> list[TensorSpec]:
    """Embeddings, ``layers`` blocks of one F32 matrix (``rows[i]`` rows of 64) and a norm, output norm and head."""
    result = [TensorSpec("token_embd.weight", (64, 100), F16)]
    for layer in range(layers):
        result.append(TensorSpec(f"blk.{layer}.attn_q.weight", (64, rows[layer] if rows else 64), F32))
        result.append(TensorSpec(f"blk.{layer}.attn_norm.weight", (64,), F32))
        result += [TensorSpec(f"blk.{layer}.{spec.name}", spec.shape, spec.code) for spec in per_layer]
    result.append(TensorSpec("output_norm.weight", (64,), F32))
    if head:
        result.append(TensorSpec("output.weight", (64, 100), Q8_0))
    return result


def package(content: bytes | Sequence[bytes], **options: Any) -> ModelPackage:
    """The planner's view of one file or several shards."""
    shards = [content] if isinstance(content, bytes) else list(content)
    return package_gguf(
        [(f"tiny-{index}.gguf", MemorySource(shard)) for index, shard in enumerate(shards)], "tiny", **options
    )


def architecture_package(architecture: str, layers: int, **overrides: Any) -> ModelPackage:
    """A model with the given architecture keys and plain weights."""
    return package(gguf_bytes(metadata(architecture, layers, **overrides), tensors(layers)))


def safetensors_bytes(entries: Mapping[str, tuple[str, Sequence[int], int]], *, header: bytes | None = None) -> bytes:
    """``entries``: name → (dtype, shape, bytes)."""
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, nbytes) in entries.items():
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    content = json.dumps(document).encode() if header is None else header
    return struct.pack("<Q", len(content)) + content + bytes(position)


def write_layer_package(
    directory: Path, layers: int = 3, *, facts: Mapping[str, Any] | None = None, head: bool = True
) -> dict[str, Any]:
    """A whole layer package on disk; returns the manifest it wrote."""
    (directory / "shared").mkdir(parents=True)
    (directory / "layers").mkdir()
    described = dict(facts) if facts is not None else metadata(layers=layers)
    by_name = {
        str(spec.name): spec for spec in tensors(layers, head=head, rows=[64 + 32 * layer for layer in range(layers)])
    }

    def artifact(path: str, names: Sequence[str]) -> dict[str, Any]:
        specs = [by_name[name] for name in names]
        content = gguf_bytes(described if path.endswith("metadata.gguf") else {"general.architecture": "llama"}, specs)
        (directory / path).write_bytes(content)
        return {
            "path": path,
            "tensor_count": len(specs),
            "tensor_bytes": sum(spec.nbytes for spec in specs),
            "artifact_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest().upper(),
        }

    outputs = ["output_norm.weight", *(["output.weight"] if head else [])]
    manifest = {
        "schema_version": 1,
        "format": "layer-package",
        "model_id": "tiny-layers",
        "source_model": {"path": "tiny.gguf", "sha256": "ab" * 32},
        "layer_count": layers,
        "activation_width": 64,
        "skippy_abi_version": "0.1.24",
        "shared": {
            "metadata": artifact("shared/metadata.gguf", []),
            "embeddings": artifact("shared/embeddings.gguf", ["token_embd.weight"]),
            "output": artifact("shared/output.gguf", outputs),
        },
        "layers": [
            {
                "layer_index": layer,
                **artifact(f"layers/{layer:03d}.gguf", [f"blk.{layer}.attn_q.weight", f"blk.{layer}.attn_norm.weight"]),
            }
            for layer in range(layers)
        ],
        "an_unknown_field": {"is": "ignored"},
    }
    (directory / "model-package.json").write_text(json.dumps(manifest))
    return manifest
