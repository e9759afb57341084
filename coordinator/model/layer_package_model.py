"""A layer package as the planner sees it: weights from the manifest, everything else from ``shared/metadata.gguf``.

A node may hold only the files of its own stage, so the layers' files are optional here. Those that are present must be
what the manifest says (tensor count and bytes); they also tell how much of a layer is experts. Without them a mixture of
experts is planned as if every expert were read (``expert_bytes_unknown``), and a head that is not in the output file is
recognised by that file's size (``tied_embeddings_assumed``).
"""

from collections.abc import Mapping
from dataclasses import replace

from config.cache_types import CacheType
from coordinator.model.facts import ArchitectureFacts
from coordinator.model.gguf_header import MAX_HEADER_BYTES, GgufHeader, read_gguf_header
from coordinator.model.gguf_package import describe
from coordinator.model.layer_package import Artifact, LayerPackageManifest
from coordinator.model.package import ModelPackage
from coordinator.model.source import RangedSource
from coordinator.model.tensor_roles import OUTPUT_HEAD, TOKEN_EMBEDDING, LayerBytes, WeightTally, is_expert
from protocol.errors import ModelError

MAX_HEADERS_BYTES = 4 * MAX_HEADER_BYTES
"""Of all files together: each may repeat the vocabulary."""


def package_layers(
    manifest: LayerPackageManifest,
    files: Mapping[str, RangedSource],
    *,
    cache_type: CacheType = "f16",
    activation_value_bytes: int = 2,
) -> ModelPackage:
    """The package; ``files`` maps artifact paths to bytes and must hold the metadata. Raises ``ModelError``."""
    if manifest.metadata.path not in files:
        raise ModelError(f"{manifest.where}: {manifest.metadata.path} is missing; it describes the model")
    headers = _headers(manifest, files)
    facts = ArchitectureFacts(headers[manifest.metadata.path].metadata, manifest.metadata.path)
    _check_against_metadata(manifest, facts)
    weights, diagnostics = _tally(manifest, headers, has_experts=facts.has("expert_count"))
    package = describe(
        facts,
        weights,
        name=manifest.model_id,
        digest=manifest.digest,
        cache_type=cache_type,
        activation_value_bytes=activation_value_bytes,
        layer_count=manifest.layer_count,
    )
    missing = any(artifact.path not in files for artifact in manifest.artifacts)
    more = (*diagnostics, *(("package_files_missing",) if missing else ()))
    return replace(package, name=manifest.model_id, diagnostics=(*package.diagnostics, *more))


def _headers(manifest: LayerPackageManifest, files: Mapping[str, RangedSource]) -> dict[str, GgufHeader]:
    headers: dict[str, GgufHeader] = {}
    held = 0
    for artifact in (manifest.metadata, manifest.embeddings, manifest.output, *manifest.layers):
        if artifact.path not in files:
            continue
        header = headers[artifact.path] = check_artifact(manifest, artifact, files[artifact.path])
        held += header.header_bytes
        if held > MAX_HEADERS_BYTES:
            raise ModelError(f"{manifest.where}: the files' headers exceed {MAX_HEADERS_BYTES} bytes; refused")
    return headers


def check_artifact(manifest: LayerPackageManifest, artifact: Artifact, source: RangedSource) -> GgufHeader:
    """The header of one artifact that is present, checked against its manifest entry (sizes, not the hash)."""
    where = f"{manifest.where}: {artifact.path}"
    if source.size != artifact.artifact_bytes:
        raise ModelError(f"{where} has {source.size} bytes, the manifest says {artifact.artifact_bytes}")
    header = read_gguf_header(source, artifact.path)
    held = sum(entry.nbytes for entry in header.tensors)
    if len(header.tensors) != artifact.tensor_count or held != artifact.tensor_bytes:
        raise ModelError(
            f"{where} holds {len(header.tensors)} tensors of {held} bytes, the manifest says "
            f"{artifact.tensor_count} of {artifact.tensor_bytes}"
        )
    return header


def _check_against_metadata(manifest: LayerPackageManifest, facts: ArchitectureFacts) -> None:
    blocks = facts.required("block_count")
    if blocks != manifest.layer_count:
        key = facts.key("block_count")
        raise ModelError(f"{manifest.where}: layer_count is {manifest.layer_count} but {key} is {blocks}")
    width = facts.required("embedding_length")
    if manifest.activation_width not in {None, width}:
        key = facts.key("embedding_length")
        raise ModelError(f"{manifest.where}: activation_width is {manifest.activation_width} but {key} is {width}")


def _tally(
    manifest: LayerPackageManifest, headers: Mapping[str, GgufHeader], *, has_experts: bool
) -> tuple[WeightTally, tuple[str, ...]]:
    diagnostics: list[str] = []
    layers = {}
    for index, artifact in enumerate(manifest.layers):
        header = headers.get(artifact.path)
        experts = sum(entry.nbytes for entry in header.tensors if is_expert(entry.name)) if header else 0
        layers[index] = LayerBytes(artifact.tensor_bytes, experts)
    if has_experts and any(artifact.path not in headers for artifact in manifest.layers):
        diagnostics.append("expert_bytes_unknown")
    embedding_bytes = manifest.embeddings.tensor_bytes
    if manifest.embeddings.path in headers:
        entries = headers[manifest.embeddings.path].tensors
        embedding_bytes = next((entry.nbytes for entry in entries if entry.name == TOKEN_EMBEDDING), embedding_bytes)
    output = headers.get(manifest.output.path)
    if output is not None:
        has_head = any(entry.name in {OUTPUT_HEAD, TOKEN_EMBEDDING} for entry in output.tensors)
    else:
        has_head = manifest.output.tensor_bytes * 4 >= manifest.embeddings.tensor_bytes
        diagnostics += [] if has_head else ["tied_embeddings_assumed"]
    tally = WeightTally(
        layers, manifest.embeddings.tensor_bytes, manifest.output.tensor_bytes, embedding_bytes, has_head
    )
    return tally, tuple(diagnostics)
