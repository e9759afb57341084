"""From a path to a model: headers and a few samples are read, whatever the model weighs.

``open_model`` gives the planner's view of it, ``tensor_extents`` a stage's view: where the bytes of its layers are.
Every failure is a ``ModelError`` with one line.
"""

from pathlib import Path
from typing import NamedTuple, assert_never

from config.cache_types import CacheType
from coordinator.model.gguf_header import TensorEntry
from coordinator.model.gguf_package import package_gguf, read_gguf_model
from coordinator.model.layer_package import MANIFEST_NAME, MAX_MANIFEST_BYTES, LayerPackageManifest, read_manifest
from coordinator.model.layer_package_model import check_artifact, package_layers
from coordinator.model.package import ModelPackage
from coordinator.model.safetensors_header import SafetensorsEntry, read_safetensors_header
from coordinator.model.safetensors_names import is_embedding, is_head, safetensors_role
from coordinator.model.safetensors_package import (
    MAX_CONFIG_BYTES,
    MAX_FILES,
    MAX_INDEX_BYTES,
    Checkpoint,
    check_index,
    index_files,
    package_safetensors,
    read_config,
)
from coordinator.model.tensor_roles import OUTPUT_HEAD, TOKEN_EMBEDDING, Role, role_of
from protocol.errors import ModelError
from stage_agent.model_files import (
    CONFIG_NAME,
    INDEX_NAME,
    CheckpointFiles,
    FileSource,
    GgufFiles,
    PackageFiles,
    locate,
    read_all,
)


class TensorExtent(NamedTuple):
    """Where a tensor's bytes are. ``type`` and ``shape`` are as its format writes them (GGUF: row length first)."""

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def open_model(path: str | Path, *, cache_type: CacheType = "f16", activation_value_bytes: int = 2) -> ModelPackage:
    """The model at ``path`` as a package; raises ``ModelError`` with one line for everything that can be wrong.

    ``cache_type`` is the element type of the attention cache, ``activation_value_bytes`` what the engine sends per
    activation value (2 = f16, 4 = f32).
    """
    files = locate(Path(path))
    match files:
        case GgufFiles(shards):
            sources = [(str(shard), FileSource(shard)) for shard in shards]
            return package_gguf(
                sources, files.name, cache_type=cache_type, activation_value_bytes=activation_value_bytes
            )
        case PackageFiles(directory):
            manifest = _manifest(directory)
            present = {
                artifact.path: FileSource(directory / artifact.path)
                for artifact in manifest.artifacts
                if (directory / artifact.path).exists()
            }
            return package_layers(
                manifest, present, cache_type=cache_type, activation_value_bytes=activation_value_bytes
            )
        case CheckpointFiles(directory):
            checkpoint, _ = _checkpoint(directory)
            name = directory.resolve().name
            return package_safetensors(
                checkpoint, name, cache_type=cache_type, activation_value_bytes=activation_value_bytes
            )
        case _:
            assert_never(files)


def tensor_extents(path: str | Path, layer_start: int, layer_end: int, first: bool, last: bool) -> list[TensorExtent]:
    """Extents of the tensors a stage of layers ``[layer_start, layer_end)`` reads, in file order.

    ``first`` adds the embeddings, ``last`` the output norm and head (with tied embeddings: the token embedding). Rope
    tables go to every stage. Raises ``ModelError`` as ``open_model`` does.
    """
    files = locate(Path(path))
    match files:
        case GgufFiles(shards):
            model, _ = read_gguf_model([(str(shard), FileSource(shard)) for shard in shards])
            tensors = [_gguf_tensor(shards[tensor.shard], tensor.entry) for tensor in model.tensors]
        case PackageFiles(directory):
            tensors = _package_tensors(directory, layer_start, layer_end, first=first, last=last)
        case CheckpointFiles(directory):
            tensors = _checkpoint_tensors(directory)
        case _:
            assert_never(files)
    tied = not any(_is_head(extent.name) for extent, _ in tensors)

    def wanted(extent: TensorExtent, role: Role) -> bool:
        if role.layer is not None:
            return layer_start <= role.layer < layer_end
        if role.everywhere or (role.first and first) or (role.last and last):
            return True
        return last and tied and _is_embedding(extent.name)

    return [extent for extent, role in tensors if wanted(extent, role)]


