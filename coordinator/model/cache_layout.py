"""What each layer keeps per token and per sequence: attention cache, sliding windows, recurrent state.

Formulas (llama.cpp's cache classes, ENGINES table; ``q`` = bytes of one row in the cache's element type):

    attention     q(key_length · heads_kv) + q(value_length · heads_kv)      per token
    latent (MLA)  q(kv_lora_rank + rope.dimension_count)                     per token, no value cache
    indexer       q(indexer.key_length) more, where sparse attention keeps its own keys
    sliding       the same, but never more than ``sliding_window`` tokens
    state space   ((conv_kernel-1) · (inner + 2·groups·state) + state·inner) · 4      per sequence, F32
    RWKV          (token_shift_count + wkv.head_size) · width · 4
    KDA           (3·(conv_kernel-1)·heads·head_dim + head_dim²·heads) · 4
    short conv    width · (l_cache-1) · 4

A layer without key-value heads, in a model with recurrent keys, is recurrent. Some families say it differently:
``full_attention_interval`` (every n-th layer attends), ``attention.recurrent_layers``, or all layers do both.
Layers that reuse another's cache cost nothing and may not be cut from their source (``ForbiddenBoundary``).
Missing facts raise ``ModelError`` with the key; nothing is guessed downwards.
"""

from dataclasses import dataclass

from config.cache_types import CacheType
from coordinator.model.facts import ArchitectureFacts
from coordinator.model.package import ForbiddenBoundary
from coordinator.model.tensor_types import cache_row_bytes
from coordinator.model.windows import layer_windows

_ALL_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_BOTH = frozenset({"falcon-h1"})
_INTERVAL = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_STATE_KEYS = ("ssm.state_size", "wkv.head_size", "kda.head_dim", "shortconv.l_cache")
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share of ``Layer``: see there for units."""

    kv_bytes_per_token: int = 0
    kv_window_tokens: int | None = None
    recurrent_bytes_per_sequence: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All layers, in order; cuts the layout forbids; codes of what had to be assumed."""

    layers: tuple[LayerCache, ...]
    forbidden: tuple[ForbiddenBoundary, ...]
    diagnostics: tuple[str, ...]


def cache_layout(facts: ArchitectureFacts, layer_count: int, draft_layers: int, cache_type: CacheType) -> CacheLayout:
    """The caches of ``layer_count`` layers, the last ``draft_layers`` of which (NextN) keep none in plain decoding."""
    windows, diagnostics = layer_windows(facts, layer_count)
    recurrent = _recurrent_layers(facts, layer_count, draft_layers)
    attending = _attending_layers(facts, layer_count, recurrent)
    rows = _row_bytes(facts, layer_count, attending, windows, cache_type)
    layers = [
        LayerCache(
            kv_bytes_per_token=rows[index],
            kv_window_tokens=windows[index] if rows[index] else None,
            recurrent_bytes_per_sequence=_state_bytes(facts, index, layer_count) if recurrent[index] else 0,
        )
        for index in range(layer_count)
    ]
    main = layer_count - draft_layers
    owners = _cache_owners(facts, main)
    for index in range(owners, layer_count):
        layers[index] = LayerCache(recurrent_bytes_per_sequence=layers[index].recurrent_bytes_per_sequence)
    return CacheLayout(tuple(layers), _shared_regions(windows, owners, main), diagnostics)


def _recurrent_layers(facts: ArchitectureFacts, layer_count: int, draft_layers: int) -> list[bool]:
    if not any(facts.has(key) for key in _STATE_KEYS):
        return [False] * layer_count
    main = layer_count - draft_layers
    if facts.architecture in _ALL_RECURRENT | _BOTH:
        return [index < main for index in range(layer_count)]
    stated = facts.per_layer("attention.recurrent_layers", layer_count)
    if stated is not None:
        return [index < main and bool(value) for index, value in enumerate(stated)]
    if facts.has("full_attention_interval") or facts.architecture in _INTERVAL:
        interval = facts.integer("full_attention_interval", 4, least=1)
        return [index < main and (index + 1) % interval != 0 for index in range(layer_count)]
    heads = facts.per_layer("attention.head_count_kv", layer_count)
    if heads is None:
        return [index < main for index in range(layer_count)]
    feed_forward = (
        facts.per_layer("feed_forward_length", layer_count) if facts.architecture.startswith("nemotron_h") else None
    )
    silent = [count == 0 and (feed_forward is None or feed_forward[index] == 0) for index, count in enumerate(heads)]
    if feed_forward is None and not any(silent):
        # Every layer has attention heads and the family is unknown: keep room for both kinds of memory.
        return [index < main for index in range(layer_count)]
    return [index < main and value for index, value in enumerate(silent)]


