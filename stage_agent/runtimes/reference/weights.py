"""Reads a stage's tensors and the model's dimensions from a GGUF; refuses by name whatever the decoder cannot run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.model.gguf_header import MetadataValue, read_gguf_header
from stage_agent.model_files import FileSource
from stage_agent.model_source import TensorExtent, model_files, tensor_extents
from stage_agent.runtimes.interface import Report, RuntimeFailure
from stage_agent.runtimes.reference.dequantise import SUPPORTED_TYPES, Floats, dequantise

ARCHITECTURE = "llama"
_LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_SHARED_TENSORS = frozenset({"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"})


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The llama architecture's numbers, from the file's metadata."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_length: int
    rope_length: int
    rope_base: float
    rms_epsilon: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are outputs × inputs."""

    attn_norm: Floats
    attn_q: Floats
    attn_k: Floats
    attn_v: Floats
    attn_output: Floats
    ffn_norm: Floats
    ffn_gate: Floats
    ffn_up: Floats
    ffn_down: Floats


@dataclass(frozen=True, slots=True)
class StageWeights:
    """A stage's part of the model as float32, four bytes a value whatever the file's type."""

    dimensions: Dimensions
    layers: tuple[LayerWeights, ...]
    embedding: Floats | None
    output_norm: Floats | None
    output: Floats | None
    rope_factors: Floats | None


def read_stage(
    path: Path,
    layer_start: int,
    layer_end: int,
    *,
    first: bool,
    last: bool,
    report: Report,
    stopped: Callable[[], bool],
) -> StageWeights:
    """The weights of ``[layer_start, layer_end)``; ``report`` counts file bytes. Blocks: run it in a thread.

    Raises ``ModelError`` for a bad file, ``RuntimeFailure`` (unsupported_model, range_invalid, cancelled).
    """
    dimensions = _dimensions(path)
    if not 0 <= layer_start < layer_end <= dimensions.layers:
        raise RuntimeFailure("range_invalid", f"layers {layer_start}–{layer_end} of a model with {dimensions.layers}")
    extents = tensor_extents(path, layer_start, layer_end, first, last)
    total = sum(extent.nbytes for extent in extents)
    tensors: dict[str, Floats] = {}
    done = 0
    for extent in extents:
        if stopped():
            raise RuntimeFailure("cancelled", "unloaded while loading")
        _check_supported(extent)
        tensors[extent.name] = _read_tensor(extent)
        done += extent.nbytes
        report(done, total)
    return StageWeights(
        dimensions,
        tuple(_layer(tensors, layer) for layer in range(layer_start, layer_end)),
        embedding=_tensor(tensors, "token_embd.weight") if first else None,
        output_norm=_tensor(tensors, "output_norm.weight") if last else None,
        output=_head(tensors) if last else None,
        rope_factors=tensors.get("rope_freqs.weight"),
    )


def _dimensions(path: Path) -> Dimensions:
    files = model_files(path)
    metadata = read_gguf_header(FileSource(files[0]), files[0].name).metadata
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise RuntimeFailure(
            "unsupported_model", f"the reference decoder runs {ARCHITECTURE} models, not {architecture}"
        )
    scaling = metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    if scaling != "none":
        raise RuntimeFailure("unsupported_model", f"rope scaling {scaling!r} is not supported by the reference decoder")
    heads, width = _integer(metadata, "attention.head_count"), _integer(metadata, "embedding_length")
    head_length = _integer(metadata, "attention.key_length", width // heads)
    if head_length != _integer(metadata, "attention.value_length", head_length):
        raise RuntimeFailure("unsupported_model", "key and value lengths differ")
    return Dimensions(
        layers=_integer(metadata, "block_count"),
        width=width,
        heads=heads,
        kv_heads=_integer(metadata, "attention.head_count_kv", heads),
        head_length=head_length,
        rope_length=_integer(metadata, "rope.dimension_count", head_length),
        rope_base=_number(metadata, "rope.freq_base", 10_000.0),
        rms_epsilon=_number(metadata, "attention.layer_norm_rms_epsilon", 1e-5),
    )


def _integer(metadata: Mapping[str, MetadataValue], key: str, default: int | None = None) -> int:
    value = metadata.get(f"{ARCHITECTURE}.{key}", default)
    if not isinstance(value, int) or not 0 < value < 2**24:
        raise RuntimeFailure("unsupported_model", f"{key} is {value!r}, not one positive number")
    return value


def _number(metadata: Mapping[str, MetadataValue], key: str, default: float) -> float:
    value = metadata.get(f"{ARCHITECTURE}.{key}", default)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise RuntimeFailure("unsupported_model", f"{key} is {value!r}, not a positive number")
    return float(value)


def _check_supported(extent: TensorExtent) -> None:
    """A bias, an expert or a norm that this decoder would silently leave out must not be loaded."""
    parts = extent.name.split(".")
    known = extent.name in _SHARED_TENSORS or (
        len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS and parts[3] == "weight"
    )
    if not known:
        raise RuntimeFailure("unsupported_model", f"tensor {extent.name} is unknown to the reference decoder")
    if extent.type not in SUPPORTED_TYPES:
        raise RuntimeFailure(
            "unsupported_model", f"tensor {extent.name} is {extent.type}; {sorted(SUPPORTED_TYPES)} can be read"
        )


def _read_tensor(extent: TensorExtent) -> Floats:
    columns = extent.shape[0] if extent.shape else 1
    rows = math.prod(extent.shape[1:])
    try:
        raw = np.fromfile(extent.file, dtype=np.uint8, count=extent.nbytes, offset=extent.offset)
        if raw.size != extent.nbytes:
            raise RuntimeFailure("model_unavailable", f"{extent.file}: became shorter while it was read")
        values = dequantise(raw, extent.type, rows, columns)
    except OSError as error:
        raise RuntimeFailure("model_unavailable", f"{extent.file}: {error.strerror or error}") from None
    except MemoryError:
        raise RuntimeFailure("insufficient_memory", f"no memory for {extent.name} as float32") from None
    return values[0] if len(extent.shape) == 1 else values


def _layer(tensors: Mapping[str, Floats], layer: int) -> LayerWeights:
    return LayerWeights(*(_tensor(tensors, f"blk.{layer}.{name}.weight") for name in _LAYER_TENSORS))


def _head(tensors: Mapping[str, Floats]) -> Floats:
    tied = "output.weight" not in tensors
    return _tensor(tensors, "token_embd.weight" if tied else "output.weight")


def _tensor(tensors: Mapping[str, Floats], name: str) -> Floats:
    found = tensors.get(name)
    if found is None:
        raise RuntimeFailure("model_mismatch", f"the model has no tensor {name}")
    return found
