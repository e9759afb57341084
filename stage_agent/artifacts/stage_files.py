"""Which files a stage reads: all of a plain model, its own part of a layer package."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.model.layer_package import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Artifact,
    LayerPackageManifest,
    read_manifest,
)
from protocol.ballots import ArtifactRef, StageAssignment
from protocol.errors import ModelError
from stage_agent.artifacts.policy import FileUse
from stage_agent.model_files import read_all


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model, as its holder says. ``manifest`` is a layer package's, as raw bytes; then ``files`` is empty."""

    files: tuple[ArtifactRef, ...] = ()
    manifest: bytes | None = None


def needed(listing: Listing, assignment: StageAssignment) -> tuple[ArtifactRef, ...]:
    """What the stage must have, each content once. Raises ``ModelError`` when the manifest is none."""
    if listing.manifest is None:
        return listing.files
    manifest = read_manifest(listing.manifest, MANIFEST_NAME)
    return references(stage_artifacts(manifest, assignment.layer_start, assignment.layer_end))


def stage_artifacts(manifest: LayerPackageManifest, layer_start: int, layer_end: int) -> tuple[Artifact, ...]:
    """As ``manifest.stage_artifacts``, and the embeddings for the last stage too: with tied weights they are its head."""
    chosen = manifest.stage_artifacts(layer_start, layer_end)
    last_needs_embeddings = layer_end == manifest.layer_count and layer_start > 0
    return (*chosen, manifest.embeddings) if last_needs_embeddings else chosen


def references(artifacts: tuple[Artifact, ...]) -> tuple[ArtifactRef, ...]:
    """The manifest's entries as the wire names them."""
    return tuple(
        ArtifactRef(path=artifact.path, sha256=artifact.sha256, size_bytes=artifact.artifact_bytes)
        for artifact in artifacts
        if len(artifact.path) <= 512
    )


def uses_of(manifest: LayerPackageManifest, model_digest: str) -> Iterator[tuple[Artifact, tuple[FileUse, ...]]]:
    """Every file of a layer package with the stages that need it."""
    count = manifest.layer_count
    everywhere = FileUse(model_digest, 0, count)
    first, last = FileUse(model_digest, 0, 1), FileUse(model_digest, count - 1, count)
    yield manifest.metadata, (everywhere,)
    yield manifest.embeddings, (first, last)
    yield manifest.output, (last,)
    for index, layer in enumerate(manifest.layers):
        yield layer, (FileUse(model_digest, index, index + 1),)
    for projector in manifest.projectors:
        yield projector, (first,)


def manifest_at(directory: Path) -> tuple[bytes, LayerPackageManifest]:
    """The layer package's manifest, raw and checked. Raises ``ModelError``."""
    path = directory / MANIFEST_NAME
    raw = read_all(path, MAX_MANIFEST_BYTES)
    return raw, read_manifest(raw, str(path))


def has_size(path: Path, size_bytes: int) -> bool:
    """A file of exactly that size is there."""
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def check_listing(listing: Listing, assignment: StageAssignment) -> tuple[ArtifactRef, ...]:
    """What the stage needs of a *peer's* listing, as far as it can be judged before any byte of the model is here.

    A layer package's manifest must have the model's digest, which covers every file's hash. Other models are judged by
    their digest when they are complete. Files that the assignment names are the only ones then. Raises ``ModelError``.
    """
    if listing.manifest is not None:
        manifest = read_manifest(listing.manifest, MANIFEST_NAME)
        if manifest.digest != assignment.model_digest:
            raise ModelError(f"the manifest is of another model ({manifest.digest[:12]})")
        if assignment.layer_end > manifest.layer_count:
            raise ModelError(f"layers up to {assignment.layer_end} were assigned of {manifest.layer_count}")
    files = needed(listing, assignment)
    if not files:
        raise ModelError("the listing names no file")
    if len({file.path for file in files}) != len(files):
        raise ModelError("the listing names a file twice")
    if listing.manifest is None and not all(is_plain_name(file.path) for file in files):
        raise ModelError("the listing names a file outside its directory")
    named = {(file.sha256, file.size_bytes) for file in assignment.artifacts}
    if named and not named.issuperset((file.sha256, file.size_bytes) for file in files):
        raise ModelError("the listing names a file that the assignment does not")
    return files


def is_plain_name(name: str) -> bool:
    """One component, not hidden, printable: safe to create in a directory of ours."""
    return (
        0 < len(name) <= 200
        and not name.startswith(".")
        and "/" not in name
        and "\\" not in name
        and name.isprintable()
    )