def model_files(path: str | Path) -> tuple[Path, ...]:
    """The files that make up the model at ``path``, manifest and configuration included."""
    files = locate(Path(path))
    match files:
        case GgufFiles(shards):
            return shards
        case PackageFiles(directory):
            manifest = _manifest(directory)
            return (directory / MANIFEST_NAME, *(directory / artifact.path for artifact in manifest.artifacts))
        case CheckpointFiles(directory):
            return (directory / CONFIG_NAME, *_checkpoint(directory)[1])
        case _:
            assert_never(files)


def _is_head(name: str) -> bool:
    return name == OUTPUT_HEAD or is_head(name)


def _is_embedding(name: str) -> bool:
    return name == TOKEN_EMBEDDING or is_embedding(name)


def _gguf_tensor(file: Path, entry: TensorEntry) -> tuple[TensorExtent, Role]:
    extent = TensorExtent(file, entry.name, entry.kind.name, entry.shape, entry.offset, entry.nbytes)
    return extent, role_of(entry.name)


def _manifest(directory: Path) -> LayerPackageManifest:
    path = directory / MANIFEST_NAME
    return read_manifest(read_all(path, MAX_MANIFEST_BYTES), str(path))


def _package_tensors(
    directory: Path, layer_start: int, layer_end: int, *, first: bool, last: bool
) -> list[tuple[TensorExtent, Role]]:
    manifest = _manifest(directory)
    artifacts = list(manifest.layers[layer_start:layer_end])
    artifacts += [manifest.embeddings] if first or last else []
    artifacts += [manifest.output] if last else []
    tensors = []
    for artifact in artifacts:
        file = directory / artifact.path
        header = check_artifact(manifest, artifact, FileSource(file))
        for entry in header.tensors:
            extent, role = _gguf_tensor(file, entry)
            # A package may copy the tied embedding into its output file: there it is the head.
            tensors.append((extent, Role(last=True) if artifact is manifest.output else role))
    if any(extent.name == TOKEN_EMBEDDING and role.last for extent, role in tensors):
        return [(extent, role) for extent, role in tensors if first or not role.first]
    return tensors


def _checkpoint(directory: Path) -> tuple[Checkpoint, tuple[Path, ...]]:
    config = read_all(directory / CONFIG_NAME, MAX_CONFIG_BYTES)
    index_path = directory / INDEX_NAME
    index = index_files(read_all(index_path, MAX_INDEX_BYTES), str(index_path)) if index_path.exists() else None
    names = sorted(index) if index is not None else sorted(file.name for file in directory.glob("*.safetensors"))
    if not names or len(names) > MAX_FILES:
        raise ModelError(f"{directory}: holds {len(names)} safetensors files; 1 to {MAX_FILES} are expected")
    files = tuple(directory / name for name in names)
    sources = [FileSource(file) for file in files]
    headers = []
    for source, file in zip(sources, files, strict=True):
        headers.append(read_safetensors_header(source, str(file)))
        if sum(header.header_bytes for header in headers) > MAX_INDEX_BYTES:
            raise ModelError(f"{directory}: the files' headers exceed {MAX_INDEX_BYTES} bytes; refused")
    if index is not None:
        for name, header in zip(names, headers, strict=True):
            check_index(index, name, header)
    return Checkpoint(str(directory), headers, sources, config), files


def _checkpoint_tensors(directory: Path) -> list[tuple[TensorExtent, Role]]:
    checkpoint, files = _checkpoint(directory)
    layer_count = read_config(checkpoint.config, str(directory / CONFIG_NAME)).integer("layers")

    def extent(file: Path, entry: SafetensorsEntry) -> TensorExtent:
        return TensorExtent(file, entry.name, entry.kind.name, entry.shape, entry.offset, entry.nbytes)

    return [
        (extent(file, entry), role)
        for file, header in zip(files, checkpoint.headers, strict=True)
        for entry in header.tensors
        if (role := safetensors_role(entry.name, layer_count)) is not None
    ]
