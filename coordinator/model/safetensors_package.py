"""A safetensors checkpoint as the planner sees it: every file's header, and ``config.json``.

Layers are found by name (``…layers.N.…``); towers for images or sound go to the first stage. ``lm_head`` absent means
tied embeddings, whose copy is charged to the last stage. Layers behind ``num_hidden_layers`` (multi-token prediction) are
left out, as engines for this format do (``nextn_layers_ignored``). The index, when given, must agree with the files.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from config.cache_types import CacheType
from coordinator.model.config_facts import ConfigFacts
from coordinator.model.digest import DescribedFile, content_digest
from coordinator.model.facts import MAX_BYTES
from coordinator.model.gguf_package import MAX_CONTEXT, MAX_LAYERS
from coordinator.model.json_document import parse_json_object
from coordinator.model.package import Layer, ModelPackage
from coordinator.model.safetensors_header import SafetensorsHeader
from coordinator.model.safetensors_names import is_embedding, is_head, is_routed_expert, safetensors_role
from coordinator.model.source import MemorySource, RangedSource
from coordinator.model.tensor_roles import LayerBytes
from protocol.errors import ModelError

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_INDEX_BYTES = 32 * 1024 * 1024
MAX_INDEX_VALUES = 250_000
"""Tensors of a checkpoint; the largest known has 160 000."""
MAX_FILES = 1_024
_FILE_NAME = re.compile(r"[\w.+-]{1,240}\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All files of one checkpoint, headers read."""

    where: str
    headers: Sequence[SafetensorsHeader]
    sources: Sequence[RangedSource]
    config: bytes


def index_files(content: bytes, where: str) -> dict[str, set[str]]:
    """File name → names of its tensors, from ``model.safetensors.index.json``. Names are checked to be plain."""
    document = parse_json_object(content, where, max_bytes=MAX_INDEX_BYTES, max_values=MAX_INDEX_VALUES)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{where}: weight_map is missing or empty")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or (file not in files and not _FILE_NAME.fullmatch(file)):
            raise ModelError(
                f"{where}: weight_map places {tensor!r:.80} in {file!r:.80}, which is not a file beside it"
            )
        files.setdefault(file, set()).add(tensor)
    if len(files) > MAX_FILES:
        raise ModelError(f"{where}: names {len(files)} files, more than the {MAX_FILES} that are accepted")
    return files


def check_index(files: Mapping[str, set[str]], name: str, header: SafetensorsHeader) -> None:
    """Refuse a file that does not hold the tensors its index places in it."""
    missing = files[name] - {entry.name for entry in header.tensors}
    if missing:
        raise ModelError(f"{header.where}: lacks tensor {min(missing)!r}, which the index places in it")


def read_config(content: bytes, where: str) -> ConfigFacts:
    """``config.json`` with its bounds."""
    document: dict[str, Any] = parse_json_object(content, where, max_bytes=MAX_CONFIG_BYTES, max_values=200_000)
    return ConfigFacts(document, where)


def package_safetensors(
    checkpoint: Checkpoint,
    name: str,
    *,
    cache_type: CacheType = "f16",
    activation_value_bytes: int = 2,
) -> ModelPackage:
    """The package of a whole checkpoint. Raises ``ModelError``."""
    facts = read_config(checkpoint.config, f"{checkpoint.where}/config.json")
    count = facts.integer("layers", most=MAX_LAYERS)
    sums = _Sums(count)
    for header in checkpoint.headers:
        for entry in header.tensors:
            sums.add(entry.name, entry.nbytes)
    if not sums.embedding_bytes:
        raise ModelError(f"{checkpoint.where}: no token embedding; the files are a part of a model, not a whole one")
    caches = facts.layer_caches(count, cache_type)
    used, experts = facts.integer("experts_used", 0, least=0), facts.integer("experts", 0, least=0)
    if used > experts > 0:
        raise ModelError(f"{facts.where}: {used} of only {experts} experts are used per token")
    share = (used, experts) if used and experts else (1, 1)
    weights, diagnostics = sums.layer_bytes(checkpoint.where)
    tied = not sums.has_head
    files = [
        DescribedFile(source, header.header_bytes)
        for source, header in zip(checkpoint.sources, checkpoint.headers, strict=True)
    ]
    config = MemorySource(checkpoint.config)
    package = ModelPackage(
        name=name,
        digest=content_digest([DescribedFile(config, config.size), *files]),
        layers=tuple(_layer(cache, layer, *share) for cache, layer in zip(caches, weights, strict=True)),
        shared_first_bytes=sums.first_bytes,
        shared_last_bytes=sums.last_bytes + (sums.embedding_bytes if tied else 0),
        native_context_length=facts.integer("context", most=MAX_CONTEXT),
        activation_frame_bytes=facts.integer("width") * activation_value_bytes,
        activation_width=facts.integer("width"),
        diagnostics=diagnostics,
        architecture=facts.architecture,
        tied_embeddings=tied,
        cache_type=cache_type,
    )
    if max(package.weight_bytes, package.kv_bytes_per_token) > MAX_BYTES:
        raise ModelError(f"{checkpoint.where}: claims sizes beyond 2^53 bytes; the files are damaged")
    return package


def _layer(cache: Layer, weights: LayerBytes, used: int, experts: int) -> Layer:
    dense = weights.weight_bytes - weights.expert_bytes
    streamed = dense + -(-weights.expert_bytes * used // experts)
    return replace(cache, weight_bytes=weights.weight_bytes, streamed_bytes=streamed)


class _Sums:
    """Adds up bytes by role."""

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._layers: dict[int, LayerBytes] = {}
        self._names: set[str] = set()
        self._ignored_layers = False
        self.first_bytes = self.last_bytes = self.embedding_bytes = 0
        self.has_head = False

    def add(self, name: str, nbytes: int) -> None:
        if name in self._names:
            raise ModelError(f"tensor {name!r} appears in two files")
        self._names.add(name)
        role = safetensors_role(name, self._layer_count)
        if role is None:
            self._ignored_layers = True
        elif role.layer is not None:
            layer = self._layers.setdefault(role.layer, LayerBytes())
            layer.weight_bytes += nbytes
            layer.expert_bytes += nbytes if is_routed_expert(name) else 0
        elif role.last:
            self.last_bytes += nbytes
            self.has_head = self.has_head or is_head(name)
        else:
            self.first_bytes += nbytes
            self.embedding_bytes += nbytes if is_embedding(name) else 0

    def layer_bytes(self, where: str) -> tuple[list[LayerBytes], tuple[str, ...]]:
        diagnostics = ("nextn_layers_ignored",) if self._ignored_layers else ()
        if not self._layers:
            raise ModelError(f"{where}: holds no layer weights")
        if len(self._layers) == self._layer_count:
            return [self._layers[index] for index in range(self._layer_count)], diagnostics
        total = sum(layer.weight_bytes for layer in self._layers.values())
        experts = sum(layer.expert_bytes for layer in self._layers.values())
        share = LayerBytes(-(-total // self._layer_count), experts // self._layer_count)
        return [share] * self._layer_count, ("layer_weights_uniform_fallback", *diagnostics)
