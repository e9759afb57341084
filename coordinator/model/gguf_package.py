"""A GGUF model as the planner sees it.

Weights are exact per layer when the block indices are ``0 .. block_count-1`` without a gap; otherwise every layer gets
⌈total / layers⌉ and the diagnostic ``layer_weights_uniform_fallback`` says so. Trailing NextN blocks (multi-token
prediction) count as layers and stay resident, but plain decoding neither streams them nor keeps a cache for them; a file
that ships without their weights is complete all the same. With tied embeddings the head's copy is charged to the last
stage as well. ``block_count``, ``context_length``, ``embedding_length`` and what the caches need are required; a missing
one is a ``ModelError`` that names the key.
"""

from collections.abc import Sequence

from config.cache_types import CacheType
from coordinator.model.cache_layout import cache_layout
from coordinator.model.digest import DescribedFile, content_digest
from coordinator.model.facts import MAX_BYTES, ArchitectureFacts
from coordinator.model.gguf_header import MAX_HEADER_BYTES, MAX_TENSORS, GgufHeader, read_gguf_header
from coordinator.model.gguf_shards import GgufModel, join_shards
from coordinator.model.package import Layer, ModelPackage
from coordinator.model.source import RangedSource
from coordinator.model.tensor_roles import TOKEN_EMBEDDING, LayerBytes, WeightTally, expert_share, tally
from protocol.errors import ModelError

MAX_LAYERS = 1_024
MAX_CONTEXT = 1 << 40


def read_gguf_model(sources: Sequence[tuple[str, RangedSource]]) -> tuple[GgufModel, list[GgufHeader]]:
    """The headers of all shards, in order, joined; ``sources`` pairs the name used in errors with the bytes."""
    headers = []
    for where, source in sources:
        headers.append(read_gguf_header(source, where))
        if sum(header.header_bytes for header in headers) > MAX_HEADER_BYTES:
            raise ModelError(f"{where}: the shards' headers exceed {MAX_HEADER_BYTES} bytes; refused")
        if sum(len(header.tensors) for header in headers) > MAX_TENSORS:
            raise ModelError(f"{where}: the shards hold more than the {MAX_TENSORS} tensors that are accepted")
    return join_shards(headers), headers


def package_gguf(
    sources: Sequence[tuple[str, RangedSource]],
    name: str,
    *,
    cache_type: CacheType = "f16",
    activation_value_bytes: int = 2,
) -> ModelPackage:
    """The package of a whole model; ``name`` is used when the file has no ``general.name``. Raises ``ModelError``."""
    model, headers = read_gguf_model(sources)
    files = [DescribedFile(source, header.header_bytes) for (_, source), header in zip(sources, headers, strict=True)]
    facts = ArchitectureFacts(model.metadata, model.where)
    _require_language_model(facts, model)
    weights = tally((tensor.entry.name, tensor.entry.nbytes) for tensor in model.tensors)
    if not weights.embedding_bytes:
        raise ModelError(f"{model.where}: {TOKEN_EMBEDDING} is missing; the file is a part of a model, not a whole one")
    return describe(
        facts,
        weights,
        name=facts.text("general.name") or name,
        digest=content_digest(files),
        cache_type=cache_type,
        activation_value_bytes=activation_value_bytes,
    )


def describe(
    facts: ArchitectureFacts,
    weights: WeightTally,
    *,
    name: str,
    digest: str,
    cache_type: CacheType,
    activation_value_bytes: int,
    layer_count: int | None = None,
) -> ModelPackage:
    """Metadata and weight sums as a package; ``layer_count`` overrides ``block_count`` (a layer package states its own)."""
    count = layer_count if layer_count is not None else facts.required("block_count", most=MAX_LAYERS)
    draft = facts.integer("nextn_predict_layers", most=max(count - 1, 0))
    context = facts.required("context_length", most=MAX_CONTEXT)
    width = facts.required("embedding_length")
    caches = cache_layout(facts, count, draft, cache_type)
    shares, share_diagnostics = expert_share(facts, count)
    layer_bytes, weight_diagnostics = _layer_bytes(weights, count, draft)
    layers = tuple(
        Layer(
            weight_bytes=sums.weight_bytes,
            streamed_bytes=0 if index >= count - draft else _streamed(sums, *shares[index]),
            kv_bytes_per_token=cache.kv_bytes_per_token,
            kv_window_tokens=cache.kv_window_tokens,
            recurrent_bytes_per_sequence=cache.recurrent_bytes_per_sequence,
        )
        for index, (sums, cache) in enumerate(zip(layer_bytes, caches.layers, strict=True))
    )
    tied = not weights.has_head
    package = ModelPackage(
        name=name,
        digest=digest,
        layers=layers,
        shared_first_bytes=weights.first_bytes,
        shared_last_bytes=weights.last_bytes + (weights.embedding_bytes if tied else 0),
        native_context_length=context,
        activation_frame_bytes=width * facts.integer("altup.num_inputs", 1, least=1) * activation_value_bytes,
        activation_width=width,
        forbidden_boundaries=caches.forbidden,
        required_sideband_bytes=facts.integer("embedding_length_per_layer_input") * count * activation_value_bytes,
        diagnostics=(*weight_diagnostics, *share_diagnostics, *caches.diagnostics),
        architecture=facts.architecture,
        tied_embeddings=tied,
        cache_type=cache_type,
    )
    _require_plausible(package, facts.where)
    return package


def _require_language_model(facts: ArchitectureFacts, model: GgufModel) -> None:
    kind = facts.text("general.type")
    if kind not in {"", "model"} or facts.architecture in {"clip", "mmproj"}:
        raise ModelError(f"{model.where}: holds {kind or facts.architecture!r}, not a language model")
    if not model.tensors:
        raise ModelError(f"{model.where}: holds no tensors; a vocabulary or an incomplete model, not a whole one")


def _streamed(sums: LayerBytes, used: int, count: int) -> int:
    """Bytes one token reads: everything but the experts it does not choose, rounded up."""
    return sums.weight_bytes - sums.expert_bytes + -(-sums.expert_bytes * used // count)


def _layer_bytes(weights: WeightTally, count: int, draft: int) -> tuple[list[LayerBytes], tuple[str, ...]]:
    present = set(weights.layers)
    if present == set(range(count)):
        return [weights.layers[index] for index in range(count)], ("nextn_layers_not_streamed",) if draft else ()
    if draft and present == set(range(count - draft)):
        return [weights.layers.get(index, LayerBytes()) for index in range(count)], ("nextn_weights_absent",)
    total = sum(layer.weight_bytes for layer in weights.layers.values())
    experts = sum(layer.expert_bytes for layer in weights.layers.values())
    share = LayerBytes(-(-total // count), experts // count)
    return [share] * count, ("layer_weights_uniform_fallback",)


def _require_plausible(package: ModelPackage, where: str) -> None:
    largest = max(
        package.weight_bytes,
        package.kv_bytes_per_token,
        sum(layer.recurrent_bytes_per_sequence for layer in package.layers),
        package.activation_frame_bytes + package.required_sideband_bytes,
    )
    if largest > MAX_BYTES:
        raise ModelError(f"{where}: claims sizes beyond 2^53 bytes; the file is damaged")
    if not any(layer.weight_bytes for layer in package.layers):
        raise ModelError(f"{where}: holds no layer weights (no blk.N tensors)")