def _attending_layers(facts: ArchitectureFacts, layer_count: int, recurrent: list[bool]) -> list[bool]:
    if facts.architecture in _ALL_RECURRENT:
        return [False] * layer_count
    stated = facts.has("attention.recurrent_layers") or facts.has("full_attention_interval")
    if stated or facts.architecture in _INTERVAL:
        return [not value for value in recurrent]
    return [True] * layer_count


def _row_bytes(
    facts: ArchitectureFacts,
    layer_count: int,
    attending: list[bool],
    windows: tuple[int | None, ...],
    cache_type: CacheType,
) -> list[int]:
    """Cache bytes per token of every layer, before shared caches are taken out."""
    if not any(attending):
        return [0] * layer_count
    indexer = facts.integer("attention.indexer.key_length")
    extra = cache_row_bytes(cache_type, indexer) if indexer else 0
    heads = facts.per_layer("attention.head_count_kv", layer_count)
    if heads is None:
        facts.required("attention.head_count", least=0) if not facts.is_array("attention.head_count") else None
        heads = facts.per_layer("attention.head_count", layer_count)
    assert heads is not None
    if facts.has("attention.key_length_mla") and facts.has("attention.kv_lora_rank"):
        latent = facts.required("attention.kv_lora_rank") + facts.integer("rope.dimension_count")
        row = cache_row_bytes(cache_type, latent) + extra
        return [row if attending[index] and heads[index] else 0 for index in range(layer_count)]
    full = _head_lengths(facts, layer_count, "")
    windowed = _head_lengths(facts, layer_count, "_swa")
    rows = []
    for index in range(layer_count):
        key_length, value_length = windowed if windows[index] is not None else full
        count = heads[index] if attending[index] else 0
        row = cache_row_bytes(cache_type, key_length * count) + cache_row_bytes(cache_type, value_length * count)
        rows.append(row + extra if count else 0)
    return rows


def _head_lengths(facts: ArchitectureFacts, layer_count: int, variant: str) -> tuple[int, int]:
    """Key and value length per head; a windowed layer's may differ; default is width / heads of the first that has any."""
    default = 0
    if not (facts.has("attention.key_length") and facts.has("attention.value_length")):
        queries = facts.per_layer("attention.head_count", layer_count) or ()
        heads = next((count for count in queries if count), 0)
        default = facts.required("embedding_length") // heads if heads else facts.required("attention.key_length")
    key_length = facts.integer("attention.key_length", default, least=1)
    value_length = facts.integer("attention.value_length", default, least=1)
    if not variant:
        return key_length, value_length
    return (
        facts.integer(f"attention.key_length{variant}", key_length, least=1),
        facts.integer(f"attention.value_length{variant}", value_length, least=1),
    )


def _state_bytes(facts: ArchitectureFacts, index: int, layer_count: int) -> int:
    """Bytes one sequence keeps in a recurrent layer, F32."""
    if facts.has("wkv.head_size"):
        shifts = facts.integer("token_shift_count", 2)
        return (shifts + facts.required("wkv.head_size")) * facts.required("embedding_length") * _F32_BYTES
    if facts.has("shortconv.l_cache"):
        return facts.required("embedding_length") * (facts.required("shortconv.l_cache") - 1) * _F32_BYTES
    kernel = facts.required("ssm.conv_kernel")
    if facts.has("kda.head_dim"):
        if not facts.has("attention.head_count"):
            facts.required("attention.head_count")
        heads = (facts.per_layer("attention.head_count", layer_count) or ())[index]
        length = facts.required("kda.head_dim")
        return (3 * (kernel - 1) * heads * length + length * length * heads) * _F32_BYTES
    inner = facts.required("ssm.inner_size")
    state = facts.required("ssm.state_size")
    groups = facts.integer("ssm.group_count")
    return ((kernel - 1) * (inner + 2 * groups * state) + state * inner) * _F32_BYTES


def _cache_owners(facts: ArchitectureFacts, main_layers: int) -> int:
    """How many layers from the start keep a cache of their own; the others reuse one (or, behind the end, have none)."""
    fallback = max(main_layers - 20, 0) if facts.architecture == "gemma3n" else 0
    return main_layers - facts.integer("attention.shared_kv_layers", fallback, most=main_layers - 1)


def _shared_regions(windows: tuple[int | None, ...], owners: int, main_layers: int) -> tuple[ForbiddenBoundary, ...]:
    """A layer without a cache reads that of the last owner of its kind (windowed or full): no cut between the two."""
    reusing = range(owners, main_layers)
    sources = []
    for windowed in {windows[index] is not None for index in reusing}:
        same = [index for index in range(owners) if (windows[index] is not None) == windowed]
        sources.append(same[-1] if same else owners - 1)
    if not sources:
        return ()
    return tuple(ForbiddenBoundary(layer, "shared_kv_region") for layer in range(min(sources) + 1, main_layers))
