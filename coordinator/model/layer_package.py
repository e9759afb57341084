"""Layer packages: a directory with ``model-package.json`` and one GGUF file per layer (schema version 1).

The manifest lists every artifact with its path, tensor bytes (memory), artifact bytes (disk and transfer) and SHA-256.
Unknown optional fields are ignored; everything required is checked, and a package that breaks one rule is refused whole:
schema and format, exactly one entry per layer index, relative paths without ``..``, positive sizes, no tensors exactly
when no tensor bytes, 64-digit hashes, no path used twice. File names mean nothing: ``path`` is trusted, never the name.

The package's digest is the SHA-256 over the canonical list of its artifacts' own digests, so it covers every byte:

    SHA-256( "stagemesh-layer-package-1" newline, then one line per artifact, in the order metadata, embeddings, output,
             layer 0 …, projectors:  role, artifact bytes, sha256 in lower case )
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.model.gguf_package import MAX_LAYERS
from coordinator.model.json_document import JsonFields, parse_json_object
from protocol.errors import ModelError

MANIFEST_NAME = "model-package.json"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_MANIFEST_VALUES = 500_000
MAX_PATH_LENGTH = 1_024
_SHA256 = re.compile(r"^[0-9a-fA-F]{64}$")
_DRIVE = re.compile(r"^[A-Za-z]:")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of the package. ``sha256`` is in lower case; ``path`` is relative to the manifest, with ``/``."""

    role: str
    path: str
    tensor_count: int
    tensor_bytes: int
    artifact_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LayerPackageManifest:
    """A checked manifest."""

    where: str
    model_id: str
    layer_count: int
    activation_width: int | None
    metadata: Artifact
    embeddings: Artifact
    output: Artifact
    layers: tuple[Artifact, ...]
    projectors: tuple[Artifact, ...]
    skippy_abi_version: str

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All files, in the digest's order."""
        return (self.metadata, self.embeddings, self.output, *self.layers, *self.projectors)

    @property
    def digest(self) -> str:
        """64 hex digits over the artifacts' digests, see the module."""
        digest = hashlib.sha256(b"stagemesh-layer-package-1\n")
        for artifact in self.artifacts:
            digest.update(f"{artifact.role} {artifact.artifact_bytes} {artifact.sha256}\n".encode())
        return digest.hexdigest()

    def stage_artifacts(self, layer_start: int, layer_end: int) -> tuple[Artifact, ...]:
        """The files a stage of layers ``[layer_start, layer_end)`` needs, shared parts at the ends included."""
        first = (self.embeddings,) if layer_start == 0 else ()
        last = (self.output,) if layer_end == self.layer_count else ()
        return (self.metadata, *first, *self.layers[layer_start:layer_end], *last)


def read_manifest(content: bytes, where: str) -> LayerPackageManifest:
    """Check a manifest's bytes. Raises ``ModelError`` naming the field that breaks a rule."""
    document = JsonFields(
        parse_json_object(content, where, max_bytes=MAX_MANIFEST_BYTES, max_values=MAX_MANIFEST_VALUES), where
    )
    if document.integer("schema_version") != 1:
        document.refuse("schema_version", "1, the only version known")
    if document.text("format") != "layer-package":
        document.refuse("format", "'layer-package'")
    _check_source_model(document.child("source_model"))
    layer_count = document.integer("layer_count", least=1, most=MAX_LAYERS)
    shared = document.child("shared")
    manifest = LayerPackageManifest(
        where=where,
        model_id=document.text("model_id"),
        layer_count=layer_count,
        activation_width=document.integer("activation_width", least=1) if document.has("activation_width") else None,
        metadata=_artifact(shared.child("metadata"), "metadata"),
        embeddings=_artifact(shared.child("embeddings"), "embeddings"),
        output=_artifact(shared.child("output"), "output"),
        layers=_layers(document, layer_count),
        projectors=tuple(_projectors(document)),
        skippy_abi_version=document.text("skippy_abi_version"),
    )
    _check_paths(manifest)
    return manifest


def _check_source_model(source: JsonFields) -> None:
    source.text("path")
    if not _SHA256.match(source.text("sha256")):
        source.refuse("sha256", "64 hexadecimal digits")
    for file in source.children("files") if source.has("files") else ():
        file.text("path")
        file.integer("size_bytes", least=1)
        if not _SHA256.match(file.text("sha256")):
            file.refuse("sha256", "64 hexadecimal digits")


def _layers(document: JsonFields, layer_count: int) -> tuple[Artifact, ...]:
    found: dict[int, Artifact] = {}
    for entry in document.children("layers"):
        index = entry.integer("layer_index", most=MAX_LAYERS)
        if index >= layer_count:
            entry.refuse("layer_index", f"an index below layer_count {layer_count}")
        if index in found:
            raise ModelError(f"{entry.where}: {entry.name('layer_index')} {index} appears twice")
        found[index] = _artifact(entry, f"layer {index}")
    missing = [index for index in range(layer_count) if index not in found]
    if missing:
        raise ModelError(f"{document.where}: layers lacks index {missing[0]} ({len(missing)} of {layer_count} missing)")
    return tuple(found[index] for index in range(layer_count))


def _projectors(document: JsonFields) -> Iterator[Artifact]:
    for index, entry in enumerate(document.children("projectors") if document.has("projectors") else ()):
        entry.text("kind")
        yield _artifact(entry, f"projector {index}")


def _artifact(entry: JsonFields, role: str) -> Artifact:
    path = entry.text("path")
    if not _is_safe(path):
        entry.refuse("path", "a relative path without '..'")
    tensor_count = entry.integer("tensor_count")
    tensor_bytes = entry.integer("tensor_bytes")
    if (tensor_count == 0) != (tensor_bytes == 0):
        entry.refuse("tensor_bytes", f"zero exactly when tensor_count ({tensor_count}) is zero")
    artifact_bytes = entry.integer("artifact_bytes", least=1)
    if artifact_bytes < tensor_bytes:
        entry.refuse("artifact_bytes", f"at least the {tensor_bytes} tensor bytes it holds")
    sha256 = entry.text("sha256")
    if not _SHA256.match(sha256):
        entry.refuse("sha256", "64 hexadecimal digits")
    return Artifact(role, path, tensor_count, tensor_bytes, artifact_bytes, sha256.lower())


def _is_safe(path: str) -> bool:
    """Relative, below the manifest's directory on every operating system, no control characters."""
    if len(path) > MAX_PATH_LENGTH or path.startswith("/") or "\\" in path or _DRIVE.match(path):
        return False
    if any(ord(character) < 32 for character in path):
        return False
    return all(part not in {"", ".", ".."} for part in path.split("/"))


def _check_paths(manifest: LayerPackageManifest) -> None:
    owners: dict[str, str] = {}
    for artifact in manifest.artifacts:
        owner = owners.setdefault(artifact.path, artifact.role)
        if owner != artifact.role:
            raise ModelError(f"{manifest.where}: path {artifact.path!r} is used by {owner} and by {artifact.role}")
